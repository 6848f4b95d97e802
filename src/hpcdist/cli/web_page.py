"""Pages for the browser: one file each, without external files, for light and dark, narrow and wide screens."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from string import Template

# name -> its color on a light and on a dark screen; a page and its plots name colors as var(--NAME)
COLORS = {
    "paper": ("#ffffff", "#15181c"),
    "shade": ("#f1f3f5", "#22262c"),
    "line": ("#d8dce1", "#3a4048"),
    "ink": ("#1b1f24", "#e4e7eb"),
    "faint": ("#5b6570", "#9aa4af"),
    "good": ("#1a7f37", "#4ac26b"),
    "warn": ("#8a5a00", "#e3a93a"),
    "bad": ("#c0242c", "#ff7b72"),
    # colors of the sides of a plot, in order; they differ in lightness too
    "side0": ("#0b57c4", "#6cb0ff"),
    "side1": ("#d35400", "#ff9d4d"),
    "side2": ("#2a8a4a", "#5fd38a"),
    "side3": ("#7a7f87", "#a0a7b0"),
    "side4": ("#8a3ab9", "#cf9bf2"),
    "side5": ("#946c00", "#d6b656"),
}
TEMPLATE = Path(__file__).with_name("web_page.html")


def stylesheet() -> str:
    light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in COLORS.items()) for i in (0, 1))
    return f":root{{{light}}}\n@media (prefers-color-scheme: dark) {{:root{{{dark}}}}}"


def section(title: str, *parts: str) -> str:
    return "\n".join(["<section>", f"<h2>{escape(title)}</h2>", *parts, "</section>"])


def table(head: Iterable[str], rows: Iterable[Iterable[str]], is_of_words: bool = False) -> str:
    """Return a table, of numbers or of words; ``rows`` are HTML, ``head`` is text."""
    first = "".join(f"<th>{escape(name)}" for name in head)
    others = "".join(f"<tr>{''.join(f'<td>{cell}' for cell in row)}\n" for row in rows)
    return f'<div class="wide"><table{" class=words" * is_of_words}><tr>{first}\n{others}</table></div>'


def page(title: str, parts: Iterable[str], seconds: float | None = None) -> str:
    """Return a page of parts in HTML, which a browser reloads after some seconds, if given."""
    again = f'<meta http-equiv="refresh" content="{seconds:g}">' if seconds else ""
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title), again=again, colors=stylesheet(), parts="\n".join(parts)
    )


def write(path: str, title: str, parts: Iterable[str]) -> None:
    Path(path).write_text(page(title, parts), encoding="utf-8")
