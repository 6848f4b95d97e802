"""Subject ``groups``: time to create and destroy groups, of all ranks and of some."""

from __future__ import annotations

import hpcdist as dist
from hpcdist.cli.bench.timing import Bench


def compare(bench: Bench, group_size: int) -> dict[str, float]:
    """Time new_subgroups against one MPI_Comm_split."""

    def ours() -> None:
        group, _ = dist.new_subgroups(group_size)
        dist.destroy_process_group(group)

    def raw() -> None:
        bench.comm.Split(bench.rank // group_size, bench.rank).Free()

    return bench.compare(f"new_subgroups of {group_size}, destroyed", "", 0, {"hpcdist": ours, "mpi4py": raw})


def measure(bench: Bench) -> None:
    """Time a group of all ranks, and subgroups of every size that divides the world."""
    whole = {"hpcdist": lambda: dist.destroy_process_group(dist.new_group()), "mpi4py": lambda: bench.comm.Dup().Free()}
    bench.compare("new_group of all, destroyed", "", 0, whole)
    for group_size in range(1, bench.size + 1):
        if bench.size % group_size == 0:
            compare(bench, group_size)
