"""Messages: the group, checks and buffers of every send and receive; ``isend`` and ``irecv``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from hpcdist.core import hooks, profiling
from hpcdist.core.backend import Backend, Message
from hpcdist.core.buffers import (
    LOWEST_PLACE,
    QUANTIZED_TYPES,
    as_tensor,
    check_memory,
    copy_into,
    for_reading,
    is_direct,
    is_plain,
    nested,
    on_memory,
    quantized_error,
)
from hpcdist.core.call_cache import LOOKS
from hpcdist.core.errors import LayoutError, MismatchError
from hpcdist.core.group import Group
from hpcdist.core.queue import in_modes_of_caller
from hpcdist.core.ranks import as_int
from hpcdist.core.work import Work
from hpcdist.core.world import WORLD, origin, route

ARRAY = np.ndarray


class KeptTag(int):
    """A tag of hpcdist's own messages: a user's tag of the same number is refused, for its class."""


# tags of hpcdist's own messages, refused to users; every MPI has tags up to 32767 (MPI 9.1.2)
FIRST_KEPT, LAST_KEPT = 32_701, 32_767
EXCHANGE_TAG = KeptTag(LAST_KEPT)  # of messages between neighbours
LARGEST_TAG = (1 << 31) - 1  # a C int's, as in MPI and gloo; MPICH refuses smaller ones by itself


def outgoing(pg: Group, tensor: Any) -> tuple[Backend, torch.Tensor]:
    """Return the backend that carries a tensor and the contiguous tensor to send."""
    cpu = pg.cpu
    if tensor.__class__ is ARRAY:
        tensor = on_memory(tensor)
    if is_plain(tensor) and cpu is not None and tensor.is_cpu and tensor.data_ptr() >= LOWEST_PLACE:
        return cpu, tensor
    data = for_reading(check_one_dense(as_tensor(tensor, "tensor")))
    return pg.backend(data.device), data


def incoming(pg: Group, tensor: Any) -> tuple[Backend, torch.Tensor, Callable[[], None] | None]:
    """Return the backend, the contiguous tensor to receive into, and a function that copies it to the caller's."""
    cpu = pg.cpu
    if tensor.__class__ is ARRAY:
        tensor = on_memory(tensor)
    if is_plain(tensor) and cpu is not None and tensor.is_cpu and tensor.data_ptr() >= LOWEST_PLACE:
        return cpu, tensor, None
    target = check_one_dense(as_tensor(tensor, "tensor", writable=True))
    backend = pg.backend(target.device)
    if is_direct(target):
        return backend, target, None
    staged = for_reading(target)  # a shorter message leaves the rest as it was
    return backend, staged, in_modes_of_caller(partial(copy_into, staged, target))


def check_one_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; raise if it is sparse or quantized."""
    if hooks.has_wrapper((tensor,)):
        raise TypeError(
            f"messages carry tensors that have memory; this one is a {type(tensor).__name__}, which wraps others: send "
            "these"
        )
    if tensor.layout is not torch.strided:
        raise LayoutError(f"messages carry dense tensors; this one is {tensor.layout}: send its indices() and values()")
    if tensor.is_nested:
        raise nested("a message")
    if tensor.dtype in QUANTIZED_TYPES:
        raise quantized_error("a message", tensor)
    if not tensor.is_meta:  # which no group carries
        check_memory(tensor)
    return tensor


def check_message(pg: Group, value: Any, name: str, writable: bool = False, is_viewed: bool = False) -> torch.Tensor:
    """Return a message's buffer as a tensor (``as_tensor``); raise what its ``isend`` or ``irecv`` would."""
    tensor = as_tensor(value, name, writable, is_viewed)
    pg.backend(tensor.device)
    return check_one_dense(tensor)


def isend(
    tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None
) -> Work | None:
    """Begin to send a tensor; it must not change until ``wait()`` of the Work returns.

    Takes the arguments of ``send`` and raises as it does; a rank may send to itself. Returns None on ranks
    outside the group.
    """
    return begin_message("isend", tensor, dst, group, tag, group_dst)


def irecv(
    tensor: Any, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None
) -> Work | None:
    """Begin to receive a tensor; it holds the message when ``wait()`` of the Work returns.

    Takes the arguments of ``recv`` and raises as it does; the Work's ``source_rank()`` tells the sender as a
    rank of the group. Returns None on ranks outside the group.
    """
    return begin_message("irecv", tensor, src, group, tag, group_src)


def begin_message(what: str, tensor: Any, peer: Any, group: Any, tag: int, group_peer: Any) -> Work | None:
    """Begin an ``isend`` or ``irecv``; a call like an earlier one skips the checks."""
    if tag.__class__ is not int or not 0 <= tag < FIRST_KEPT:
        tag = check_tag(tag)
    if tensor.__class__ is ARRAY:
        tensor = on_memory(tensor)
    is_send = what == "isend"
    known = finish = None
    rank: Any = group_peer  # in the group; None for anyone
    pg: Any = WORLD.default if group is None else group
    if isinstance(pg, Group) and hooks.check_message is None:
        if group_peer is not None:
            has_rank = peer is None and group_peer.__class__ is int and 0 <= group_peer < len(pg.ranks)
        elif peer is not None:
            has_rank = peer.__class__ is int and (rank := pg.group_ranks.get(peer)) is not None
        else:
            has_rank = not is_send
        if has_rank:
            kept = pg.known.get(what, ())
            for each in kept:
                if each.is_like(tensor):
                    known = each
                    if known is not kept[0] and pg.journal.messages % LOOKS == 0:
                        pg.known.advance(what, known)
                    break
    if known is not None:
        if tensor.data_ptr() < LOWEST_PLACE:
            check_memory(tensor)
        data = tensor
        _, backend, dtype, staged = known
        if staged is not None:
            data, finish = staged(tensor)
    else:
        way = (route if is_send else origin)(group, what, peer, group_peer)
        if way is None:
            return None
        pg, rank = way
        if is_send:
            backend, data = outgoing(pg, tensor)
            if hooks.check_message is not None:
                hooks.check_message(pg, what, rank, data)
        else:
            backend, data, finish = incoming(pg, tensor)
        dtype = data.dtype
    journal = pg.journal
    journal.messages = number = journal.messages + 1  # ``Journal.message`` without a call, for latency
    call = (journal, number, what, data.shape, dtype, rank)
    journal.push(call)
    event = None
    if hooks.is_profiled():
        event = profiling.begin(pg, backend, "send" if is_send else event_name(rank), [data], call, True)
    begin = backend.isend if is_send else backend.irecv
    if backend.begins_at_once:  # for latency
        work = begin(data, rank, tag, finish)
    else:
        with journal.blocking(call):
            work = begin(data, rank, tag, finish)
    work._call = call
    if known is not None and finish is not None and not is_send:
        work._result = [tensor]  # after that the copy belongs to another message
    if event is not None:
        work._ends(event)
    if known is None and number % LOOKS == 0:
        pg.known.look_at_message(what, tensor, data, backend)
    return work


def check_tag(tag: Any) -> int:
    """Return the tag of a message as an int, or raise; callers test the usual tags themselves.

    Negative tags have meanings in MPI: -1 is MPI_ANY_TAG in Open MPI and MPICH. mpi4py takes 1.5 for 1.
    """
    if isinstance(tag, KeptTag):
        return tag
    number = as_int(tag, "tag")
    if number < 0:
        raise MismatchError(f"Tag must be nonnegative: got {number}; expected 0 or more")
    if number > LARGEST_TAG:
        raise MismatchError(f"tag {number} is too large; expected {LARGEST_TAG} at most")
    if FIRST_KEPT <= number <= LAST_KEPT:
        raise MismatchError(
            f"tag {number} is kept for hpcdist's own messages, as all from {FIRST_KEPT} to {LAST_KEPT}; "
            "expected another"
        )
    return number


def begin(pg: Group, sends: Iterable[Message], recvs: Iterable[Message]) -> list[Work]:
    """Begin messages under ``EXCHANGE_TAG``; several between two ranks are matched in the order of each rank's list."""
    with pg.grouped():
        begun = [irecv(tensor, None, pg, EXCHANGE_TAG, peer) for tensor, peer in recvs]
        begun += [isend(tensor, None, pg, EXCHANGE_TAG, peer) for tensor, peer in sends]
    return [work for work in begun if work is not None]


def between(pg: Group, sends: Sequence[Message], recvs: Sequence[Message], are_plain: bool) -> Callable[[], None]:
    """Return a function that exchanges messages on the same memory at each call, as ``begin`` and ``wait`` do.

    ``are_plain``: all tensors are plain and on the CPU.
    """
    cpu = pg.cpu
    prepared = cpu.between(sends, recvs, EXCHANGE_TAG) if are_plain and cpu is not None else None

    def exchange() -> None:
        if prepared is not None and pg.cpu is cpu and hooks.check_message is None and not hooks.is_profiled():
            prepared(pg.journal)
            return
        for work in begin(pg, sends, recvs):
            work.wait()

    return exchange


def event_name(source: int | None) -> str:
    """Return c10d's name for the event of a receive."""
    return "recvAnySource" if source is None else "recv"
