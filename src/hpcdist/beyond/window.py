"""One-sided windows: memory of each rank that the others write and read without a call of that rank.

The names are those of c10d's windows (``new_window`` in torch 2.14: ``put``, ``signal``, ``wait_signal``,
``map_remote_tensor``); ``get``, ``accumulate`` and ``fetch_and_add`` are MPI's (MPI-4.1 chapter 12). Ranks are ranks of
the group, offsets count elements of the window.
"""

from __future__ import annotations

import mmap
import os
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed import ReduceOp

from hpcdist.core import memory_file, world
from hpcdist.core.agreement import attempt
from hpcdist.core.backend_parts import SIGNAL_BYTES
from hpcdist.core.buffers import (
    LOWEST_PLACE,
    as_tensor,
    check_dense,
    check_dtype,
    check_memory,
    copy_into,
    for_reading,
    for_writing,
    is_plain,
)
from hpcdist.core.errors import DistBackendError, MismatchError
from hpcdist.core.group import Group
from hpcdist.core.printing import format_value
from hpcdist.core.ranks import as_int, as_rank, ranks_by_value
from hpcdist.core.reduction import canonical
from hpcdist.core.work import check_timeout
from hpcdist.launch import environment

# of a rank's part of a window, beside its data and counters: at most what rounds it to pages, and MPI's own
OWN_BYTES = 4 * mmap.PAGESIZE


class Window:
    """Open memory of every rank of a group to the others; every rank of the group makes it, and closes it.

    Use it in a ``with`` block, or call ``close``. A call is complete when it returns: the data of ``put`` is in the
    other rank's memory. ``signal`` and ``wait_signal``, or a collective such as ``barrier``, make it visible to that
    rank; otherwise it may read old values, or a mix. It needs MPI.

    Args:
        memory: the number of elements of this rank, zero at first, in memory that its node shares; or a contiguous
            CPU tensor (or array) of this rank, which is written in place; torch refuses to resize its storage from then
            on. The number may differ between ranks.
        dtype: of the elements, the same on all ranks; not used if ``memory`` is a tensor.
        group: the group; None for the default one.

    Attributes:
        tensor: this rank's memory, one-dimensional; must not be used after ``close``.
        sizes: the number of elements of each rank.

    Raises:
        TypeError, ValueError: an invalid ``memory`` or dtype, or one that differs between the ranks; on all ranks.
        DistBackendError: a node lacks room in /dev/shm; on all ranks.
        RuntimeError: the group's backend for CPU tensors is not MPI.
    """

    def __init__(self, memory: Any, dtype: torch.dtype = torch.float32, group: Group | None = None) -> None:
        pg = world.resolve(group)
        backend = pg.backend("cpu")
        if backend.windows is None:
            raise RuntimeError(f"Backend {backend.name} does not support new_window: one-sided windows need MPI")
        with pg.during("Window"):
            offers = attempt(backend, "Window", lambda: offer(memory, dtype))
            check_offers(offers)
            self.dtype = offers[0].dtype
            self.sizes = [each.numel for each in offers]
            nbytes = [numel * self.dtype.itemsize for numel in self.sizes]
            own = as_tensor(memory, "memory", True, True) if offers[0].is_tensor else None
            self._remote = backend.windows.open(nbytes, own, pg.journal.during)
        self._group, self._backend, self._itemsize = pg, backend, self.dtype.itemsize
        self.tensor = self._remote.own.view(self.dtype)
        self._is_open = True

    def put(self, tensor: Any, dst: int, offset: int = 0) -> None:
        """Write a tensor to a rank's memory.

        Args:
            tensor: of the window's dtype; any shape, strided too.
            dst: the rank of the group.
            offset: the first element of its memory to write.

        Raises:
            ValueError: no such rank or place, another dtype, or the window is closed.
        """
        data = tensor if is_plain(tensor) and tensor.is_cpu else for_reading(with_memory("Window.put", tensor))
        self._remote.put(data, *self._place("put", data, dst, offset))

    def get(self, tensor: Any, src: int, offset: int = 0) -> None:
        """Read a rank's memory into a tensor, which is written in place; arguments and errors as for ``put``."""
        target = tensor if is_plain(tensor) and tensor.is_cpu else with_memory("Window.get", tensor, writable=True)
        staged = for_writing(target)
        self._remote.get(staged, *self._place("get", staged, src, offset))
        if staged is not target:
            copy_into(staged, target)

    def accumulate(self, tensor: Any, dst: int, offset: int = 0, op: Any = ReduceOp.SUM) -> None:
        """Combine a tensor with a rank's memory, atomically for each element among all ranks (MPI_Accumulate).

        Args:
            tensor, dst, offset: as for ``put``; of a dtype that MPI has.
            op: SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR.

        Raises:
            TypeError: MPI lacks the dtype, or ``op`` is not an op.
            ValueError, RuntimeError: an op without meaning here, and as for ``put``.
        """
        data = for_reading(with_memory("Window.accumulate", tensor))
        self._remote.accumulate(data, *self._place("accumulate", data, dst, offset), canonical(op))

    def fetch_and_add(self, dst: int, offset: int = 0, value: Any = 1) -> Any:
        """Add a number to one element of a rank's memory, atomically among all ranks (MPI_Fetch_and_op).

        Args:
            dst, offset: as for ``put``.
            value: the number to add, an integer unless the window's dtype has fractions.

        Returns:
            The previous value.

        Raises:
            TypeError: MPI lacks the dtype, or ``value`` is not such a number.
            ValueError: as for ``put``.
        """
        data = one_element(value, self.dtype)
        return self._remote.fetch_and_add(data, *self._place("fetch_and_add", data, dst, offset)).item()

    def signal(self, dst: int) -> None:
        """Send a rank a signal, which it sees after all earlier writes of this rank to it.

        Args:
            dst: the rank of the group.
        """
        self._remote.signal(self._check("signal", dst))

    def wait_signal(self, src: int, timeout: timedelta | None = None) -> None:
        """Wait for one signal of a rank; each call takes one, and earlier signals are kept.

        Args:
            src: the rank of the group.
            timeout: the longest wait; None for the group's limit.

        Raises:
            DistBackendError: no signal has come in time, or under ULFM a rank has died.
        """
        check_timeout(timeout, may_be_zero=True)
        limit = self._group.timeout if timeout is None else timeout
        self._remote.wait_signal(self._check("wait_signal", src), limit.total_seconds())

    def map_remote_tensor(self, rank: int) -> torch.Tensor:
        """Return the memory of a rank of this node as a tensor, to read and write until ``close``.

        Raises:
            RuntimeError: the rank is on another node, or the window was made of a tensor.
        """
        if (found := self._remote.mapped(self._check("map_remote_tensor", rank))) is None:
            raise RuntimeError(
                f"map_remote_tensor: rank {self._group.rank()} cannot load from the memory of rank {rank}, which is on "
                "another node, or a tensor of its own; make the window with a number of elements, or use get"
            )
        return found.view(self.dtype)

    def close(self) -> None:
        """Free the window; every rank of the group calls, once or more often. The end of the group closes it too.

        Drop ``tensor`` and tensors of ``map_remote_tensor`` before; if one still exists, a warning says that the memory
        stays until the process ends.
        """
        if not self._is_open:
            return
        self._is_open = False
        del self.tensor
        if self._group.cpu is self._backend:  # it ended with its group; in a forked child it belongs to the parent
            self._backend.settle()
            try:
                with self._group.journal.during("Window.close"):
                    self._remote.close()
            except MismatchError:  # not closed by another rank
                self.tensor, self._is_open = self._remote.own.view(self.dtype), True
                raise

    def __enter__(self) -> Window:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:  # the others do not know of the error
            self.close()

    def _check(self, call: str, rank: Any) -> int:
        """Return the target's rank in the group, or raise."""
        cpu = self._group.cpu
        if not self._is_open or cpu is None:
            raise ValueError(f"Window.{call}: the window is closed, or its group was destroyed")
        if cpu is not self._backend:
            cpu.settle()  # raises in a forked child
        if not 0 <= (number := rank if rank.__class__ is int else as_rank(rank)) < len(self.sizes):
            raise MismatchError(f"Window.{call}: there is no rank {rank} in the group (0 to {len(self.sizes) - 1})")
        return number

    def _place(self, call: str, data: torch.Tensor, rank: Any, offset: Any) -> tuple[int, int]:
        """Check a call's arguments, and return the other rank, and the call's offset in its memory in bytes."""
        rank = self._check(call, rank)
        if offset.__class__ is not int:
            offset = as_int(offset, "offset")
        if data.dtype is not self.dtype or not data.is_cpu:
            raise MismatchError(
                f"Window.{call}: the tensor is {data.dtype} on {data.device}; expected {self.dtype} on cpu"
            )
        if data.data_ptr() < LOWEST_PLACE:
            check_memory(data)
        if not 0 <= offset <= self.sizes[rank] - data.numel():
            raise MismatchError(
                f"Window.{call}: {data.numel()} elements from offset {offset} on do not lie in the {self.sizes[rank]} "
                f"elements of rank {rank}"
            )
        return rank, offset * self._itemsize


def one_element(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a caller's number as a tensor of one element; TypeError for others, or if it would lose a fraction."""
    if isinstance(value, torch.Tensor) and value.is_cpu and value.layout is torch.strided:
        check_memory(value)
    if not (dtype.is_floating_point or dtype.is_complex):
        value = as_int(value, "value")
    try:
        return torch.as_tensor(value, dtype=dtype, device="cpu").detach().clone().reshape(1)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"value is {format_value(value)} of type {type(value).__name__}; expected a number that {dtype} has"
        ) from error


def with_memory(call: str, value: Any, writable: bool = False) -> torch.Tensor:
    """Return a caller's tensor or array as a dense tensor."""
    tensor = as_tensor(value, "tensor", writable)
    check_dense(call, tensor)
    if tensor.is_cpu:  # for another device ``Window._place`` raises
        check_memory(tensor)
    return tensor


class Offer(NamedTuple):
    """The memory that one rank opens, its node, and the free bytes in its /dev/shm."""

    is_tensor: bool
    numel: int
    dtype: torch.dtype
    node: str
    host: str
    free: int | None

    def __str__(self) -> str:
        return f"{'a tensor' if self.is_tensor else 'elements'} of {self.dtype}"


def offer(memory: Any, dtype: Any) -> Offer:
    """Check the arguments of one rank."""
    place = environment.node_key(), os.uname().nodename, memory_file.free_bytes()
    if isinstance(memory, (int, np.integer)):
        check_dtype(dtype)
        if memory < 0:
            raise ValueError(f"`memory` is {memory}; expected a number of elements, or a tensor")
        return Offer(False, int(memory), dtype, *place)
    tensor = as_tensor(memory, "memory", True, True)
    if not is_plain(tensor) or not tensor.is_cpu:
        raise ValueError("`memory` is not a plain tensor; expected a contiguous one on the CPU")
    check_memory(tensor)
    return Offer(True, tensor.numel(), tensor.dtype, *place)


def check_offers(offers: list[Offer]) -> None:
    """Raise the same on every rank if they open different kinds of memory or a node has no room."""
    first = offers[0]
    for rank, each in enumerate(offers):
        if (each.is_tensor, each.dtype) != (first.is_tensor, first.dtype):
            raise MismatchError(
                f"Window: rank 0 opens {first}, rank {rank} {each}; expected all to open a number of elements, or all "
                "a tensor, of one dtype"
            )
    for ranks in ranks_by_value(each.node for each in offers).values():
        peers = [offers[rank] for rank in ranks]
        needed = 0 if first.is_tensor else sum(each.numel for each in peers) * first.dtype.itemsize
        needed += len(peers) * (OWN_BYTES + SIGNAL_BYTES * len(offers))
        free = min((each.free for each in peers if each.free is not None), default=needed)
        if free < needed:
            raise DistBackendError(f"Window: {memory_file.no_room(peers[0].host, free, needed)}")
