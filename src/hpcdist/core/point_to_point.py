"""Messages: the group, checks and buffers of every send and receive, and those that do not block."""

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


def isend(
    tensor: Any,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Begin to send a tensor, which must not change until ``wait()`` of the Work returns.

    Takes the arguments of ``send`` and raises as it does; a rank may send to itself. Returns None on ranks
    outside the group.
    """
    way = route(group, "isend", dst, group_dst)
    if way is None:
        return None
    pg, peer = way
    backend, data = outgoing(pg, tensor)
    if hooks.check_message is not None:
        hooks.check_message(pg, "isend", peer, data)
    journal = pg.journal
    call = journal.message("isend", data, peer)
    event = profiling.begin(pg, backend, "send", [data], call, True) if hooks.is_profiled() else None
    before, journal.current = journal.current, call
    try:
        work = backend.isend(data, peer, tag)
    finally:
        journal.current = before
    work._call = call
    if event is not None:
        work._ends(event)
    return work


def irecv(
    tensor: Any,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Begin to receive a tensor, which is there when ``wait()`` of the Work returns.

    Takes the arguments of ``recv`` and raises as it does; the Work's ``source_rank()`` tells the sender as a
    rank of the group. Returns None on ranks outside the group.
    """
    way = origin(group, "irecv", src, group_src)
    if way is None:
        return None
    pg, source = way
    backend, data, finish = incoming(pg, tensor)
    journal = pg.journal
    call = journal.message("irecv", data, source)
    event = profiling.begin(pg, backend, title(source), [data], call, True) if hooks.is_profiled() else None
    before, journal.current = journal.current, call
    try:
        work = backend.irecv(data, source, tag, finish)
    finally:
        journal.current = before
    work._call = call
    if event is not None:
        work._ends(event)
    return work


def title(source: int | None) -> str:
    """Return what c10d calls the event of a receive."""
    return "recvAnySource" if source is None else "recv"
