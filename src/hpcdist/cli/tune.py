"""The command ``tune``: measures from which size on shared memory is faster than MPI's own calls on these nodes.

``srun python -m hpcdist tune`` times hpcdist's collectives through shared memory beside the same ones without it, for
about a minute, and writes the sizes to a file that every later job reads: the user's own, or the one of --output. Run
it once for each number of ranks a node that your jobs use, and once on several nodes if they use several.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from functools import partial
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table

import hpcdist as dist
from hpcdist.backends.mpi.backend import MPIBackend
from hpcdist.backends.mpi.node import threshold_file
from hpcdist.backends.mpi.node.threshold_file import NEVER
from hpcdist.backends.mpi.node.thresholds import COLLECTIVES, HALF, Thresholds
from hpcdist.cli.bench.collectives import Calls, buffers
from hpcdist.cli.bench.report import least
from hpcdist.cli.bench.timing import Bench, open_bench
from hpcdist.cli.job_arguments import JobParser, count, file, positive
from hpcdist.core.call import Call
from hpcdist.core.printing import format_size
from hpcdist.core.table import ALL_GATHER_SINGLE, REDUCE_SCATTER_SINGLE, ROWS
from hpcdist.launch.topology import processor

SIZES = [16 << 10 << 2 * i for i in range(7)]  # 16 KiB to 64 MiB
LARGEST_BETWEEN_NODES = 16 << 20
SHARED, MPI = "shared memory", "MPI"
MARGIN = 0.97  # the least gain of shared memory, above the difference of two medians of the same call
CHANGE = 0.1  # the least gain over all sizes together, as the logarithm of a ratio


def parser() -> JobParser:
    made = JobParser("tune", __doc__)
    made.add_argument(
        "--output", metavar="FILE", type=json_file, help=f"the .json file to add to ({threshold_file.users_file()})"
    )
    made.add_argument("--rounds", type=count, default=7, help="rounds, of which the median counts (7)")
    made.add_argument("--seconds", type=positive, default=0.05, help="length of one side's round (0.05)")
    return made


def json_file(text: str) -> Path:
    """Read a file's name that is valid in ``HPCDIST_SHM``."""
    if not threshold_file.is_file(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a .json file")
    return Path(file(text))


def run(args: list[str]) -> int:
    """Measure on all ranks of this job and write the file; return 0, or 2 if it cannot measure here."""
    made = parser()
    options = made.parse_args(args)
    path = options.output or threshold_file.users_file()
    if not path.is_absolute() and options.output is None:
        made.error(f"no folder for {path}: set HOME, or name the file: --output thresholds.json")
    with open_bench(options, made, "start it by a launcher of MPI: srun python -m hpcdist tune") as bench:
        nodes = bench.wire.nodes
        if bench.size == 1:
            made.error("shared memory takes two ranks or more: mpirun -n 2 python -m hpcdist tune")
        ready = bench.comm.bcast(make_folder(path) if bench.rank == 0 else None)
        if ready:
            made.error(ready)
        place = bench.size if nodes == 1 else threshold_file.SEVERAL if nodes < bench.size else threshold_file.FLAT
        found = measure(bench, place)
        if bench.rank == 0:
            threshold_file.write(path, bench.library.rsplit(" ", 1)[0], place, found)
            print(f"Written to {path}, for the processor {processor()!r}.")
    return 0


def make_folder(path: Path) -> str:
    """Make the file's folder, write to it and read the file; return an error, before the measurement."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists():
            threshold_file.read(path)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def best(times: dict[int, dict[str, float]]) -> int:
    """Return the size from which shared memory should be used, so that the least time is lost over all sizes."""
    sizes = sorted(times)

    def cost(start: int) -> float:
        chosen = (times[size][SHARED] / MARGIN if size >= start else times[size][MPI] for size in sizes)
        return sum(map(math.log, chosen)) + (CHANGE if start != NEVER else 0.0)

    return min([NEVER, *sizes], key=cost)


def measure(bench: Bench, place: int | str) -> dict[str, int]:
    """Time all collectives at all sizes, print the table, and return the file's content; every rank calls."""
    is_one_node = isinstance(place, int)
    sizes = [size for size in SIZES if is_one_node or size <= LARGEST_BETWEEN_NODES]
    rows = {name: (ROWS[name], torch.float32) for name in COLLECTIVES if place != threshold_file.FLAT}
    rows |= {name + HALF: (ROWS[name], torch.bfloat16) for name in COLLECTIVES if ROWS[name].reduces}
    sides = {side: MPIBackend(bench.comm.Dup(), Thresholds(text)) for side, text in ((SHARED, "1"), (MPI, "off"))}
    where = "" if is_one_node else f" on {bench.wire.nodes} nodes"
    columns = [Column(format_size(size), justify="right") for size in sizes]
    title = f"{bench.library}, {bench.size} ranks{where}: time through shared memory over that of MPI"
    table = Table("collective", *columns, "shared memory", title=title)
    times: dict[str, dict[int, dict[str, float]]] = {name: {} for name in rows}
    for name, size in bench.progress([*product(rows, sizes)]):
        row, dtype = rows[name]
        whole, out, part = buffers(bench, row.name, dtype, size)
        send, recv = {ALL_GATHER_SINGLE: (part, out), REDUCE_SCATTER_SINGLE: (whole, part)}.get(row, (out, out))
        call = Call(row, send, recv, dist.ReduceOp.SUM, 0)
        calls: Calls = {side: partial(backend.run, call) for side, backend in sides.items()}
        times[name][size] = bench.compare(name, str(dtype), size, calls)
    found = {name: best(by_size) for name, by_size in times.items()}
    for name, by_size in times.items():
        table.add_row(name, *(f"{each[SHARED] / each[MPI]:.2f}" for each in by_size.values()), least(found[name]))
    for backend in sides.values():
        backend.close()
    if bench.rank == 0:
        Console(width=120).print(table)
    return found
