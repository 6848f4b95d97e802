"""Files of thresholds: the sizes that ``python -m hpcdist tune`` measured on a site's machines, by processor.

JSON: the processor's name, then the MPI library, then the number of ranks on the node or the kind of nodes, then the
collective, then bytes, with null for never. ``HPCDIST_SHM`` names a file; if it is not set, the first of
``installed_files`` that knows the processor holds: a user's own, that of the Python environment, that of the machine.
Rank 0 of the default group reads it for all ranks.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Any

from hpcdist.launch.topology import processor

VARIABLE = "HPCDIST_SHM"
NEVER = sys.maxsize
SEVERAL, FLAT = "nodes of several ranks", "nodes of one rank"

# (library, number of ranks on one node or the kind of nodes) -> collective -> bytes; the rest is MPI's
Measured = dict[tuple[str, int | str], dict[str, int]]
Content = dict[str, dict[str, dict[str, dict[str, int | None]]]]


def users_file() -> Path:
    """Return the path of a user's own file, by the XDG Base Directory Specification.

    If the user's home is unknown, as in a container with another user's number, it begins with ``~``.
    """
    folder = os.path.expanduser(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    return Path(folder) / "hpcdist" / "thresholds.json"


def installed_files() -> list[Path]:
    """Return the files that are searched if ``HPCDIST_SHM`` is not set, in order."""
    files = [users_file(), *(Path(root) / "etc" / "hpcdist" / "thresholds.json" for root in (sys.prefix, "/"))]
    return [each for each in files if each.is_absolute()]


def find() -> tuple[str, str, Measured] | ValueError:
    """Return ``HPCDIST_SHM``, the file that applies in this process if there is one, and its rows of this processor.

    An error in a file is returned, for the caller to raise on every rank.
    """
    text = os.environ.get(VARIABLE, "").strip()
    named = [Path(os.path.expanduser(text))] if is_file(text) else []
    files = named if text else [*filter(os.path.exists, installed_files())]
    try:
        for file in files:
            if found := measured(read(file), processor()):
                return text, str(file), found
    except ValueError as error:
        return error
    return text, "", {}


def is_file(text: str) -> bool:
    return Path(text).suffix == ".json"


def read(path: Path) -> Content:
    """Read a file; ValueError if it is missing or malformed."""
    try:
        content: Content = json.loads(path.read_text(encoding="utf-8"))
        for name in content.keys():  # noqa: SIM118  # a list, which has none, is not what tune wrote
            measured(content, name)
    except (OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError) as error:
        expected = "expected the file that `python -m hpcdist tune` wrote"
        place = f"{str(path)!r} on {socket.gethostname()}"  # rank 0's host, whose file is read for all
        raise ValueError(f"thresholds of shared memory in {place}: {error}; {expected}") from error
    return content


def measured(content: Content, name: str) -> Measured:
    """Return a file's rows of one processor."""
    return {
        (library, place if place in (SEVERAL, FLAT) else positive(place)): {
            row: NEVER if nbytes is None else positive(nbytes) for row, nbytes in rows.items()
        }
        for library, places in content.get(name, {}).items()
        for place, rows in places.items()
    }


def positive(value: Any) -> int:
    """Return a number of ranks or bytes; ValueError for less than one."""
    if (number := int(value)) < 1:
        raise ValueError(f"{value!r} is not a number of 1 or more")
    return number


def write(path: Path, library: str, place: int | str, found: dict[str, int]) -> None:
    """Add the measurements of this processor to a file, in place of those of the same ranks or kind of nodes.

    The file is replaced as a whole: every job reads it, and fails if a full disk has left it empty.
    """
    content = read(path) if path.exists() else {}
    rows = {name: None if nbytes == NEVER else nbytes for name, nbytes in found.items()}
    content.setdefault(processor(), {}).setdefault(library, {})[str(place)] = rows
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        unfinished.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        unfinished.replace(path.resolve())  # of a link: what it points to
    finally:
        unfinished.unlink(missing_ok=True)
