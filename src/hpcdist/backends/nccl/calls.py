"""NCCL's calls for each row of the table: one call, or several in a group if NCCL has no such call.

The functions are those of ``nccl.bindings.nccl``, which are NCCL's own: they take addresses, element counts, and
datatypes and ops as numbers. Several of them make shares of different sizes, all_to_all, and gather and scatter in
releases that lack these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from hpcdist.backends.nccl.library import GATHERS_SINCE, Library
from hpcdist.core.buffers import overlap
from hpcdist.core.table import ALL_GATHER, EXCHANGES, GATHER, REDUCE_SCATTER, ROWS, SCATTER, Row, Shape


class Where(NamedTuple):
    """The communicator of a call: the library, its handle, this rank in it, and its size."""

    library: Library
    handle: Any
    rank: int
    size: int


# (where, send, recv, datatype, op, root, counts, stream): contiguous tensors of NCCL's elements
Function = Callable[[Where, Any, Any, int, Any, Any, Any, int], None]


def direct(row: Row, function: Callable[..., None]) -> Function:
    """Return the call of a row that is one function of NCCL."""
    of_receive = row.shape is Shape.SCATTER

    def call(on: Where, send: Any, recv: Any, datatype: int, op: Any, root: Any, _: Any, stream: int) -> None:
        if recv is None:
            recv = send  # not written: this rank is not the root
        elif send is None:
            send = recv  # not read
        count = recv.numel() if of_receive else send.numel()
        how = (op,) if row.reduces else ()
        of_root = (root,) if row.rooted else ()
        function(send.data_ptr(), recv.data_ptr(), count, datatype, *how, *of_root, on.handle, stream)

    return call


def element_ranges(tensor: torch.Tensor, counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the address and the element count of each rank's share of a contiguous tensor."""
    start, width = tensor.data_ptr(), tensor.element_size()
    places = accumulate(counts[:-1], initial=0)
    return [(start + place * width, count) for place, count in zip(places, counts, strict=True)]


def all_gather(on: Where, send: Any, recv: Any, datatype: int, op: Any, root: Any, counts: Any, stream: int) -> None:
    """Gather shares of any size: every rank broadcasts its own."""
    with on.library.core.group():
        for rank, (place, count) in enumerate(element_ranges(recv, counts[1])):
            if count:
                source = send.data_ptr() if rank == on.rank else place
                on.library.bindings.broadcast(source, place, count, datatype, rank, on.handle, stream)


def reduce_scatter(
    on: Where, send: Any, recv: Any, datatype: int, op: Any, root: Any, counts: Any, stream: int
) -> None:
    """Combine and scatter shares of any size: one reduce to every rank."""
    with on.library.core.group():
        for rank, (place, count) in enumerate(element_ranges(send, counts[0])):
            if count:
                target = recv.data_ptr() if rank == on.rank else place
                on.library.bindings.reduce(place, target, count, datatype, op, rank, on.handle, stream)


def all_to_all(on: Where, send: Any, recv: Any, datatype: int, op: Any, root: Any, counts: Any, stream: int) -> None:
    """Exchange shares with every rank, in one group, without those of no elements."""
    sent, received = counts or ([tensor.numel() // on.size] * on.size for tensor in (send, recv))
    pairs = zip(element_ranges(send, sent), element_ranges(recv, received), strict=True)
    with on.library.core.group():
        for peer, ((source, outgoing), (target, incoming)) in enumerate(pairs):
            if outgoing:
                on.library.bindings.send(source, outgoing, datatype, peer, on.handle, stream)
            if incoming:
                on.library.bindings.recv(target, incoming, datatype, peer, on.handle, stream)


def gather(on: Where, send: Any, recv: Any, datatype: int, op: Any, root: int, counts: Any, stream: int) -> None:
    """Send to the root, which receives from every rank."""
    count, is_root = send.numel(), on.rank == root
    shares = [count * (peer == root) for peer in range(on.size)], [count * is_root] * on.size
    all_to_all(on, send, recv if is_root else send, datatype, op, root, shares, stream)


def scatter(on: Where, send: Any, recv: Any, datatype: int, op: Any, root: int, counts: Any, stream: int) -> None:
    """Receive from the root, which sends to every rank."""
    count, is_root = recv.numel(), on.rank == root
    shares = [count * is_root] * on.size, [count * (peer == root) for peer in range(on.size)]
    all_to_all(on, send if is_root else recv, recv, datatype, op, root, shares, stream)


def apart(row: Row, rank: int, send: Any, recv: Any, counts: Any = None) -> Any:
    """Return the input, or a copy of it if it shares memory with the output and that is no call in place for NCCL.

    In place are the same memory twice, and a rank's share at its own place in the whole.
    """
    exchanges = row in EXCHANGES
    if (send is recv and not exchanges) or send is None or recv is None or not overlap(send, recv):
        return send
    share, whole = (send, recv) if send.nbytes < recv.nbytes else (recv, send)
    place = rank * share.nbytes if share.nbytes < whole.nbytes else 0
    is_in_place = counts is None and not exchanges and share.data_ptr() == whole.data_ptr() + place
    return send if is_in_place else send.clone()


def premultiplied(function: Function, factor: float) -> Function:
    """Return a reduction of what this rank's values are times a factor, of which NCCL makes an op for the call."""

    def call(on: Where, send: Any, recv: Any, datatype: int, _: Any, root: Any, counts: Any, stream: int) -> None:
        bindings, held = on.library.bindings, torch.tensor([factor], dtype=send.dtype, device="cpu")
        on_host = bindings.ScalarResidence.HostImmediate
        op = bindings.red_op_create_pre_mul_sum(held.data_ptr(), datatype, on_host, on.handle)
        try:
            function(on, send, recv, datatype, op, root, counts, stream)
        finally:
            bindings.red_op_destroy(op, on.handle)  # NCCL has taken a copy

    return call


def message(on: Where, name: str, tensor: torch.Tensor, datatype: int, peer: int, stream: int) -> None:
    """Send or receive a tensor."""
    getattr(on.library.bindings, name)(tensor.data_ptr(), tensor.numel(), datatype, peer, on.handle, stream)


# NCCL's own all-to-all would be another call than the exchange that a rank with splits makes
COUNTED: dict[Row, Function] = {ALL_GATHER: all_gather, REDUCE_SCATTER: reduce_scatter} | dict.fromkeys(
    EXCHANGES, all_to_all
)


def calls_of(library: Library) -> dict[Row, Function]:
    """Return the call of each row with buffers, for a release of NCCL."""
    own = {row: direct(row, getattr(library.bindings, row.nccl)) for row in ROWS.values() if row.nccl is not None}
    if library.version < GATHERS_SINCE:
        own |= {GATHER: gather, SCATTER: scatter}
    return COUNTED | own
