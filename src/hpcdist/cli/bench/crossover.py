"""Subject ``crossover``: the sizes from which shared memory is faster than MPI on this machine, for ``HPCDIST_SHM``.

``mpirun -n N python -m hpcdist bench crossover --json FILE.json`` times the shared-memory implementation beside raw MPI
calls for each collective that has one, and adds the sizes at which the faster side changes to the file. Run it once for
each number of ranks a node that your jobs use; they read the file if ``HPCDIST_SHM=FILE.json`` is set.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.distributed import ReduceOp

from hpcdist.backends.mpi.node import thresholds
from hpcdist.backends.mpi.node.calls import SHARED_CALLS
from hpcdist.backends.mpi.node.collectives import NodeShared
from hpcdist.cli.bench import plots
from hpcdist.cli.bench.collectives import COLLECTIVES, buffers
from hpcdist.cli.bench.report import least, size_name
from hpcdist.cli.bench.timing import Bench
from hpcdist.core.table import ALL_GATHER_SINGLE, REDUCE_SCATTER_SINGLE, Row, Shape

SIZES = [16 << 10 << 2 * i for i in range(7)]  # 16 KiB to 64 MiB
SHARED, MPI = "shared memory", "mpi4py"
MARGIN = 0.97  # shared memory must win by more than two medians of one thing differ
CHANGE = 0.1  # what shared memory must gain over all sizes together, as the logarithm of a ratio


def engine(bench: Bench, shared: NodeShared, row: Row, size: int) -> dict[str, Callable[[], object]]:
    """Return the two calls to compare, on the same buffers."""
    whole, out, part = buffers(bench, row.name, torch.float32, size)
    send = part if row is ALL_GATHER_SINGLE else whole if row.shape in (Shape.SCATTER, Shape.EXCHANGE) else out
    recv = part if row is REDUCE_SCATTER_SINGLE else out
    call = SHARED_CALLS[row]
    return {
        SHARED: lambda: call(shared, send, recv, ReduceOp.SUM, 0),
        MPI: COLLECTIVES[row.name](bench, whole, out, part)[MPI],
    }


def best(times: dict[int, dict[str, float]]) -> int:
    """Return the size from which on to use shared memory, so that over all sizes the least time is lost."""
    sizes = sorted(times)

    def cost(start: int) -> float:
        return sum(math.log(times[size][SHARED] / MARGIN if size >= start else times[size][MPI]) for size in sizes) + (
            CHANGE if start != thresholds.NEVER else 0.0
        )

    return min([thresholds.NEVER, *sizes], key=cost)


def measure(bench: Bench) -> int:
    """Measure, print the table, and add it to the file of ``--json``.

    Returns:
        0, or 2 if the job has only one rank, or ranks on several nodes.
    """
    if bench.wire.nodes > 1 or bench.size == 1:
        if bench.rank == 0:
            print("bench crossover measures within one node: run it with two or more ranks, all on one node")
        return 2
    shared = NodeShared(bench.comm.Dup())
    path = bench.options.json
    if path and Path(path).exists():
        thresholds.read(path)  # before the time is spent: it may hold something else
    found: dict[str, int] = {}
    table = Table(title=f"{bench.library}, {bench.size} ranks: time through shared memory over MPI's")
    table.add_column("collective")
    for size in SIZES:
        table.add_column(size_name(size), justify="right")
    table.add_column("shared memory")
    with Progress(disable=bench.rank != 0, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=len(SHARED_CALLS) * len(SIZES))
        for row in SHARED_CALLS:
            times: dict[int, dict[str, float]] = {}
            for size in SIZES:
                bar.update(task, description=f"{row} {size_name(size)}", refresh=True)
                times[size] = bench.compare(row.name, "float32", size, engine(bench, shared, row, size))
                bar.advance(task)
            found[row.name] = best(times)
            ratios = [f"{times[size][SHARED] / times[size][MPI]:.2f}" for size in SIZES]
            table.add_row(row.name, *ratios, least(found[row.name]))
    shared.close()
    if bench.rank == 0:
        Console(width=120).print(table)
        if path:
            vendor = bench.library.rsplit(" ", 1)[0]
            thresholds.write(path, vendor, bench.size, found)
            print(f"written: use it by {thresholds.VARIABLE}={path}")
    plots.write(bench)
    bench.figures.clear()  # the table has them, and --json is the file of the crossovers
    return 0
