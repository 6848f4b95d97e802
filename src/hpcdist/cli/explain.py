"""The command ``explain``: says what a message of hpcdist means, what causes it and how to fix it, without a network.

``python -m hpcdist explain lost-rank`` prints an entry. Any other text is taken as a message, whose entry is searched;
without arguments it lists all. The entries are those of the page ``docs/reference/errors.md``, which is installed with
the package.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from difflib import get_close_matches
from typing import NamedTuple

from hpcdist.cli.job_arguments import JobParser, is_first_rank, wrap
from hpcdist.cli.submit import CHECKOUT, installed

ANYTHING = "…"  # in a message of the page: a part that differs from case to case
SHORTEST = 12  # characters of a part that identifies a message
LINK = re.compile(r"\[([^\]]+)\]\(([^)#]+)[^)]*\)")
TITLE = re.compile(r"\*\*(\w+)\.\*\*")  # of a paragraph


class Entry(NamedTuple):
    """An entry of the page."""

    name: str  # its name in messages
    messages: list[str]  # its messages; ``…`` is any text
    text: str  # cause and fix, in Markdown

    def fit(self, message: str) -> int:
        """Return the fixed characters of its longest pattern that matches a message; 0 without a match."""
        given = " ".join(message.split())
        return max((len(each.replace(ANYTHING, "")) for each in self.messages if matches(each, given)), default=0)

    def shown(self) -> str:
        text = LINK.sub(lambda link: f"{link[1]} ({posixpath.normpath(f'docs/reference/{link[2]}')})", self.text)
        paragraphs = map(wrap, TITLE.sub(r"\1:", text).split("\n\n"))
        messages = (wrap(f"    {each}", " " * 8) for each in self.messages)
        return "\n".join([self.name, *messages, "", "\n\n".join(paragraphs)])


def matches(pattern: str, message: str) -> bool:
    """Tell whether a message contains a pattern of the page, or is a part of it."""
    place = 0
    for part in pattern.split(ANYTHING):
        if (found := message.find(part, place)) < 0:
            return len(message) >= SHORTEST and message in pattern
        place = found + len(part)
    return True


def entries() -> dict[str, Entry]:
    page = installed("errors.md", CHECKOUT.parent / "docs/reference").read_text(encoding="utf-8")
    found = {}
    for section in re.split(r"^### ", page, flags=re.MULTILINE)[1:]:
        name, messages, text = re.split(r"\n\n```text\n|\n```\n", section, maxsplit=2)
        found[name] = Entry(name, messages.splitlines(), text.partition("\n## ")[0].strip())
    return found


def best(message: str, among: dict[str, Entry]) -> Entry | None:
    """Return the entry with the longest pattern that matches a message, or None."""
    found = max(among.values(), key=lambda entry: entry.fit(message))
    return found if found.fit(message) else None


def parser() -> JobParser:
    made = JobParser("explain", __doc__)
    made.add_argument("message", nargs="*", help="an entry's name, or a message of hpcdist; all names without it")
    return made


def run(args: list[str]) -> int:
    """Print an entry, or the list of all; return 0, or 1 if no entry has this name or message."""
    asked = " ".join(parser().parse_args(args).message)
    known = entries()
    entry = known.get(asked) or best(asked, known)
    if not is_first_rank():
        return int(bool(asked) and entry is None)
    if not asked:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print("\n".join(f"{each.name:<20} {each.messages[0]}"[:width] for each in known.values()))
        return 0
    if entry is None:
        near = ", ".join(get_close_matches(asked, known))
        others = f"near: {near}" if near else "all names: python -m hpcdist explain"
        print(f"no entry for {asked!r}; {others}", file=sys.stderr)
        return 1
    print(entry.shown())
    return 0
