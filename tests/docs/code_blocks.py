"""Code blocks of a page, and how each of them is run.

A block's marks stand after its language, in the words of this table (GitHub and Sphinx only read the language):

    ```python                       run by itself: hpcdist's loopback, one process
    ```python mpirun=2              run on two ranks
    ```python mpirun=4 ulfm         with `mpirun --with-ft ulfm`; skipped, visibly, without Open MPI
    ```python torchrun=2            run by torchrun
    ```python file=train.py         written to that file, which a later block of the page must start
    ```python needs=NAME            as above, but only if hpcdist has NAME, a module or a public
                                    name, or if there is a package of that name; gpu is a GPU
    ```bash                         run by bash, in a folder of the page's own, with this environment's programs first
    ```bash fails                   the same, and its exit status must not be 0
    ```bash cluster                 read by `bash -n`, not run: it needs a cluster, a container or root
    ```bash network                 the same: it installs from the network
    ```bash make                    the same: it is what CI runs by itself
    ```bash parsed                  the same, and the arguments of each command of hpcdist are parsed by its own parser:
                                    tests/cli run the commands
    ```bash pmi2 and so on          anything else is an error

Text that is no program has another language: text, console output, toml, ini, json, or none.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
OPENING = re.compile(r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>.*)$")
PROSE = {"", "text", "toml", "ini", "json", "c", "yaml", "diff", "slurm"}
WORDS = {"ulfm", "fails", "cluster", "network", "make", "parsed"}
SETTINGS = {"mpirun", "torchrun", "file", "needs"}
NOT_RUN = {"cluster", "network", "make", "parsed"}


class Block(NamedTuple):
    """One code block of a page."""

    page: Path
    line: int
    language: str
    words: frozenset[str]
    settings: dict[str, str]
    text: str

    @property
    def place(self) -> str:
        """Where it is, as an editor takes it."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Return every page that a reader may copy from."""
    tops = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    return [*tops, *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]


def blocks(page: Path) -> list[Block]:
    """Return a page's blocks of code; ValueError for one whose marks are unknown."""
    found = []
    lines = iter(enumerate(page.read_text().splitlines(), 1))
    for number, line in lines:
        opening = OPENING.match(line)
        if opening is None:
            continue
        body = []
        for _, inner in lines:
            if inner.strip() == opening["fence"]:
                break
            body.append(inner.removeprefix(opening["indent"]))
        info = opening["info"].strip()
        if info.startswith("{"):
            continue  # a directive of the documentation's own
        language, *marks = info.split() or [""]
        if language in PROSE:
            continue
        settings = dict(mark.split("=", 1) for mark in marks if "=" in mark)
        words = frozenset(mark for mark in marks if "=" not in mark)
        place = f"{page}:{number}"
        if language not in ("python", "bash"):
            raise ValueError(f"{place}: language {language!r} (known: python, bash, {', '.join(sorted(PROSE))})")
        if words - WORDS or settings.keys() - SETTINGS:
            known = ", ".join(sorted(WORDS | {f"{name}=" for name in SETTINGS}))
            raise ValueError(f"{place}: unknown mark among {marks} (known: {known})")
        found.append(Block(page, number, language, words, settings, "\n".join(body) + "\n"))
    return found
