"""Backend: the interface of a library that carries out a process group's calls.

A backend is one communicator of one library (MPI, NCCL, gloo, none) and the calls on it. ``core.issue``
has already checked the call and made the tensors flat, contiguous and of one device; a backend checks
what only it can know. Ranks here are ranks of the group, and a root is one of them.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import torch
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import Store

from hpcdist.core import reduction
from hpcdist.core.backend_parts import Faults, Membership, Windows
from hpcdist.core.buffers import resized
from hpcdist.core.call import Call, Run, Start
from hpcdist.core.call_log import CallLog, OwnCallLog
from hpcdist.core.call_words import kind_word, with_size
from hpcdist.core.errors import DistBackendError
from hpcdist.core.journal import Journal
from hpcdist.core.objects import Objects
from hpcdist.core.queue import LARGE_BYTES, Queue, in_modes_of_caller
from hpcdist.core.table import Row
from hpcdist.core.waiting import wait_until
from hpcdist.core.work import Unfinished, Work

Message = tuple[torch.Tensor, int]  # what is sent or received, and the other rank in the group

DROP_SECONDS = 3.0  # how long a queued call may take to raise once its communicator is revoked


class Bootstrap(NamedTuple):
    """What a group's backends are made from."""

    rank: int
    size: int
    timeout: timedelta
    comm: Any = None  # an mpi4py communicator, where there is MPI
    store: Store | None = None  # if there is none
    device_id: torch.device | None = None
    options: Any = None
    peer: Backend | None = None  # the group's CPU backend, already connected


class Backend(ABC):
    """One communicator of one library.

    ``run`` blocks until the caller's buffers hold the result; ``start`` returns at once. The default
    ``start`` queues ``run`` on the communicator's worker thread, so that asynchronous calls make progress
    while Python computes and keep their order.
    """

    name: ClassVar[str]
    rank: int
    size: int
    peer: Backend | None = None  # the group's CPU backend, where this one carries another device
    options: Any = None  # c10d's, of the next group that is made of this one
    has_groups: ClassVar[bool] = False  # whether ``grouped`` makes many calls one
    batch: Any = None  # holds them back meanwhile (``is_open``, ``opened()``), if so
    has_lists: ClassVar[bool] = False  # whether a call on a list of tensors is another than one on a tensor of all
    begins_at_once: ClassVar[bool] = False  # whether ``isend`` and ``irecv`` never wait for the peer or a device
    has_threads: bool = True  # whether the library may be called from a thread of ours
    device = torch.device("cpu")  # where the bytes of objects travel
    objects: Objects  # the same communicator's calls for objects
    queue: Queue | None = None  # made by the first asynchronous call
    calls: OwnCallLog | None = None  # compared with the other ranks' by the watchdog, if the library does not
    unfinished: Unfinished  # messages under way, where the library keeps any
    ends_waits: ClassVar[bool] = False  # whether the library itself raises in a call that is past the timeout
    faults = Faults()
    membership: Membership | None = None
    windows: Windows | None = None

    @classmethod
    @abstractmethod
    def connect(cls, bootstrap: Bootstrap) -> Backend:
        """Make the default group's communicator; every rank calls it."""

    @abstractmethod
    def run(self, call: Call) -> None:
        """Run one collective to its end; the caller runs its ``finish``."""

    def start(self, call: Call) -> Work:
        """Begin one collective; the Work runs its ``finish`` when the buffers hold the result."""
        return self.enqueue(call, self.run)

    def enqueue(self, call: Call, run: Callable[[Call], None]) -> Work:
        """Queue one collective for this communicator's worker thread, and what runs it."""
        sizes = call.sizes()

        def carry_out() -> None:
            call.locate()
            if call.sizes() != sizes:
                raise resized(call.row.name)
            run(call)
            if call.finish is not None:
                call.finish()

        return self.open_queue().put(in_modes_of_caller(carry_out), call.shown(), call.nbytes >= LARGE_BYTES)

    def open_queue(self) -> Queue:
        """Return the queue of this communicator's asynchronous calls, which the first of them makes."""
        if self.queue is None:
            self.queue = self.worker()
        return self.queue

    def worker(self) -> Queue:
        """Start the thread that carries out asynchronous calls for which no thread waits."""
        return Queue(self.name)

    def prepare(self, call: Call) -> tuple[Run, Start | None]:
        """Return a function that runs a collective again on buffers like this call's (see ``core.call_cache``).

        The buffers may have other sizes that fit, unless the call has counts that differ.

        A library that queues calls on its device returns a function that begins the call too; others return None for
        it, and their asynchronous calls go to ``queue``.
        """
        return lambda send, recv: self.run(call.on(send, recv)), None

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of later calls, if the library itself ends calls at a limit."""
        return

    def compare(self, name: str, dtype: Any = None, op: Any = None, root: int | None = None, size: int = 0) -> None:
        """Compare a user's call that consists of several calls of the library with the other ranks', before the first.

        CallsDifferError if another rank makes another call, here or later. ``size`` counts elements.
        """
        if self.calls is not None:
            self.calls.add(with_size(kind_word(name, dtype, op, root), size), size)

    def record(self, call: Call) -> None:
        """Record a collective that this rank makes next in its log of calls; CallsDifferError if one differs."""
        if self.calls is not None:
            self.calls.add_call(call)

    def settings(self) -> dict[str, str]:
        """Return the settings, by name, that decide which calls are made, and so must be the same on all ranks."""
        return {}

    def settle(self) -> None:
        """Wait for what is queued: two threads may not call collectives of one communicator at once (MPI 6.14)."""
        if self.queue is not None:
            self.queue.drain()

    def check_reduction(self, row: Row, dtype: torch.dtype, op: ReduceOp) -> None:
        """Raise c10d's error if the library cannot reduce, before anything is sent."""
        reduction.check(row, dtype, op)

    @abstractmethod
    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        """Send a tensor; return when the buffer may be used again."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> int:
        """Receive into a tensor from ``src``, or from anyone when None; return the sender."""

    @abstractmethod
    def isend(self, tensor: torch.Tensor, dst: int, tag: int, finish: Callable[[], None] | None = None) -> Work:
        """Begin to send a tensor; the Work runs ``finish`` when it may change."""

    @abstractmethod
    def irecv(self, tensor: torch.Tensor, src: int | None, tag: int, finish: Callable[[], None] | None) -> Work:
        """Begin to receive into a tensor; the Work runs ``finish`` when it has arrived."""

    def between(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> Callable[[Journal], None] | None:
        """Return a function that exchanges messages with some ranks each time it is called, and records them.

        None if ``isend`` and ``irecv`` are as fast. The tensors are contiguous, and no other message of the group has
        the tag.
        """
        return None

    @abstractmethod
    def split(self, subgroups: Sequence[Sequence[int]], names: Sequence[str], timeout: timedelta) -> Backend | None:
        """Make the communicators of disjoint subgroups in one step; every rank of this one calls it.

        Returns this rank's communicator, or None if it is in none of the subgroups.
        """

    @abstractmethod
    def create_group(self, ranks: Sequence[int], name: str, timeout: timedelta) -> Backend:
        """Make a communicator that only ``ranks`` of this one call for."""

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool) -> bool:
        """Run the library's own barrier that says who is missing; False if it has none."""
        return False

    def grouped(self) -> AbstractContextManager[Sequence[Work]]:
        """Launch the calls begun inside together, if the library can; yields the Works of calls that it holds back."""
        return nullcontext(()) if self.batch is None else self.batch.opened()

    def connect_device(self, device: torch.device) -> None:  # noqa: B027  # nothing to do is the answer of most
        """Connect on a GPU at once, if the library would otherwise do so at the first call; every rank calls it."""

    def on(self, device_type: str) -> Backend:
        """Return the backend of a device type's tensors on this communicator."""
        return self

    def shrink(self, excluded: Sequence[int], name: str, aborts: bool) -> Backend:
        """Make a communicator of the ranks that are not excluded; only they call."""
        raise TypeError(f"backend {self.name!r} does not support shrinking operations")

    def call_log(self) -> CallLog | None:
        """Return the log of this rank's calls, which other ranks compare with theirs; None if they do not."""
        return self.calls

    # -- supervision, and the end ----------------------------------------------------------------------

    def pending(self) -> list[Work]:
        queued = [] if self.queue is None else self.queue.pending()
        messages = list(getattr(self, "unfinished", ()))
        return [*queued, *(work for work in messages if not work._done)]

    def outstanding(self) -> Work | None:
        """Return the first call that a device has not finished; it stays the same until the device has.

        The host does not wait for such a call, so the watchdog asks, to see whether it hangs.
        """
        return None

    def leave(self) -> None:
        """Announce that this rank makes no more calls, after every rank of the job has made its last one.

        CallsDifferError if another rank has made a call in this one's place.
        """
        if self.calls is not None:
            self.calls.leave()

    def end_threads(self) -> None:  # noqa: B027  # as above
        """End the library's own threads, as the process ends and no call is under way; no other rank takes part."""

    def end_job(self, status: int) -> None:
        """End this process, and with it the job: the launcher ends the others."""
        os._exit(status)

    def abort(self, reason: str) -> None:
        """End the queue, and leave the communicator as it is: to free it would take all its ranks."""
        queue, self.queue = self.queue, None
        if queue is not None:
            # the calls write into tensors of the caller until they raise
            wait_until(lambda: not queue.pending(), DROP_SECONDS)
            queue.fail(DistBackendError(reason))
            queue.close()

    def close_queue(self) -> None:
        """Carry out what is queued, and end the queue's thread."""
        if self.queue is not None:
            try:
                self.queue.close()
            finally:
                self.queue = None

    def close(self) -> None:
        """End the queue and free the communicator; every rank calls it, and a second call does nothing."""
        self.close_queue()
