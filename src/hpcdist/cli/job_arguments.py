"""Help and arguments of the commands: if every rank of a job runs one, only rank 0 prints help and errors."""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import textwrap
from contextlib import suppress
from typing import Any

from hpcdist.launch import environment


def is_first_rank() -> bool:
    """Tell whether this process prints for its job: it is rank 0, or has no launcher."""
    launch = environment.detect()
    return launch is None or launch.rank == 0


def description_of(docstring: str | None) -> str:
    """Return a command's docstring for its help: without the name and RST's marks."""
    text = re.sub(r"^(The command|Subject) ``\w+``: ", "", docstring or "").replace("``", "")
    return text[:1].upper() + text[1:]


def wrap(text: str, indent: str = "") -> str:
    """Break a paragraph into lines for the terminal, indented after the first."""
    width = shutil.get_terminal_size().columns
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def positive(text: str) -> float:
    """Read a number above 0."""
    with suppress(ValueError):
        if 0 < (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")


def count(text: str) -> int:
    """Read a count, a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, 1 or more")
    return int(text)


file = os.path.expanduser  # reads a file's name: shells do not expand the ``~`` of ``--json=~/page.json``


class JobParser(argparse.ArgumentParser):
    """Parser of a command, described by its module: prints help and errors once in a job; no abbreviated options."""

    def __init__(self, command: str, docstring: str | None) -> None:
        super().__init__(prog=f"python -m hpcdist {command}", description=description_of(docstring), allow_abbrev=False)

    def _print_message(self, message: str, file: Any = None) -> None:
        if is_first_rank():
            super()._print_message(message, file)
