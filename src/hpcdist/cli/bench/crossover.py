"""Subject ``crossover``: the sizes from which shared memory is faster than MPI alone, for ``HPCDIST_SHM``.

``mpirun -n N python -m hpcdist bench crossover --json FILE.json`` times collectives through shared memory beside raw
MPI calls, and adds the sizes at which the faster side changes to the file. Run it once for each number of ranks a node
that your jobs use, and on several nodes if they use several; they read the file if ``HPCDIST_SHM=FILE.json`` is set.
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

from hpcdist.backends.mpi.backend import MPIBackend
from hpcdist.backends.mpi.node import thresholds
from hpcdist.backends.mpi.node.calls import SHARED_CALLS
from hpcdist.cli.bench import plots
from hpcdist.cli.bench.collectives import COLLECTIVES, buffers
from hpcdist.cli.bench.report import least, size_name
from hpcdist.cli.bench.timing import Bench
from hpcdist.core.call import Call
from hpcdist.core.table import ALL_GATHER_SINGLE, REDUCE_SCATTER_SINGLE, Row, Shape

SIZES = [16 << 10 << 2 * i for i in range(7)]  # 16 KiB to 64 MiB
LARGEST_BETWEEN_NODES = 16 << 20
OURS, MPI = "hpcdist", "mpi4py"
MARGIN = 0.97  # ours must win by more than two medians of one thing differ
CHANGE = 0.1  # what ours must gain over all sizes together, as the logarithm of a ratio


def engine(bench: Bench, ours: MPIBackend, row: Row, size: int) -> dict[str, Callable[[], object]]:
    """Return the two calls to compare, on the same buffers."""
    whole, out, part = buffers(bench, row.name, torch.float32, size)
    send = part if row is ALL_GATHER_SINGLE else whole if row.shape in (Shape.SCATTER, Shape.EXCHANGE) else out
    recv = part if row is REDUCE_SCATTER_SINGLE else out
    call = Call(row, send, recv, ReduceOp.SUM, 0)
    return {
        OURS: lambda: ours.run(call),
        MPI: COLLECTIVES[row.name](bench, whole, out, part)[MPI],
    }


def best(times: dict[int, dict[str, float]]) -> int:
    """Return the size from which on ours is to be used, so that over all sizes the least time is lost."""
    sizes = sorted(times)

    def cost(start: int) -> float:
        return sum(math.log(times[size][OURS] / MARGIN if size >= start else times[size][MPI]) for size in sizes) + (
            CHANGE if start != thresholds.NEVER else 0.0
        )

    return min([thresholds.NEVER, *sizes], key=cost)


def measure(bench: Bench) -> int:
    """Measure, print the table, and add it to the file of ``--json``.

    Returns:
        0, or 2 if each rank is the only one of its node.
    """
    nodes = bench.wire.nodes
    if nodes == bench.size:
        print("bench crossover compares shared memory with MPI alone: run it with two ranks a node or more")
        return 2
    place = bench.size if nodes == 1 else thresholds.SEVERAL
    sizes = [size for size in SIZES if nodes == 1 or size <= LARGEST_BETWEEN_NODES]
    ours = MPIBackend(bench.comm.Dup(), thresholds.Thresholds("1"))
    path = bench.options.json
    if path and Path(path).exists():
        thresholds.read(path)  # before the time is spent: it may hold something else
    found: dict[str, int] = {}
    on = f" on {nodes} nodes" if nodes > 1 else ""
    table = Table(title=f"{bench.library}, {bench.size} ranks{on}: time of hpcdist's own way over MPI's")
    table.add_column("collective")
    for size in sizes:
        table.add_column(size_name(size), justify="right")
    table.add_column("our own")
    with Progress(disable=bench.rank != 0, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=len(SHARED_CALLS) * len(sizes))
        for row in SHARED_CALLS:
            times: dict[int, dict[str, float]] = {}
            for size in sizes:
                bar.update(task, description=f"{row} {size_name(size)}", refresh=True)
                times[size] = bench.compare(row.name, "float32", size, engine(bench, ours, row, size))
                bar.advance(task)
            found[row.name] = best(times)
            ratios = [f"{times[size][OURS] / times[size][MPI]:.2f}" for size in sizes]
            table.add_row(row.name, *ratios, least(found[row.name]))
    ours.close()
    if bench.rank == 0:
        Console(width=120).print(table)
        if path:
            vendor = bench.library.rsplit(" ", 1)[0]
            thresholds.write(path, vendor, place, found)
            print(f"written: use it by {thresholds.VARIABLE}={path}")
    plots.write(bench)
    bench.figures.clear()  # the table has them, and --json is the file of the crossovers
    return 0
