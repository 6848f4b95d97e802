"""Table of the targets on speed: each is measured on this machine and printed as met or missed, with its figures.

    mpirun -n 2 python -m tests.bench.targets [OPTION...]

The options are those of ``python -m hpcdist bench``.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import hpcdist as dist
from hpcdist.cli.bench import collectives, p2p, parser
from hpcdist.cli.bench.timing import Bench
from hpcdist.core.printing import format_size
from tests.bench import groups, objects, overlap

KIB, MIB = 1 << 10, 1 << 20
LATENCY = 1.5  # microseconds that hpcdist may add to a call of MPI
NOISE = 1.03  # for "at most MPI's time" if both make the same call: medians of repeated runs differ by this
IMPORT = """
import sys, time, torch, torch.distributed
began = time.perf_counter()
import hpcdist
assert 'mpi4py.MPI' not in sys.modules
print(time.perf_counter() - began)
"""


class Verdict(NamedTuple):
    """One target and the figure that was measured for it."""

    what: str
    target: str
    found: str
    met: bool


def at_most(what: str, medians: dict[str, float], rival: str, factor: float, slack: float = 0.0) -> Verdict:
    """Compare hpcdist's time with a factor of another side's time, plus some microseconds."""
    ours, theirs = medians["hpcdist"], medians[rival]
    target = f"≤ {rival} + {slack} µs" if slack else f"≤ {factor} × {rival}"
    allowed = theirs * factor * (NOISE if factor == 1.0 and not slack else 1.0) + slack
    return Verdict(what, target, f"{ours:.1f} µs, {rival} {theirs:.1f}: {ours / theirs:.2f}", ours <= allowed)


# collective and bytes -> the sides that its float32 is held against: how many times their time, and so many µs more
TENSORS: dict[tuple[str, int], list[tuple[Any, ...]]] = {
    **{("all_reduce", size): [("mpi4py", 1.0, LATENCY)] for size in (4, 256, 4 * KIB)},
    **{("all_reduce", size * KIB): [("mpi4py", 1.1)] for size in (16, 64, 256)},
    **{("all_reduce", size * MIB): [("mpi4py", 1.0), ("copy", 2.5)] for size in (1, 4, 16)},
    ("all_reduce", 64 * MIB): [("mpi4py", 0.5), ("copy", 2.5)],
    **{
        (name, size * KIB): [("mpi4py", 1.1)]
        for name in collectives.COLLECTIVES[1:]
        for size in (16, 256, 1024, 4096, 16384)
    },
}


def tensors(bench: Bench) -> list[Verdict]:
    """Check the collectives on tensors; the small sizes of all_reduce are promised of two ranks."""
    found = []
    for (name, size), targets in TENSORS.items():
        if name == "all_reduce" and size < MIB and bench.size != 2:
            continue
        medians = collectives.compare(bench, name, torch.float32, size)
        found += [at_most(f"{name} float32 {format_size(size)}", medians, *target) for target in targets]
        for dtype in (torch.bfloat16, torch.float16) if name == "all_reduce" and size >= MIB else ():
            half = collectives.compare(bench, name, dtype, size)
            what = f"{name} {str(dtype)[6:]} {format_size(size)}"
            found.append(at_most(what, half | {"our float32": medians["hpcdist"]}, "our float32", 1.0))
            found.append(at_most(what, half, "gloo", 0.25))
    return found


def messages(bench: Bench) -> list[Verdict]:
    """Check ping-pong, put and signal, and barrier."""
    found = [at_most(f"ping-pong {size} B", p2p.compare(bench, size), "mpi4py", 1.0, LATENCY) for size in (4, 1024)]
    found += [
        at_most(f"put and signal {size} B", p2p.put_and_signal(bench, size), "mpi4py", 1.0, 3.0) for size in (64, 1024)
    ]
    return [*found, at_most("barrier", p2p.barrier(bench), "mpi4py", 1.0, LATENCY)]


def gathered_objects(bench: Bench) -> list[Verdict]:
    """Check all_gather_object."""
    medians = objects.compare(bench, "small dict")
    what = "all_gather_object, small dict"
    return [at_most(what, medians, "mpi4py", 1.5), at_most(what, medians, "gloo", 0.05)]


def subgroups(bench: Bench) -> list[Verdict]:
    """Check new_subgroups, if there are as many ranks as its target is about."""
    if bench.size < 16:
        return []
    return [at_most("new_subgroups, destroyed", groups.compare(bench, max(1, bench.size // 2)), "mpi4py", 1.5)]


def coalesced(bench: Bench) -> list[Verdict]:
    """Check 100 small tensors in one call against 100 calls."""
    tensors = [torch.zeros(256) for _ in range(100)]

    def loop() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    sides = {"hpcdist": lambda: dist.all_reduce_coalesced(tensors), "loop": loop}
    medians = bench.compare("all_reduce_coalesced, 100 x 1 KiB", "float32", 100 * KIB, sides)
    return [at_most("all_reduce_coalesced, 100 x 1 KiB", medians, "loop", 0.2)]


def has_spare_cores(bench: Bench) -> bool:
    """Tell whether the node has a second core for each rank, for the communicating thread."""
    cores = set().union(*bench.comm.allgather(os.sched_getaffinity(0)))
    return len(cores) >= 2 * bench.size


def overlaps(bench: Bench) -> list[Verdict]:
    """Check that an asynchronous all_reduce overlaps with computing, if there are cores for both."""
    if not has_spare_cores(bench):
        return []
    medians = overlap.compare(bench)
    longer = max(medians["all_reduce"], medians["compute"])
    ours = medians["hpcdist"]
    found = f"{ours:.0f} µs, longer one {longer:.0f}: {ours / longer:.2f}; in turn {medians['in turn']:.0f}"
    found += f"; Iallreduce {medians['Iallreduce']:.0f}"
    return [Verdict("overlap, 32 MiB", "≤ 1.25 × the longer", found, ours <= 1.25 * longer)]


def imports(bench: Bench) -> list[Verdict]:
    """Check how long `import hpcdist` takes after torch in fresh processes that rank 0 starts."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_COMM", "PMIX", "PMI_"))}
    command, seconds = [sys.executable, "-c", IMPORT], 0.0
    if bench.rank == 0:
        shown = (subprocess.check_output(command, env=environment, text=True) for _ in range(5))
        seconds = statistics.median(map(float, shown))
    seconds = bench.comm.bcast(seconds)
    what = "import hpcdist after torch, no MPI"
    return [Verdict(what, "≤ 150 ms", f"{seconds * 1e3:.0f} ms", seconds <= 0.15)]


CHECKS = (tensors, messages, gathered_objects, subgroups, coalesced, overlaps, imports)


def run(bench: Bench) -> int:
    """Check every target and print the verdicts.

    Returns:
        0 if all are met, else 1.
    """
    verdicts = [verdict for check in CHECKS for verdict in check(bench)]
    if bench.rank == 0:
        title = f"{bench.size} ranks, {bench.library}: {sum(v.met for v in verdicts)} of {len(verdicts)} met"
        table = Table("what", "target", "found", "", title=title)
        for v in verdicts:
            table.add_row(v.what, v.target, v.found, "met" if v.met else "MISSED")
        Console(width=150).print(table)
    return int(not all(v.met for v in verdicts))


if __name__ == "__main__":
    options = parser().parse_args()
    dist.init_process_group()
    try:
        status = run(Bench(options))
    finally:
        dist.destroy_process_group()
    sys.exit(status)
