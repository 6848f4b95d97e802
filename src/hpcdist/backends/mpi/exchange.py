"""All-to-all exchange: a share of its own from each rank to each other rank, by MPI_Alltoallw (MPI 6.8).

One MPI function carries equal and unequal shares of any size. Which of MPI_Alltoall and MPI_Alltoallv would do depends
on the counts of one rank, and ranks that chose differently would wait for each other for ever. How this rank describes
a share to MPI is its own affair: as a count of bytes and a displacement where a C int holds both, else as a derived
datatype that holds the displacement too (MPI 5.1). The price is about 1 µs on 2 ranks of Open MPI (64 B: 2.4 µs,
MPI_Alltoallv 1.9, MPI_Alltoall 1.5); MPICH takes as long for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.datatypes import BYTE, COUNT_MAX, memory, run, starts
from hpcdist.core.table import Counts

LAYOUTS = 64  # of equal shares, kept

Layout = tuple[list[int], list[int], list[MPI.Datatype]]  # count, displacement and type of each rank's share


def exchange(comm: MPI.Intracomm, send: torch.Tensor, recv: torch.Tensor, counts: Counts | None) -> None:
    """Send each rank its share of one tensor and receive one from each into another; every rank calls.

    Args:
        comm: the communicator.
        send: the shares to send, one after another.
        recv: the shares to receive; memory that is not ``send``'s.
        counts: elements to and from each rank, None for equal shares. One share to send stands for the same share to
            everyone.
    """
    size, itemsize = comm.Get_size(), send.itemsize
    with ExitStack() as made:
        if counts is None:
            layout = [equal(tensor.nbytes // size, size, made) for tensor in (send, recv)]
        elif len(counts[0]) == 1 and size > 1:
            nbytes = counts[0][0] * itemsize
            layout = [([nbytes] * size, [0] * size, [BYTE] * size), ragged(counts[1], itemsize, made)]
            if nbytes > COUNT_MAX:
                layout[0] = typed([nbytes] * size, [0] * size, made)
        else:
            layout = [ragged(side, itemsize, made) for side in counts]
        comm.Alltoallw([memory(send), *layout[0]], [memory(recv), *layout[1]])


@lru_cache(LAYOUTS)
def equal_small(share: int, size: int) -> Layout:
    """Return the layout of equal shares that C ints describe."""
    return [share] * size, [share * rank for rank in range(size)], [BYTE] * size


def equal(share: int, size: int, made: ExitStack) -> Layout:
    """Return the layout of equal shares of so many bytes."""
    if share * size <= COUNT_MAX:
        return equal_small(share, size)
    return typed([share] * size, [share * rank for rank in range(size)], made)


def ragged(counts: Sequence[int], itemsize: int, made: ExitStack) -> Layout:
    """Return the layout of shares of so many elements."""
    lengths = [count * itemsize for count in counts]
    offsets = starts(lengths)
    if sum(lengths) <= COUNT_MAX:
        return lengths, offsets, [BYTE] * len(lengths)
    return typed(lengths, offsets, made)


def typed(lengths: Sequence[int], offsets: Sequence[int], made: ExitStack) -> Layout:
    """Return the layout of shares of any size, each described by a datatype that ``made`` frees."""
    types = []
    for nbytes, offset in zip(lengths, offsets, strict=True):
        count, piece = run(nbytes)
        types.append(MPI.Datatype.Create_struct([count], [offset], [piece]).Commit())
        made.callback(types[-1].Free)
    return [1] * len(types), [0] * len(types), types


def describe_equal(size: int) -> Callable[[torch.Tensor, torch.Tensor], tuple[Any, Any] | None]:
    """Return what describes two tensors of equal shares to MPI_Alltoallw; None where they overlap or are too large."""

    def describe(send: torch.Tensor, recv: torch.Tensor) -> tuple[Any, Any] | None:
        first, second, nbytes = send.data_ptr(), recv.data_ptr(), send.nbytes
        if (first < second + nbytes and second < first + nbytes) or nbytes > COUNT_MAX:
            return None
        layout = equal_small(nbytes // size, size)
        return [memory(send), *layout], [memory(recv), *layout]

    return describe
