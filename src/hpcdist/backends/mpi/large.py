"""How do more than 2^31 - 1 elements travel, where MPI counts in C ints?

Reductions go piece by piece. Counted exchanges describe each share by a derived datatype that holds its
displacement too, so that one MPI_Alltoallw carries them (MPI 6.8 and 5.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.datatypes import COUNT_MAX, PIECE, memory, run, starts
from hpcdist.core.backend import Counts
from hpcdist.core.table import ALL_GATHER, REDUCE, Row, Shape

if TYPE_CHECKING:
    from hpcdist.backends.mpi.backend import MPIBackend
    from hpcdist.backends.mpi.reductions import Reduction


def reduce(
    backend: MPIBackend,
    row: Row,
    send: torch.Tensor,
    recv: torch.Tensor | None,
    how: Reduction,
    root: int | None,
    counts: Counts | None,
) -> None:
    """Reduce piece by piece; a reduce_scatter is one reduce to each rank."""
    source = send.reshape(-1)
    target = recv.reshape(-1) if recv is not None else None
    if row.shape is Shape.SAME:
        for start in range(0, source.numel(), PIECE):
            part = source[start : start + PIECE]
            whole = part if send is recv else None if target is None else target[start : start + PIECE]
            backend._reduce_in_memory(row, part, whole, how, root, None)
        return
    assert target is not None
    shares = counts[0] if counts else [target.numel()] * backend.size
    for rank, (start, length) in enumerate(zip(accumulate(shares, initial=0), shares, strict=False)):
        part = source[start : start + length]
        backend._reduce_in_memory(REDUCE, part, target if rank == backend.rank else None, how, rank, None)


def is_exchanged(comm: MPI.Intracomm, row: Row, send: torch.Tensor, recv: torch.Tensor) -> bool:
    """Tell whether a counted exchange needs more than an int on any rank: all must make the same call.

    What is gathered is equally much on all ranks. What is exchanged need not be, so the ranks ask each other:
    a byte's all_reduce, a few microseconds beside the exchange itself.
    """
    if row is ALL_GATHER:
        return recv.nbytes > COUNT_MAX
    flag = bytearray([max(send.nbytes, recv.nbytes) > COUNT_MAX])
    comm.Allreduce(MPI.IN_PLACE, [flag, MPI.UINT8_T], MPI.MAX)
    return bool(flag[0])


def exchange(comm: MPI.Intracomm, row: Row, send: torch.Tensor, recv: torch.Tensor, counts: Counts) -> None:
    """Exchange counted shares of any size; one share sent stands for the same share to everyone."""
    size, itemsize = comm.Get_size(), send.itemsize
    sent = list(counts[0]) * (size if len(counts[0]) == 1 and size > 1 else 1)
    offsets = [0] * size if len(counts[0]) == 1 else starts(sent)
    with ExitStack() as made:
        send_types = [share(made, at * itemsize, n * itemsize) for at, n in zip(offsets, sent, strict=True)]
        places = starts(counts[1])
        recv_types = [share(made, at * itemsize, n * itemsize) for at, n in zip(places, counts[1], strict=True)]
        comm.Alltoallw(whole(send, send_types), whole(recv, recv_types))


def whole(tensor: torch.Tensor, types: Sequence[MPI.Datatype]) -> list[object]:
    """Return a tensor's memory with one datatype a rank, as mpi4py takes it."""
    return [memory(tensor), [1] * len(types), [0] * len(types), list(types)]


def share(made: ExitStack, offset: int, nbytes: int) -> MPI.Datatype:
    """Return a datatype for ``nbytes`` bytes that begin ``offset`` bytes into the buffer."""
    count, run_type = run(nbytes)
    datatype = MPI.Datatype.Create_struct([count], [offset], [run_type]).Commit()
    made.callback(datatype.Free)
    return datatype
