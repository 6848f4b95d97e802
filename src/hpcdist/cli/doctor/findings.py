"""Findings of the doctor: one line of the page each, with its level, its text and the command that fixes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from hpcdist.core.ranks import format_ranks, ranks_by_value

Facts = dict[str, Any]  # the facts of one rank

OK, NOTE, ADVICE, PROBLEM = "ok", "note", "advice", "problem"  # only problems make the exit status 1


class Finding(NamedTuple):
    """The result of one check."""

    level: str
    text: str
    remedy: str = ""  # the command, or the line of a job script, that fixes it


def differing(values: Iterable[str | None]) -> str:
    """Return the ranks of each value as text; empty if all have the same."""
    if len(seen := ranks_by_value(values)) < 2:
        return ""
    return "; ".join(f"{value or 'none'} on {format_ranks(those)}" for value, those in seen.items())
