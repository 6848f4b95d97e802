"""Text of a set of ranks, as errors, reports and the doctor print it."""

from __future__ import annotations

from collections.abc import Sequence

RUNS_SHOWN = 16


def listed(ranks: Sequence[int]) -> str:
    """Return ranks as text: ``rank 3``, ``ranks 0 to 6, 9``; cut if there are many runs."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs[:RUNS_SHOWN]]
    if len(runs) > RUNS_SHOWN:
        parts.append(f"… ({len(ranks)} in all)")
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"
