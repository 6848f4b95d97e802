"""NCCL's calls for each row of the table: one call, or several in a group where NCCL has no call of that shape.

The functions are those of ``nccl.bindings.nccl``, which are NCCL's own: they take addresses, element counts, and
datatypes and ops as numbers. Several of them make shares of different sizes, all_to_all, and gather and scatter in
releases that lack these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from hpcdist.backends.nccl.library import SINCE, Library
from hpcdist.core.table import ALL_GATHER, EXCHANGES, REDUCE_SCATTER, ROWS, Counts, Row, Shape


class Where(NamedTuple):
    """The communicator that a call is made on: NCCL's handle, this rank in it, and how many there are."""

    handle: Any
    rank: int
    size: int


# (library, where, send, recv, datatype, op, root, counts, stream): contiguous tensors of the elements that NCCL sees
Function = Callable[[Any, Where, Any, Any, int, Any, Any, Any, int], None]

# what the bindings call what nccl.core calls otherwise
ENTRY_POINTS = {"allreduce": "all_reduce", "allgather": "all_gather"}


def direct(row: Row, function: Callable[..., None]) -> Function:
    """Return the call of a row for which NCCL has a function."""
    of_receive, is_exchange = row.shape is Shape.SCATTER, row.shape is Shape.EXCHANGE

    def call(
        _: Library, where: Where, send: Any, recv: Any, datatype: int, op: Any, root: Any, __: Any, stream: int
    ) -> None:
        if recv is None:
            recv = send  # not written: this rank is not the root
        elif send is None:
            send = recv  # not read
        count = recv.numel() if of_receive else send.numel()
        if is_exchange:
            count //= where.size
        how = (op,) if row.reduces else ()
        of_root = (root,) if row.rooted else ()
        function(send.data_ptr(), recv.data_ptr(), count, datatype, *how, *of_root, where.handle, stream)

    return call


def element_ranges(tensor: torch.Tensor, counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the address and the element count of each rank's share of a contiguous tensor."""
    start, width = tensor.data_ptr(), tensor.element_size()
    places = accumulate(counts[:-1], initial=0)
    return [(start + place * width, count) for place, count in zip(places, counts, strict=True)]


def all_gather(
    library: Library, where: Where, send: Any, recv: Any, datatype: int, op: Any, root: Any, counts: Counts, stream: int
) -> None:
    """Gather shares of any size: every rank broadcasts its own."""
    with library.core.group():
        for rank, (place, count) in enumerate(element_ranges(recv, counts[1])):
            if count:
                source = send.data_ptr() if rank == where.rank else place
                library.bindings.broadcast(source, place, count, datatype, rank, where.handle, stream)


def reduce_scatter(
    library: Library, where: Where, send: Any, recv: Any, datatype: int, op: Any, root: Any, counts: Counts, stream: int
) -> None:
    """Combine and scatter shares of any size: one reduce to every rank."""
    with library.core.group():
        for rank, (place, count) in enumerate(element_ranges(send, counts[0])):
            if count:
                target = recv.data_ptr() if rank == where.rank else place
                library.bindings.reduce(place, target, count, datatype, op, rank, where.handle, stream)


def all_to_all(
    library: Library,
    where: Where,
    send: Any,
    recv: Any,
    datatype: int,
    op: Any,
    root: Any,
    counts: Counts | None,
    stream: int,
) -> None:
    """Exchange shares with every rank, in one group; a count of zero stands for nothing."""
    sent, received = counts or ([tensor.numel() // where.size] * where.size for tensor in (send, recv))
    pairs = zip(element_ranges(send, sent), element_ranges(recv, received), strict=True)
    with library.core.group():
        for peer, ((source, outgoing), (target, incoming)) in enumerate(pairs):
            if outgoing:
                library.bindings.send(source, outgoing, datatype, peer, where.handle, stream)
            if incoming:
                library.bindings.recv(target, incoming, datatype, peer, where.handle, stream)


def gather(
    library: Library, where: Where, send: Any, recv: Any, datatype: int, op: Any, root: int, counts: Any, stream: int
) -> None:
    """Send to the root, which receives from everyone."""
    to_root, shares = one_to(root, send.numel(), where), [send.numel() if recv is not None else 0] * where.size
    written = send if recv is None else recv
    all_to_all(library, where, send, written, datatype, op, root, (to_root, shares), stream)


def scatter(
    library: Library, where: Where, send: Any, recv: Any, datatype: int, op: Any, root: int, counts: Any, stream: int
) -> None:
    """Receive from the root, which sends to everyone."""
    shares, of_root = [recv.numel() if send is not None else 0] * where.size, one_to(root, recv.numel(), where)
    read = recv if send is None else send
    all_to_all(library, where, read, recv, datatype, op, root, (shares, of_root), stream)


def one_to(rank: int, count: int, where: Where) -> list[int]:
    """Return counts by rank: all for one, and nothing for the others."""
    return [count if each == rank else 0 for each in range(where.size)]


def message(
    function: Callable[..., None], where: Where, tensor: torch.Tensor, datatype: int, peer: int, stream: int
) -> None:
    """Send or receive a tensor."""
    function(tensor.data_ptr(), tensor.numel(), datatype, peer, where.handle, stream)


# NCCL's own all-to-all would be another call than the exchange that a rank with splits makes
COUNTED: dict[Row, Function] = {ALL_GATHER: all_gather, REDUCE_SCATTER: reduce_scatter} | dict.fromkeys(
    EXCHANGES, all_to_all
)
STAND_INS: dict[str, Function] = {"gather": gather, "scatter": scatter}


def calls_of(library: Library) -> dict[Row, Function]:
    """Return how each row with buffers is called in a release of NCCL."""
    made: dict[Row, Function] = dict(COUNTED)
    for row in ROWS.values():
        if row.nccl is None:
            continue
        if tuple(library.version) >= SINCE.get(row.nccl, (2,)):
            made[row] = direct(row, getattr(library.bindings, ENTRY_POINTS.get(row.nccl, row.nccl)))
        else:
            made[row] = STAND_INS[row.nccl]
    return made
