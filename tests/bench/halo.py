"""Subject ``halo``: time to fill the ghost cells of a square field beside messages that a user of mpi4py writes.

The ranks form a ring. The size shown is that of a face, of which a rank sends and receives two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch

import hpcdist as dist
from hpcdist.backends.mpi.process import runtime
from hpcdist.cli.bench.timing import Bench

NBYTES = [64, 2048, 16384]


def measure(bench: Bench) -> None:
    """Time rows, which are contiguous, columns, which are not, and messages to two ranks."""
    for nbytes in bench.options.sizes or NBYTES:
        cells = max(nbytes // 8, 3)
        for what, dims, width in (("2 rows", [bench.size, 1], [1, 0]), ("2 columns", [1, bench.size], [0, 1])):
            field = torch.zeros(cells, cells, dtype=torch.float64)
            halo = dist.HaloExchange(dims, width, periodic=True)
            array = field.numpy() if what == "2 rows" else field.numpy().T
            sides: dict[str, Callable[[], object]] = {
                "hpcdist": lambda: halo(field),  # noqa: B023
                "mpi4py": by_hand(bench, array),
            }
            bench.compare(f"halo, {what}", "float64", nbytes, sides)
            if what == "2 rows":
                other, turn = field.clone(), itertools.cycle([True, False])
                sides["hpcdist"] = lambda: halo(field if next(turn) else other)  # noqa: B023
                bench.compare("halo, 2 rows, two fields in turn", "float64", nbytes, sides)
                sides = {"hpcdist": lambda: halo.pad(field), "mpi4py": by_hand(bench, array, pads=True)}  # noqa: B023
                bench.compare("halo, pad by 2 rows", "float64", nbytes, sides)
        exchange(bench, nbytes)


def by_hand(bench: Bench, array: np.ndarray, pads: bool = False) -> Callable[[], object]:
    """Return what fills the first and the last row by MPI_Isend and MPI_Irecv, copied if they are not contiguous.

    They are those of a larger copy of the array if it ``pads``.
    """
    comm, wait_all = bench.comm, runtime.load().Request.Waitall
    after, before = (bench.rank + 1) % bench.size, (bench.rank - 1) % bench.size
    buffers = np.empty(array.shape[1]), np.empty(array.shape[1])

    def fill(low: np.ndarray, first: np.ndarray, last: np.ndarray, high: np.ndarray) -> None:
        wait_all([
            comm.Irecv(high, after, 0), comm.Irecv(low, before, 1),
            comm.Isend(first, before, 0), comm.Isend(last, after, 1),
        ])  # fmt: skip

    def contiguous() -> None:
        fill(array[0], array[1], array[-2], array[-1])

    def strided() -> None:
        fill(buffers[0], array[1].copy(), array[-2].copy(), buffers[1])
        array[0], array[-1] = buffers

    def pad() -> np.ndarray:
        whole = np.zeros((len(array) + 2, array.shape[1]))
        whole[1:-1] = array
        fill(whole[0], whole[1], whole[-2], whole[-1])
        return whole

    return pad if pads else contiguous if array[0].flags.c_contiguous else strided


def exchange(bench: Bench, nbytes: int) -> dict[str, float]:
    """Time messages to the ranks before and after, which on two ranks are one."""
    near = sorted({(bench.rank + 1) % bench.size, (bench.rank - 1) % bench.size})
    sends = {rank: torch.zeros(nbytes // 8, dtype=torch.float64) for rank in near}
    recvs = {rank: torch.zeros(nbytes // 8, dtype=torch.float64) for rank in near}
    outgoing, incoming = ({rank: each.numpy() for rank, each in side.items()} for side in (sends, recvs))
    comm, wait_all = bench.comm, runtime.load().Request.Waitall

    def raw() -> None:
        requests = [comm.Irecv(each, rank) for rank, each in incoming.items()]
        wait_all(requests + [comm.Isend(each, rank) for rank, each in outgoing.items()])

    sides = {"hpcdist": lambda: dist.exchange(sends, recvs), "mpi4py": raw}
    return bench.compare("exchange with 2 ranks", "float64", nbytes, sides)
