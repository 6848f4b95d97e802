"""What N ranks cost, on Open MPI: ``python -m tests.bench.scaling FILE [N ...]`` adds some N to a file of figures.

Printed as a table of all N in the file: rank 0's figure and, if another rank has more, the most of any rank. Processes
are forked from one that has imported torch, so that 256 of them fit into 24 GiB. ``docs/figures.py`` draws the file.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

from hpcdist.cli.bench import report
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


def measured(path: Path, sizes: list[int]) -> list[dict]:
    """Count for some numbers of ranks, and return all lines of the file, in which each is kept once it is counted."""
    kept = json.loads(path.read_text()) if path.exists() else {"rows": []}
    for size in sizes:
        rows = [each for each in kept["rows"] if each["ranks"] != size] + counted(size)
        kept = {"machine": report.machine(), "rows": sorted(rows, key=lambda each: each["ranks"])}
        path.write_text(json.dumps(kept, indent=1) + "\n")
    return list(kept["rows"])


if __name__ == "__main__":
    found = measured(Path(sys.argv[1]), [int(each) for each in sys.argv[2:]] or SIZES)
    for counted_name in COUNTED:
        print(*table(found, counted_name), "", sep="\n")
