"""Sends and receives of tensors between two ranks (MPI 3).

Messages between two ranks with one tag arrive in the order in which they were sent. A rank may send to itself if
one side does not block. Peers are given as global ranks, or with ``group_…`` as ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from hpcdist.core import hooks, profiling, world
from hpcdist.core.buffers import LOWEST_PLACE, as_tensor, is_plain
from hpcdist.core.group import Group
from hpcdist.core.point_to_point import (
    FIRST_KEPT,
    check_message,
    check_tag,
    event_name,
    incoming,
    irecv,
    isend,
    outgoing,
)
from hpcdist.core.work import Work


def send(
    tensor: Any, dst: int | None = None, group: Group | None = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """Send a tensor; return when it may be changed again.

    Args:
        tensor: the input.
        dst, group_dst: the receiver as a global rank or as a rank of the group, one of them.
        group: the group; None for the default one.
        tag: a number from 0 on, which the receiver gives too; not 32701 to 32767, the tags of hpcdist's own messages.

    Raises:
        ValueError: no receiver, two, one outside the group, or this rank itself, or an invalid tag.
    """
    if tag.__class__ is not int or not 0 <= tag < FIRST_KEPT:
        tag = check_tag(tag)
    if (target := world.route(group, "send", dst, group_dst)) is None:
        return
    pg, peer = target
    backend, data = outgoing(pg, tensor)
    if peer == backend.rank:
        raise self_message_error(pg, "destination", "isend")
    if hooks.check_message is not None:
        hooks.check_message(pg, "send", peer, data)
    journal = pg.journal
    call = journal.message("send", data.shape, data.dtype, peer)
    event = profiling.begin(pg, backend, "send", [data], call) if hooks.is_profiled() else None
    with journal.blocking(call) if event is None else journal.profiled(call, event):
        backend.send(data, peer, tag)


def recv(
    tensor: Any, src: int | None = None, group: Group | None = None, tag: int = 0, group_src: int | None = None
) -> int:
    """Receive a tensor and return the sender.

    Args:
        tensor: the output; at least as large as the message.
        src, group_src: the sender as a global rank or as a rank of the group; anyone if neither is given.
        group: the group; None for the default one.
        tag: the number that the sender gave.

    Returns:
        The sender's global rank; -1 on ranks outside the group.

    Raises:
        ValueError: two senders, one outside the group, or this rank itself, or an invalid tag.
        RuntimeError: the message does not fit.
    """
    if tag.__class__ is not int or not 0 <= tag < FIRST_KEPT:
        tag = check_tag(tag)
    if (target := world.origin(group, "recv", src, group_src)) is None:
        return -1
    pg, source = target
    backend, data, finish = incoming(pg, tensor)
    if source == backend.rank:
        raise self_message_error(pg, "source", "irecv")
    journal = pg.journal
    call = journal.message("recv", data.shape, data.dtype, source)
    event = profiling.begin(pg, backend, event_name(source), [data], call) if hooks.is_profiled() else None
    with journal.blocking(call) if event is None else journal.profiled(call, event):
        sender = backend.recv(data, source, tag)
    if finish is not None:
        finish()
    return pg.ranks[sender]


def self_message_error(pg: Group, kind: str, other: str | None = None) -> ValueError:
    """Return the error of a blocking call that would wait for this rank itself."""
    advice = f"; to talk to oneself use {other} or batch_isend_irecv" if other is not None else ""
    return ValueError(
        f"Invalid {kind} rank: {kind} rank should not be the same as the rank of the current process "
        f"({pg.ranks[pg.rank()]}){advice}"
    )


OPS: dict[Any, Callable[..., Work | None]] = {
    each: ours for ours in (isend, irecv) for each in (ours, getattr(torch.distributed, ours.__name__))
}


class P2POp:
    """One send or receive of a ``batch_isend_irecv``.

    Args:
        op: ``isend`` or ``irecv``, of hpcdist or of torch.distributed.
        tensor: the input or output.
        peer, group_peer: the other rank as a global rank or as a rank of the group, one of them.
        group: the group; None for the default one.
        tag: matches send and receive; as for ``send``.

    Raises:
        ValueError: another op, no peer, two peers, or one outside the group, or an invalid tag.
        TypeError: not a tensor.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Any,
        peer: int | None = None,
        group: Group | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if not callable(op) or op not in OPS:
            raise ValueError(
                f"Invalid ``op`` {op!r}. Expected ``op`` to be of type ``torch.distributed.isend`` or "
                "``torch.distributed.irecv`` (hpcdist.isend, hpcdist.irecv)."
            )
        self.tag = check_tag(tag)
        if tensor.__class__ is not torch.Tensor:
            as_tensor(tensor, "tensor")
        self.op = OPS[op]
        self.tensor = tensor
        self.group = pg = world.resolve(group)
        self.group_peer = rank = world.group_rank(pg, peer, group_peer)
        self.peer = pg.ranks[rank]

    def __repr__(self) -> str:
        me = self.group.rank()
        source, target = (me, self.group_peer) if self.op is isend else (self.group_peer, me)
        return (
            f"P2POp({self.op.__name__} pg={self.group.group_name}, group_src={source}, group_dst={target}, "
            f"{tuple(self.tensor.shape)}, {self.tensor.dtype})"
        )


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Begin several sends and receives together; their order cannot cause a deadlock.

    Args:
        p2p_op_list: the P2POps, all of one group; also to this rank itself.

    Returns:
        A Work for each, in the same order.

    Raises:
        ValueError: an empty list, an entry that is not a P2POp, or several groups; before anything is sent.
        TypeError: a tensor that messages cannot carry; likewise.
    """
    if p2p_op_list == []:
        raise ValueError("Invalid ``p2p_op_list``: the list is empty")
    groups = set()
    for each in p2p_op_list if isinstance(p2p_op_list, list) else [None]:
        if not isinstance(each, P2POp):
            raise ValueError(
                "Invalid ``p2p_op_list``. Each op is expected to be of type ``torch.distributed.P2POp`` "
                "(hpcdist.P2POp)."
            )
        groups.add(each.group)
        if not is_plain(each.tensor) or each.tensor.data_ptr() < LOWEST_PLACE:
            check_message(each.group, each.tensor, "tensor", each.op is irecv)
    if len(groups) > 1:
        raise ValueError("All ops need to use the same group.")
    group = groups.pop()
    with group.grouped():
        works: list[Any] = [each.op(each.tensor, each.peer, group, each.tag) for each in p2p_op_list]
    return works
