"""What N ranks cost, as a table: ``python -m tests.bench.scaling [N ...]``, on Open MPI.

Each cell has rank 0's figure and, if another rank has more, the most of any rank. Processes are forked from one that
has imported torch, so that 256 of them fit into 24 GiB.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict

from tests import forked

SIZES = [2, 8, 32, 64, 128, 256]
COUNTED = ("messages", "bytes", "datagrams", "sockets", "threads", "kilobytes")
OPTIONS = ["--mca", "pml_monitoring_enable", "1"]


def counted(ranks: int, seconds: float = 3000.0, **variables: str) -> list[dict]:
    """Return the lines of ``scaling_job.py`` on some ranks."""
    done = forked.mpirun(ranks, ["tests/bench/scaling_job.py"], seconds, options=OPTIONS, **variables)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def table(rows: list[dict], name: str) -> list[str]:
    """Return the lines of a table: what is counted under a name, step by step, against the number of ranks."""
    sizes = sorted({row["ranks"] for row in rows})
    steps: dict[str, dict[int, str]] = defaultdict(dict)
    for row in rows:
        own, most = row[name]
        steps[row["step"]][row["ranks"]] = f"{own:,}" if own == most else f"{own:,} / {most:,}"
    head = [f"| {name} of a rank | {' | '.join(map(str, sizes))} |", "|---" * (len(sizes) + 1) + "|"]
    return head + [f"| {step} | {' | '.join(cells.values())} |" for step, cells in steps.items()]


if __name__ == "__main__":
    found: list[dict] = []
    for size in [int(each) for each in sys.argv[1:]] or SIZES:
        found += counted(size)
    for counted_name in COUNTED:
        print(*table(found, counted_name), "", sep="\n")
