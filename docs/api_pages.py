"""Pages of the reference: the public names by chapter, written from ``hpcdist.__all__`` at each build.

A name goes where its module says; what is torch's own type is listed, not described a second time.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import hpcdist

# module of the facade -> its chapter; other modules get a chapter by their docstring's first line
CHAPTERS = {
    "lifecycle": "The world begins and ends",
    "groups": "Groups",
    "queries": "Who am I?",
    "collectives": "Collectives on tensors and lists of tensors",
    "varied": "Collectives of varied sizes",
    "point_to_point": "Messages between two ranks",
    "halo": "Messages to neighbours",
    "objects": "Objects",
    "node_shared": "Memory that ranks share",
    "window": "Memory that ranks share",
    "coalescing": "Several calls as one",
    "names": "Backends",
    "device_mesh": "Ranks in several dimensions",
    "shrink": "Going on without some ranks",
    "elastic": "Going on without some ranks",
    "debug": "Looking into a job, and stopping it",
    "profile": "Looking into a job, and stopping it",
    "rendezvous": "Finding the other processes",
    "multigpu": "Legacy: several devices a process",
    "dist2": "Object-oriented groups",
    "group": "Types",
    "work": "Types",
}
FOLDER = Path(__file__).parent / "reference" / "api"


def chapter_of(value: object) -> str | None:
    """Return the chapter of a public object, or None for what is torch's own."""
    if inspect.ismodule(value):
        return CHAPTERS[value.__name__.rsplit(".", 1)[-1]]
    name = getattr(value, "__module__", None) or type(value).__module__
    if not name.startswith("hpcdist"):
        return None
    last = name.rsplit(".", 1)[-1]
    if last in CHAPTERS:
        return CHAPTERS[last]
    module = inspect.getmodule(value)
    return ((module.__doc__ if module else None) or last).strip().splitlines()[0].rstrip(".?:")


def write() -> None:
    """Write a page for each chapter and the list of them."""
    chapters: dict[str, list[str]] = {title: [] for title in CHAPTERS.values()}
    torchs = []
    for name in hpcdist.__all__:
        chapter = chapter_of(getattr(hpcdist, name))
        if chapter is None:
            torchs.append(name)
        else:
            chapters.setdefault(chapter, []).append(name)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.rst"):
        old.unlink()
    pages = []
    for number, (title, names) in enumerate(chapters.items()):
        if not names:
            continue
        lines = [title, "=" * len(title), "", ".. currentmodule:: hpcdist", ""]
        for name in names:
            value = getattr(hpcdist, name)
            if inspect.ismodule(value):
                lines += [
                    f".. automodule:: {value.__name__}",
                    "   :members:",
                    "   :imported-members:",
                    "   :no-index:",
                    "",
                ]
            elif inspect.isclass(value):
                lines += [f".. autoclass:: {name}", "   :members:", "   :exclude-members: __new__, __init__", ""]
            elif callable(value):
                lines += [f".. autofunction:: {name}", ""]
            else:
                lines += [f".. autodata:: {name}", "   :no-value:", ""]
        page = f"{number:02d}"
        pages.append(page)
        (FOLDER / f"{page}.rst").write_text("\n".join(lines) + "\n")
    title = "torch's own types"
    shown = [f"``{name}``" for name in torchs]
    lines = [
        title,
        "=" * len(title),
        "",
        "The same objects as in ``torch.distributed``, so that ``isinstance`` and ``except`` work across both:",
        "",
        ", ".join(shown) + ".",
        "",
    ]
    (FOLDER / "torch.rst").write_text("\n".join(lines))
    (FOLDER / "index.rst").write_text(
        "\n".join(
            [
                "API",
                "===",
                "",
                "Every public name of ``hpcdist``, with the signature of ``torch.distributed``'s of the same name.",
                "",
                ".. toctree::",
                "   :maxdepth: 2",
                "",
                *[f"   {page}" for page in [*pages, "torch"]],
                "",
            ]
        )
    )
