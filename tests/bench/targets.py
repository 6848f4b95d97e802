"""Table of the targets on speed: each is measured on this machine and printed as met or missed, with its figures.

    mpirun -n 2 python -m tests.bench.targets [OPTION...]

The options are those of ``python -m hpcdist bench``.
"""

from __future__ import annotations

import os
import sys
import time
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import hpcdist as dist
from hpcdist.cli.bench import collectives, p2p, parser
from hpcdist.cli.bench.timing import Bench, Figure
from hpcdist.core.journal import Journal
from hpcdist.core.table import ALL_REDUCE
from tests.bench import groups, init, objects, overlap

KIB, MIB = 1 << 10, 1 << 20
LATENCY = 1.5  # microseconds that hpcdist may add to a call of MPI
NOISE = 1.03  # for "at most MPI's time" if both make the same call: medians of repeated runs differ by this


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


def all_reduces(bench: Bench) -> list[Verdict]:
    """Check all_reduce of float32 over all sizes."""
    found = []
    for size in (4, 256, 4 * KIB) if bench.size == 2 else ():
        medians = collectives.compare(bench, "all_reduce", torch.float32, size)
        found.append(at_most(f"all_reduce float32 {size} B", medians, "mpi4py", 1.0, LATENCY))
    for size in (16 * KIB, 64 * KIB, 256 * KIB) if bench.size == 2 else ():
        medians = collectives.compare(bench, "all_reduce", torch.float32, size)
        found.append(at_most(f"all_reduce float32 {size // KIB} KiB", medians, "mpi4py", 1.1))
    for size, factor in ((1, 1.0), (4, 1.0), (16, 1.0), (64, 0.5)):
        medians = collectives.compare(bench, "all_reduce", torch.float32, size * MIB)
        found.append(at_most(f"all_reduce float32 {size} MiB", medians, "mpi4py", factor))
        found.append(at_most(f"all_reduce float32 {size} MiB", medians, "copy", 2.5))
        for dtype in (torch.bfloat16, torch.float16):
            half = collectives.compare(bench, "all_reduce", dtype, size * MIB)
            name = f"all_reduce {str(dtype)[6:]} {size} MiB"
            found.append(at_most(name, half | {"our float32": medians["hpcdist"]}, "our float32", 1.0))
            found.append(at_most(name, half, "gloo", 0.25))
    return found


def moves(bench: Bench) -> list[Verdict]:
    """Check the other collectives on tensors."""
    found = []
    for name in ("broadcast", "all_gather_single", "reduce_scatter_single", "all_to_all_single"):
        for size in (16 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB):
            medians = collectives.compare(bench, name, torch.float32, size)
            found.append(at_most(f"{name} {size // KIB} KiB", medians, "mpi4py", 1.1))
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
    """Check the time of the import, in fresh processes."""
    figure: Figure | None = None
    if bench.rank == 0:
        times = init.import_time()
        figure = Figure("import hpcdist after torch", "", 0, "hpcdist", times[2], times[0], times[-1])
    figure = bench.comm.bcast(figure)
    found = f"{figure.median / 1000:.0f} ms" if figure else ""
    return [Verdict("import hpcdist after torch, no MPI", "≤ 150 ms", found, bool(figure and figure.median <= 150e3))]


def records(bench: Bench) -> list[Verdict]:
    """Check the cost of the record that ``core.issue`` keeps of a call, with the same statements."""
    journal, tensor, count = Journal("bench"), torch.zeros(1), 20_000
    dtype = tensor.dtype  # a call reads it in any case

    def seconds(is_recorded: bool) -> float:
        began = time.perf_counter()
        if is_recorded:
            for _ in range(count):
                journal.sequence = number = journal.sequence + 1
                call = (journal, number, ALL_REDUCE, tensor.shape, dtype, None)
                journal.push(call)
                with journal.blocking(call):
                    pass
        else:
            for _ in range(count):
                pass
        return time.perf_counter() - began

    each = min(seconds(True) - seconds(False) for _ in range(7)) / count * 1e6
    each = max(bench.comm.allgather(each))
    return [Verdict("the record of a call, for the watchdog", "≤ 0.5 µs", f"{each:.2f} µs", each <= 0.5)]


CHECKS = (all_reduces, moves, messages, gathered_objects, subgroups, coalesced, overlaps, records, imports)


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
