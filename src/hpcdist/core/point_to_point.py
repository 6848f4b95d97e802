"""Messages: the group, checks and buffers of every send and receive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hpcdist.core import hooks, profiling
from hpcdist.core.backend import Backend
from hpcdist.core.buffers import as_tensor, for_reading, for_writing, is_plain, put
from hpcdist.core.group import Group
from hpcdist.core.work import Work, in_modes_of_caller
from hpcdist.core.world import origin, route


def outgoing(pg: Group, tensor: Any) -> tuple[Backend, torch.Tensor]:
    """Return the backend that carries a tensor and the contiguous tensor to send."""
    cpu = pg.cpu
    if is_plain(tensor) and cpu is not None and tensor.is_cpu:
        return cpu, tensor
    data = for_reading(dense(as_tensor(tensor, "tensor")))
    return pg.backend(data.device), data


def incoming(pg: Group, tensor: Any) -> tuple[Backend, torch.Tensor, Callable[[], None] | None]:
    """Return the backend, the contiguous tensor to receive into, and what copies it to the caller's."""
    cpu = pg.cpu
    if is_plain(tensor) and cpu is not None and tensor.is_cpu:
        return cpu, tensor, None
    target = dense(as_tensor(tensor, "tensor", writable=True))
    staged = for_writing(target)
    if staged is not target:
        staged.copy_(target)  # a shorter message leaves the rest as it was

    def finish() -> None:
        put(staged, target)

    return pg.backend(staged.device), staged, None if staged is target else in_modes_of_caller(finish)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; TypeError where it is sparse."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"messages carry dense tensors; this one is {tensor.layout}: send its indices() and values()")
    return tensor


def begin_send(group: Any, tensor: Any, dst: int | None, group_dst: int | None, tag: int) -> Work | None:
    """Begin to send; None where this rank is not in the group."""
    way = route(group, "isend", dst, group_dst)
    if way is None:
        return None
    pg, peer = way
    backend, data = outgoing(pg, tensor)
    event = profiling.begin(pg, backend, "send", [data]) if hooks.is_profiled() else None
    journal = pg.journal
    call = journal.message("isend", data, peer)
    before, journal.current = journal.current, call
    try:
        return recorded(backend.isend(data, peer, tag), call, event)
    finally:
        journal.current = before


def begin_receive(group: Any, tensor: Any, src: int | None, group_src: int | None, tag: int) -> Work | None:
    """Begin to receive, from anyone where neither source is given; None where this rank is not in the group."""
    way = origin(group, "irecv", src, group_src)
    if way is None:
        return None
    pg, source = way
    backend, data, finish = incoming(pg, tensor)
    event = profiling.begin(pg, backend, title(source), [data]) if hooks.is_profiled() else None
    journal = pg.journal
    call = journal.message("irecv", data, source)
    before, journal.current = journal.current, call
    try:
        return recorded(backend.irecv(data, source, tag, finish), call, event)
    finally:
        journal.current = before


def title(source: int | None) -> str:
    """Return what c10d calls the event of a receive."""
    return "recvAnySource" if source is None else "recv"


def recorded(work: Work, call: tuple[Any, ...], event: hooks.Event | None) -> Work:
    """Let a Work know its record, and end its event."""
    work._call = call
    if event is not None:
        work._ends(event)
    return work
