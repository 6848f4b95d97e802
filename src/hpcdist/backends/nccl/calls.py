"""Which of NCCL's calls make one row of the table?

One call each, with the names and the argument order of the row; several in one group where NCCL has no call of that
shape: shares of different sizes, all_to_all, and gather and scatter in releases that lack them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from hpcdist.backends.nccl.library import SINCE
from hpcdist.core.table import ALL_GATHER, EXCHANGES, REDUCE_SCATTER, ROWS, Counts, Row

if TYPE_CHECKING:
    from hpcdist.backends.nccl.library import Library

# (library, communicator, send, recv, op, root, counts, stream); the buffers as NCCL takes them
Call = Callable[[Any, Any, Any, Any, Any, Any, Any, int], None]


def direct(row: Row) -> Call:
    """Return the call of a row that NCCL has as such."""
    name = row.nccl
    assert name is not None

    def call(_: Library, comm: Any, send: Any, recv: Any, op: Any, root: Any, __: Any, stream: int) -> None:
        if recv is None:
            recv = send  # not written: this rank is not the root
        elif send is None:
            send = recv  # not read
        if row.reduces:
            if row.rooted:
                getattr(comm, name)(send, recv, op, root, stream=stream)
            else:
                getattr(comm, name)(send, recv, op, stream=stream)
        elif row.rooted:
            getattr(comm, name)(send, recv, root, stream=stream)
        else:
            getattr(comm, name)(send, recv, stream=stream)

    return call


def parts(tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Return each rank's share of a contiguous tensor."""
    flat = tensor.reshape(-1)
    starts = accumulate(counts[:-1], initial=0)
    return [flat[start : start + count] for start, count in zip(starts, counts, strict=True)]


def equal(tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Return each rank's share of a tensor where all are alike."""
    return list(tensor.reshape(size, -1))


def all_gather(
    library: Library, comm: Any, send: Any, recv: Any, op: Any, root: Any, counts: Counts, stream: int
) -> None:
    """Gather shares of any size: every rank broadcasts its own."""
    with library.core.group():
        for rank, part in enumerate(parts(recv, counts[1])):
            if part.numel():
                comm.broadcast(send if rank == comm.rank else part, part, rank, stream=stream)


def reduce_scatter(
    library: Library, comm: Any, send: Any, recv: Any, op: Any, root: Any, counts: Counts, stream: int
) -> None:
    """Combine and scatter shares of any size: one reduce to every rank."""
    with library.core.group():
        for rank, part in enumerate(parts(send, counts[0])):
            if part.numel():
                comm.reduce(part, recv if rank == comm.rank else part, op, rank, stream=stream)


def exchange(
    library: Library,
    comm: Any,
    sends: Sequence[torch.Tensor | None],
    receives: Sequence[torch.Tensor | None],
    stream: int,
) -> None:
    """Send to and receive from every rank, in one group; None and empty stand for nothing."""
    with library.core.group():
        for peer, (sent, received) in enumerate(zip(sends, receives, strict=True)):
            if sent is not None and sent.numel():
                comm.send(sent, peer, stream=stream)
            if received is not None and received.numel():
                comm.recv(received, peer, stream=stream)


def all_to_all(
    library: Library, comm: Any, send: Any, recv: Any, op: Any, root: Any, counts: Counts | None, stream: int
) -> None:
    """Exchange shares."""
    size = comm.nranks
    if counts is None:
        exchange(library, comm, equal(send, size), equal(recv, size), stream)
    else:
        exchange(library, comm, parts(send, counts[0]), parts(recv, counts[1]), stream)


def gather(library: Library, comm: Any, send: Any, recv: Any, op: Any, root: int, counts: Any, stream: int) -> None:
    """Send to the root, which receives from everyone."""
    size = comm.nranks
    sends = [send if peer == root else None for peer in range(size)]
    exchange(library, comm, sends, [None] * size if recv is None else equal(recv, size), stream)


def scatter(library: Library, comm: Any, send: Any, recv: Any, op: Any, root: int, counts: Any, stream: int) -> None:
    """Receive from the root, which sends to everyone."""
    size = comm.nranks
    receives = [recv if peer == root else None for peer in range(size)]
    exchange(library, comm, [None] * size if send is None else equal(send, size), receives, stream)


# NCCL's own all-to-all would be another call than the exchange that a rank with splits makes
COUNTED: dict[Row, Call] = {ALL_GATHER: all_gather, REDUCE_SCATTER: reduce_scatter} | dict.fromkeys(
    EXCHANGES, all_to_all
)
STAND_INS: dict[str, Call] = {"gather": gather, "scatter": scatter}


def calls_of(version: Sequence[int]) -> dict[Row, Call]:
    """Return how each row with buffers is called in a release of NCCL."""
    made: dict[Row, Call] = dict(COUNTED)
    for row in ROWS.values():
        if row.nccl is not None:
            is_there = tuple(version) >= SINCE.get(row.nccl, (2,))
            made[row] = direct(row) if is_there else STAND_INS[row.nccl]
    return made


def scaled(counts: Counts, factor: int) -> Counts:
    """Return counts of elements as counts of the elements that NCCL sees."""
    if factor == 1:
        return counts
    return [count * factor for count in counts[0]], [count * factor for count in counts[1]]
