"""What MPI does with shared memory long after its start: mpirun -n 3 python later_job.py"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI

import hpcdist as dist
from tests.faults.telling import tell

COUNTS = (1, 1000, 1 << 16, 1 << 22)
CHILDREN = 2
NO_SPAWN = ("MPICH", (4, 0, 2))  # Debian's: MPI_Comm_spawn fails in any program


def segments() -> list[str]:
    """Return MPICH's segments (mpich_shm_… in 5.0, mpich_shar_… in 4.0) that this process maps and that have a name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/mpich_sh" in line}
    assert paths, "the ranks of a node share MPICH's segment"
    return sorted(path for path in paths if not path.endswith("(deleted)"))


def meet(other: MPI.Intercomm, is_late: bool) -> None:
    """Sum over the ranks of both worlds."""
    both = other.Merge(high=is_late)
    total = np.empty(1 << 18)
    both.Allreduce(np.ones(1 << 18), total)
    assert total.min() == total.max() == both.size
    both.Free()


def messages(rank: int, size: int) -> None:
    for count in COUNTS:
        values = torch.full((count,), float(rank))
        if rank == 0:
            dist.send(values, 1)
        elif rank == 1:
            dist.recv(values, 0)
            assert values.max() == 0
        dist.all_reduce(values.fill_(rank))
        assert values[0] == sum(range(size))


def windows(comm: MPI.Intracomm) -> None:
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    for window in (MPI.Win.Allocate_shared(1 << 20, comm=node), MPI.Win.Allocate(1 << 20, comm=comm)):
        window.Fence()
        window.Put(np.ones(1000), (comm.rank + 1) % comm.size)
        window.Fence()
        window.Free()
    node.Free()


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    gone = segments()
    messages(rank, size)
    parent = MPI.Comm.Get_parent()
    if parent != MPI.COMM_NULL:
        meet(parent, True)
        parent.Disconnect()
    else:
        windows(MPI.COMM_WORLD)
        group = dist.new_group([0, 2])
        if rank != 1:
            dist.all_reduce(torch.ones(1 << 20), group=group)
        if MPI.get_vendor() != NO_SPAWN:
            children = MPI.COMM_WORLD.Spawn(sys.executable, [__file__], CHILDREN)
            meet(children, False)
            children.Disconnect()
        tell("done", segments=gone)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
