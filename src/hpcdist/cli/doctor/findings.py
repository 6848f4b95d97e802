"""Findings of the doctor: one line of the page each, with its level, its text and the command that fixes it."""

from __future__ import annotations

from typing import Any, NamedTuple

Facts = dict[str, Any]  # topic -> what one rank found

OK, NOTE, ADVICE, PROBLEM = "ok", "note", "advice", "problem"
LEVELS = (OK, NOTE, ADVICE, PROBLEM)  # only a problem makes the exit status 1


class Finding(NamedTuple):
    """The result of one check."""

    level: str
    text: str
    remedy: str = ""  # the command, or the line of a job script, that fixes it
