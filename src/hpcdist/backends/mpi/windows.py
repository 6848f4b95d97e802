"""One-sided windows over MPI: memory of every rank that the others write and read (MPI-4.1 chapter 12).

Ranks of one node use each other's memory by load and store; calls between nodes, and atomic ones, are MPI's.

    | signals: a counter for each rank | data |        a segment of each rank, MPI_Win_allocate_shared on its node

On one node that is the only window. On several, MPI_Win_create opens the segments to the whole group, and a user's
tensor has an MPI_Win_create of its own. All are in one passive epoch (MPI_Win_lock_all) until they are closed.

Ordering: a call is complete at the target when it returns (MPI_Win_flush; on a node a copy). Only its sender writes a
counter, so a signal is a store of the sender's count, after an MPI_Win_sync. Atomic calls go through the group's window
on every rank, even between neighbours: MPI makes them atomic within one window only.
"""

from __future__ import annotations

import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from ctypes import memmove
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.datatypes import DATATYPES, PIECE, address, memory, run, send_buffer
from hpcdist.backends.mpi.node.places import locate
from hpcdist.backends.mpi.node.window import NAP_AFTER_SECONDS, PAGE_BYTES, SPINS, stall
from hpcdist.backends.mpi.progress import PROGRESS
from hpcdist.backends.mpi.reductions import MPI_OPS, VENDOR, VERSION, is_compared_as_signed, mpi_op, wide
from hpcdist.core import reduction
from hpcdist.core.backend_parts import SIGNAL_BYTES, RemoteMemory, Windows
from hpcdist.core.buffers import as_bytes
from hpcdist.core.errors import DistBackendError, MismatchError, end_all
from hpcdist.core.objects import Objects
from hpcdist.core.ranks import format_ranks, ranks_by_value
from hpcdist.core.table import ALL_REDUCE

ACCUMULATE = replace(ALL_REDUCE, name="Window.accumulate")  # its ops
# The dtype of the parts of an element on which an op acts one by one. Open MPI's osc/rdma, which combines 4 and 8 bytes
# by the processor's atomic instructions, takes complex64 for int64 before 5.0 (open-mpi/ompi, pull request 11293), and
# in 5.0.11 combines the memory by a bitwise op of 8 bytes with itself
BITWISE = {torch.int64: torch.int32, torch.uint64: torch.int32}
PARTS = {"SUM": {torch.complex64: torch.float32}, "BAND": BITWISE, "BOR": BITWISE, "BXOR": BITWISE}
RETRY_SECONDS = 0.001  # seconds between two attempts to make a window, at most
MAKING = threading.Lock()  # held while a window is made


@contextmanager
def exclusively(comm: MPI.Intracomm) -> Iterator[None]:
    """Context in which no other thread of the ranks' processes makes a window; every rank of the communicator calls.

    In Open MPI 5.0.11 each creation of a window starts and ends UCX, without a lock: two threads that make windows for
    two groups crash the process ("double free or corruption"). A rank that waited for our lock could wait for a rank
    that waits for the lock of another process; so each tries to take its own, and they go on if all have it.
    """
    while True:
        has_lock = MAKING.acquire(False)
        try:
            if all(comm.allgather(has_lock)):
                yield
                return
        finally:
            if has_lock:
                MAKING.release()
        time.sleep(random.uniform(0, RETRY_SECONDS))


class MPIWindow(RemoteMemory):
    """The memory of a group's ranks in one window; every rank of the group makes it.

    ``number`` counts the group's windows; ``sizes`` are the bytes of each rank's memory; ``tensor`` is this rank's
    memory if it is the user's, on all ranks or on none. ``during`` records a call that blocks, for the watchdog: MPI
    may wait until the other rank calls MPI.
    """

    def __init__(
        self,
        group: MPIWindows,
        number: int,
        sizes: Sequence[int],
        tensor: torch.Tensor | None,
        during: Callable[..., AbstractContextManager[object]],
    ) -> None:
        self._group_windows, self.number, self._during = group, number, during
        self._communicator = communicator = group.communicator
        places = locate(communicator.comm, communicator.derived)
        self._node = places.node
        rank, size = communicator.rank, communicator.size
        self._begin = -(-size * SIGNAL_BYTES // PAGE_BYTES) * PAGE_BYTES  # offset of the data in a segment
        peers = places.ranks[places.here]
        own = self._begin + (sizes[rank] if tensor is None else 0)
        # each segment on pages of its own: first touch by the owner places it in the owner's NUMA domain
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
        with exclusively(places.node):
            shared = MPI.Win.Allocate_shared(own, 1, info, places.node)
        info.Free()
        self._windows = [shared]
        # arrays, because weak references show whether they are in use: a tensor on one keeps the window open
        queried: list[Any] = [shared.Shared_query(index)[0] for index in range(len(peers))]
        segments = [np.frombuffer(buffer, np.uint8) for buffer in queried]
        self._watched = [weakref.ref(segment) for segment in segments]
        self._signals = {
            peer: segment.data[: self._begin].cast("q") for peer, segment in zip(peers, segments, strict=True)
        }
        self._counters = [self._signals[rank][src : src + 1] for src in range(size)]
        for counter in self._counters:
            counter[0] = 0
        self._group = shared
        if places.nodes > 1:
            place = segments[peers.index(rank)].ctypes.data  # the array itself would be in use as long as the window is
            with exclusively(communicator.comm):
                self._group = MPI.Win.Create(address(place, own), 1, comm=communicator.comm)
            self._windows.append(self._group)
        self._mapped: dict[int, torch.Tensor] = {}
        if tensor is None:
            self._data, self._start = self._group, self._begin
            for peer, segment in zip(peers, segments, strict=True):
                self._mapped[peer] = torch.from_numpy(segment)[self._begin : self._begin + sizes[peer]]
            self.own = self._mapped[rank].zero_()
        else:
            self.own = self._mapped[rank] = as_bytes(tensor)
            self.own.numpy()  # from now on torch refuses to resize its storage: others would write to freed memory
            with exclusively(communicator.comm):
                self._data, self._start = MPI.Win.Create(memory(tensor), 1, comm=communicator.comm), 0
            self._windows.append(self._data)
        self._is_rdma = VENDOR == "Open MPI" and self._data is not shared
        for window in self._windows:
            window.Lock_all(MPI.MODE_NOCHECK)
        self._sync = shared.Sync
        self._sent, self._taken = [0] * size, [0] * size
        self._addresses = {peer: each.data_ptr() for peer, each in self._mapped.items()}
        self._sync()
        communicator.comm.Barrier()  # all is zero on all ranks
        if len(self._windows) > 1:  # other ranks' calls on this rank's memory may be messages to it
            PROGRESS.follow(self)
            PROGRESS.wake()

    def drive(self) -> bool:
        """Drive MPI, for the progress thread; False once the window is closed."""
        if not self._windows:
            return False
        with suppress(MPI.Exception):  # the communicator is revoked
            # on MPI_COMM_SELF it would not drive MPICH's network: a put waited while its target slept
            self._communicator.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
        return True

    def put(self, tensor: torch.Tensor, dst: int, offset: int) -> None:
        """Write by a copy on a node, by MPI_Put and MPI_Win_flush to other nodes and to a user's tensor."""
        base = self._addresses.get(dst)
        if base is not None:
            memmove(base + offset, tensor.data_ptr(), tensor.nbytes)
            return
        with self._during("Window.put", dst), self._communicator.translating("Window.put"):
            self._data.Put(send_buffer(tensor), dst, (self._start + offset, *run(tensor.nbytes)))
            self._data.Flush(dst)

    def get(self, tensor: torch.Tensor, src: int, offset: int) -> None:
        """Read by a copy on a node, by MPI_Get and MPI_Win_flush from other nodes and from a user's tensor."""
        base = self._addresses.get(src)
        if base is not None:
            self._sync()
            memmove(tensor.data_ptr(), base + offset, tensor.nbytes)
            return
        with self._during("Window.get", src), self._communicator.translating("Window.get"):
            self._data.Get(send_buffer(tensor), src, (self._start + offset, *run(tensor.nbytes)))
            self._data.Flush(src)

    def accumulate(self, tensor: torch.Tensor, dst: int, offset: int, op: Any) -> None:
        atomic_type(tensor.dtype)
        reduction.check(ACCUMULATE, tensor.dtype, op)
        name = reduction.name_of(op)
        if name in ("AVG", "PREMUL_SUM"):
            raise ValueError(
                f"Window.accumulate: ReduceOp.{name} is not an op of one-sided calls; expected {', '.join(MPI_OPS)}"
            )
        if is_compared_as_signed(tensor.dtype, name):
            raise ValueError(
                f"Window.accumulate: {VENDOR} before 5.0 takes {tensor.dtype} for signed integers in ReduceOp.{name}; "
                "expected a signed dtype, or a later MPI"
            )
        if self._is_rdma and name in ("MIN", "MAX") and tensor.dtype in (torch.uint32, torch.uint64):
            raise ValueError(
                f"Window.accumulate: Open MPI takes {tensor.dtype} for signed integers in ReduceOp.{name}, on several "
                "nodes and in windows of tensors; expected a signed dtype"
            )
        tensor = as_bytes(tensor).view(PARTS.get(name, {}).get(tensor.dtype, tensor.dtype))
        datatype, itemsize = DATATYPES[tensor.dtype], tensor.itemsize
        with self._during("Window.accumulate", dst), self._communicator.translating("Window.accumulate"):
            # Open MPI's op/avx saturates narrow sums of vectors of 16 bytes and more; it adds shorter ones one by one
            most = 16 // itemsize - 1 if wide(tensor.dtype, name) is torch.int32 else PIECE
            for start in range(0, tensor.numel(), most):
                part = tensor[start : start + most]
                place = (self._start + offset + start * itemsize, part.numel(), datatype)
                self._data.Accumulate([memory(part), datatype], dst, place, mpi_op(tensor.dtype, name))
            self._data.Flush(dst)

    def fetch_and_add(self, value: torch.Tensor, dst: int, offset: int) -> torch.Tensor:
        datatype, before = atomic_type(value.dtype), torch.empty_like(value)
        if self._is_rdma and value.dtype is torch.complex64 and VERSION < (5,):
            raise TypeError(
                "Window.fetch_and_add: Open MPI before 5.0 takes torch.complex64 for integers, on several nodes and in "
                "windows of tensors; expected torch.complex128, or a later MPI"
            )
        with self._during("Window.fetch_and_add", dst), self._communicator.translating("Window.fetch_and_add"):
            # for a sum of bool: Open MPI crashes in a sum of its C++ bool
            op = mpi_op(value.dtype, "SUM")
            self._data.Fetch_and_op(
                [memory(value), datatype], [memory(before), datatype], dst, self._start + offset, op
            )
            self._data.Flush(dst)
        return before

    def signal(self, dst: int) -> None:
        """Store the count of signals on a node; by MPI_Accumulate (MPI_REPLACE) and MPI_Win_flush on another one."""
        self._sent[dst] = count = self._sent[dst] + 1
        signals, rank = self._signals.get(dst), self._communicator.rank
        if signals is not None:
            self._sync()  # earlier writes complete first
            signals[rank] = count
            return
        with self._during("Window.signal", dst), self._communicator.translating("Window.signal"):
            sent = torch.tensor([count], device="cpu")
            # a reader may see half of a put
            self._group.Accumulate([memory(sent), MPI.INT64_T], dst, (rank * SIGNAL_BYTES, 1, MPI.INT64_T), MPI.REPLACE)
            self._group.Flush(dst)

    def wait_signal(self, src: int, seconds: float) -> None:
        """Poll the sender's counter, which also drives MPI."""
        flag, count = self._counters[src], self._taken[src] + 1
        if flag[0] < count:
            communicator, deadline = self._communicator, time.monotonic() + seconds

            def poll() -> None:
                communicator.poll()
                if time.monotonic() > deadline:
                    raise DistBackendError(
                        f"wait_signal on rank {communicator.rank} of {communicator.size}: no signal of rank {src} has "
                        f"come in {seconds:g} s"
                    )

            with communicator.translating("Window.wait_signal"):
                stall(flag, count, SPINS, NAP_AFTER_SECONDS, communicator.comm.Iprobe, poll)
        self._taken[src] = count
        for window in self._windows:
            window.Sync()

    def mapped(self, rank: int) -> torch.Tensor | None:
        return self._mapped.get(rank)

    def close(self, is_left: bool = False) -> None:
        """Free the windows, but not memory on which a tensor still exists: that stays until the process ends.

        ``is_left``: a rank may still be in another call, which the calls that free the windows would meet.
        """
        if not self._windows:
            return
        is_left = is_left or self._communicator.is_revoked()
        if not is_left:
            self._group_windows.meet(self)
        (shared, *others), self._windows = self._windows, []
        self.own = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._mapped, self._addresses, self._signals, self._counters = {}, {}, {}, []
        self._group_windows.open_now.remove(self)
        communicator, node = self._communicator, self._node
        if is_left:
            return  # to free them would wait for the dead
        with communicator.translating("Window.close"):
            is_used = any(communicator.comm.allgather(any(segment() is not None for segment in self._watched)))
            for window in reversed([shared, *others]):
                window.Unlock_all()
            for window in reversed(others):
                window.Free()
            if is_used:
                warnings.warn(
                    "a Window is closed while a rank has a tensor on its memory (Window.tensor, map_remote_tensor), "
                    "which is kept until the process ends",
                    RuntimeWarning,
                    stacklevel=4,
                )
                return
            shared.Free()
            communicator.derived.remove(node)
            node.Free()


class MPIWindows(Windows):
    """The open windows of one communicator, in the same order on all ranks; ``objects`` compares their calls."""

    def __init__(self, communicator: Communicator, objects: Objects) -> None:
        self.communicator, self._objects = communicator, objects
        self.open_now: list[MPIWindow] = []
        self._made = 0  # windows

    def open(
        self, sizes: Sequence[int], tensor: torch.Tensor | None, during: Callable[..., AbstractContextManager[object]]
    ) -> MPIWindow:
        with self.communicator.translating("Window"):
            made = MPIWindow(self, self._made, sizes, tensor, during)
        self._made += 1
        self.open_now.append(made)
        return made

    def meet(self, window: MPIWindow) -> None:
        """Raise if another rank makes another call than the close of this window."""
        numbers = self._objects.all_gather(window.number, call="Window.close")
        if len(ranks := ranks_by_value(numbers)) > 1:
            ways = "; ".join(f"{format_ranks(those)} number {each + 1}" for each, those in ranks.items())
            raise MismatchError(
                f"Window.close: ranks close different windows of the group, counted as they were made: {ways}; "
                "expected one order on all ranks. They are still open"
            )

    def close(self, is_left: bool) -> None:
        """Close all, the last one first; every rank calls. ``is_left`` as for a window."""
        end_all(partial(window.close, is_left) for window in self.open_now[::-1])


def atomic_type(dtype: torch.dtype) -> MPI.Datatype:
    """Return MPI's datatype for a dtype; TypeError if it has none."""
    if dtype not in DATATYPES:
        raise TypeError(f"MPI has no atomic calls for {dtype}; it has for {', '.join(map(str, DATATYPES))}")
    return DATATYPES[dtype]
