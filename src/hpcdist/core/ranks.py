"""Ranks: conversion of callers' ranks, grouping by value, and their text in errors and reports."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

from hpcdist.core.printing import format_value

RUNS_SHOWN = 16
Value = TypeVar("Value", bound=Hashable)


def as_int(value: Any, name: str) -> int:
    """Return a caller's integer, or tensor of one, as an int; TypeError for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {format_value(value)} of type {type(value).__name__}; expected an int") from None


def as_rank(value: Any) -> int:
    """Return a caller's rank as an int; TypeError unless it is an integer."""
    return as_int(value, "a rank")


def ranks_by_value(values: Iterable[Value]) -> dict[Value, list[int]]:
    """Return the ranks that have each value, given that of every rank in order."""
    ranks: dict[Value, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def runs_of(ranks: Iterable[int]) -> list[list[int]]:
    """Return ranks as the first and the last one of each run, in order."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return runs


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text: ``rank 3``, ``ranks 0 to 6, 9``; cut if there are many runs."""
    runs = runs_of(ranks)
    parts = [
        f"{first} to {last}" if last > first + 1 else ", ".join(map(str, range(first, last + 1)))
        for first, last in runs[:RUNS_SHOWN]
    ]
    if len(runs) > RUNS_SHOWN:
        parts.append(f"… ({len(ranks)} in all)")
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"


def format_count(number: int, what: str) -> str:
    """Return a number of things as text: ``1 rank``, ``3 ranks``."""
    return f"{number} {what}{'' if number == 1 else 's'}"
