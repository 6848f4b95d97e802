"""Printed text: sizes, times, tables, hints, foreign text without control characters, and lines for stderr."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

FORWARD_SECONDS = 0.2  # seconds that written text takes to reach the launcher on a busy machine


def add_hint(text: str, name: str) -> str:
    """Return a message with the command that prints its entry on the page of errors; a test finds each entry."""
    return f"{text} [python -m hpcdist explain {name}]"


def format_size(nbytes: float) -> str:
    """Return a number of bytes with a unit: ``1.5 KiB``, ``64 MiB``."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if nbytes >= 1024:
            nbytes, unit = nbytes / 1024, larger
    return f"{nbytes:.0f} {unit}" if nbytes >= 10 or nbytes % 1 == 0 else f"{nbytes:.1f} {unit}"


def format_time(seconds: float) -> str:
    """Return a time with three digits and a unit: ``12.3 µs``, ``4.56 ms``."""
    unit, name = unit_of(seconds)
    return f"{seconds / unit:.3g} {name}"


def unit_of(seconds: float) -> tuple[float, str]:
    """Return the unit in which a time is written: its seconds and its name."""
    return next((unit for unit in ((1.0, "s"), (1e-3, "ms")) if seconds >= 0.9995 * unit[0]), (1e-6, "µs"))


def aligned_text(rows: Iterable[Sequence[str]], to_the_left: set[int]) -> str:
    """Return rows of cells as lines with columns of one width."""
    cells = list(rows)
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in to_the_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def printable(text: str) -> str:
    """Return a text with control characters, which a terminal would obey, as Python writes them."""
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)


def write_to_stderr(text: str) -> None:
    """Write to stderr, whole, if possible; the caller, which may be about to abort the job, goes on in any case.

    While torch's hook for uncaught exceptions runs, ``sys.stderr`` is a buffer that torch prints after the earlier
    hooks have returned; ours aborts the job instead. So a buffer is not used.
    """
    stream = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) else sys.stderr
    with suppress(Exception):  # it is None, closed, broken, or the program's own object
        sys.stdout.flush()
    with suppress(Exception):
        stream.write(text)  # type: ignore[union-attr]  # None is one of the cases
        stream.flush()  # type: ignore[union-attr]


def format_value(value: Any) -> str:
    """Return a caller's value as text for an error, cut; of a tensor the shape: ``repr`` of freed memory crashes."""
    return f"a tensor of shape {tuple(value.shape)}" if hasattr(value, "untyped_storage") else f"{value!r:.80}"
