"""NCCL communicators of one process group: their creation, their use by several threads, and their end.

A group has one communicator, made by its first call on a CUDA tensor, or at once if ``device_id`` names the GPU; and
one for each rank with which this one exchanges messages outside a group call. ``bootstrap`` connects the ranks.

**No thread uses a communicator after its end has begun**, because ``ncclCommDestroy`` and ``ncclCommAbort`` free it.
The threads that make calls use it, and so does the watchdog's, which reads errors and ends calls that hang: each does
so while it holds ``Communicators.use``, after it has checked ``ended``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import torch

from hpcdist.backends.nccl import bootstrap as finding
from hpcdist.backends.nccl.calls import Where
from hpcdist.backends.nccl.library import Library, config_of
from hpcdist.backends.nccl.streams import GRAPH_SECONDS, Streams, end_apart
from hpcdist.core.backend import Backend
from hpcdist.core.backend_parts import Faults
from hpcdist.core.call_log import OwnCallLog
from hpcdist.core.errors import DistBackendError, end_all
from hpcdist.launch import devices, environment

IN_PROGRESS = 7  # ncclInProgress
# seconds to wait for a thread in a call: NCCL itself may block a call (it connects ranks at the first one), and by its
# documentation ncclCommAbort ends it
STUCK_SECONDS = 1.0
ABORT_SECONDS = 10.0  # seconds to wait for ncclCommAbort, which may itself wait for other threads and ranks


class Link(NamedTuple):
    """A communicator, its streams, and the log of the collectives on it; no log of one rank, or of a pair."""

    comm: Any
    where: Where  # in the form of NCCL's own functions
    streams: Streams
    calls: OwnCallLog | None


class Communicators(Faults):
    """The communicators of one process group."""

    def __init__(self, rank: int, size: int, library: Library) -> None:
        self.rank = rank
        self.size = size
        self.group: Link | None = None  # the communicator of all ranks, once it is made
        self.pairs: dict[int, Link] = {}  # those of two ranks, by the other rank
        self.is_eager = False  # whether messages outside a group call use the group's communicator too
        self.ended: DistBackendError | None = None  # the error of all later calls
        self.use = threading.RLock()  # held while a communicator is used or an error is read
        self.options: Any = None  # c10d's options of all these communicators
        self._is_ending = False
        self._is_untold = False  # whether the watchdog has ended a call that may have no Work, and so nobody to tell
        self._library = library

    # -- how they come ---------------------------------------------------------------------------------

    def connect(self, device: torch.device, channel: finding.Channel, peer: Backend | None) -> Link:
        """Make the group's communicator on this rank's GPU; every rank of the group calls.

        The channel connects the ranks; ``peer``, the group's CPU backend, finds two ranks on one GPU.
        """
        if peer is not None and self.size > 1:
            finding.check_devices(peer, device, self._library.version)
        ids = finding.unique_ids(self._library, channel, self.rank, self.size)
        token = blake2b(b"".join(map(bytes, ids)), digest_size=8).hexdigest()
        return self.make(device, self.size, self.rank, ids, token=token)

    def connect_pair(self, device: torch.device, channel: finding.Channel, peer: int) -> Link:
        """Make the communicator of this rank and another one; both call."""
        unique_id = finding.pair_id(self._library, channel, self.rank, peer)
        return self.make(device, 2, int(self.rank > peer), unique_id, peer)

    def make(
        self, device: torch.device, size: int, rank: int, ids: Any, peer: int | None = None, token: str = ""
    ) -> Link:
        """Make a communicator, of this rank and a peer or of all ranks; blocks until all of them have called."""
        with self.failing("connect"), torch.cuda.device(device):
            comm = self._library.core.Communicator.init(size, rank, ids, config_of(self._library, self.options))
        return self.adopt(comm, device, peer, token)

    def adopt(self, comm: Any, device: torch.device, peer: int | None = None, token: str = "") -> Link:
        """Register a communicator, and return it with its streams, whose Works can be interrupted.

        The token of all ranks' communicator is the same on all of them, and no other communicator's.
        """
        is_high = getattr(self.options, "is_high_priority_stream", False)
        streams = Streams(device, self.interrupt, torch.cuda, is_high)
        where = Where(self._library, self._library.bindings.Comm(comm.ptr), comm.rank, comm.nranks)
        is_compared = peer is None and self.size > 1 and environment.is_on(environment.CHECK_CALLS)
        calls = OwnCallLog(token, self.rank, self.size) if is_compared else None
        link = Link(comm, where, streams, calls)
        with self.use:
            if self.ended is not None:  # the group was interrupted while the ranks connected
                end_apart(streams, comm.abort, ABORT_SECONDS)
                self.check_live()
            if peer is None:
                self.group = link
            else:
                self.pairs[peer] = link
        return link

    def split(self, color: int | None, key: int, config: Any) -> Any:
        """Return the nccl4py communicator of the ranks of one color; every rank of the group calls."""
        streams = self._live_group().streams
        streams.settle("split")  # NCCL allows no outstanding calls of the parent
        with self.use, self.failing("split"), streams.on_device():
            return self._live_group().comm.split(color, key, config)

    def shrink(self, excluded: Sequence[int], aborts: bool) -> Any:
        """Return the nccl4py communicator without some ranks; the others call."""
        streams = self._live_group().streams
        flags = self._library.core.CommShrinkFlag
        if aborts:  # first, because an aborted kernel seems to have succeeded
            streams.failure = DistBackendError(
                f"the call was ended, because rank {self.rank} of {self.size} shrinks the NCCL communicator without "
                f"ranks {excluded}"
            )
        else:
            streams.settle("shrink")
        with self._using(STUCK_SECONDS if aborts else -1), self.failing("shrink"), streams.on_device():
            flag = flags.ABORT if aborts else flags.DEFAULT
            return self._live_group().comm.shrink(excluded, flag=flag)

    def _live_group(self) -> Link:
        """Return the communicator of all ranks; raise if it has ended."""
        self.check_live()
        group = self.group
        assert group is not None
        return group

    # -- how they are used -----------------------------------------------------------------------------

    def check_live(self) -> None:
        """Raise if the communicators have ended."""
        if self.ended is not None:
            self._is_untold = False
            raise self.ended

    def launch(self, name: str, call: Callable[[int], None], stream: int) -> None:
        """Queue a call on a stream; DistBackendError if the communicators have ended, or NCCL refuses it."""
        with self.use:
            if self.ended is not None:
                self.check_live()
            try:
                call(stream)
            except self._library.failures as error:
                raise self.failure(name, error) from error

    @contextmanager
    def _using(self, seconds: float) -> Iterator[None]:
        """Use the communicators; wait for a thread in a call, for some seconds at most."""
        has_lock = self.use.acquire(timeout=seconds)
        try:
            yield
        finally:
            if has_lock:
                self.use.release()

    @contextmanager
    def failing(self, name: str) -> Iterator[None]:
        """Turn the errors of NCCL inside into c10d's."""
        try:
            yield
        except self._library.failures as error:
            with self.use:
                raise self.failure(name, error) from error

    def failure(self, name: str, error: Exception) -> DistBackendError:
        """Return c10d's error for one of NCCL's."""
        if self.ended is not None:  # the interruption is the cause
            self._is_untold = False
            return self.ended
        detail, group = "", self.group  # read once: another thread may drop it
        if group is not None and not self._is_ending:
            detail = group.comm.get_last_error()
        elif name == "connect":
            detail = f"if two ranks use one GPU, bind them apart or {devices.how_to_share(self._library.version)}"
        return DistBackendError(
            f"{name} on rank {self.rank} of {self.size} failed in NCCL "
            f"{'.'.join(map(str, self._library.version))}: {error}{' (' + detail + ')' if detail else ''}"
        )

    def links(self) -> list[Link]:
        """Return all in an order that both ranks of each pair share: pairs by their ranks, then the group's."""
        pairs, group = self.pairs.copy(), self.group  # read once: another thread may add one, or drop all
        links = [pairs[peer] for peer in sorted(pairs, key=lambda peer: (min(peer, self.rank), max(peer, self.rank)))]
        return links if group is None else [*links, group]

    def check_async(self) -> DistBackendError | None:
        """Return the error of a call under way on the device; the watchdog asks."""
        if not self.use.acquire(blocking=False):
            return None  # a thread is in a call; the watchdog asks again
        try:
            if self.ended is not None or self._is_ending:
                return None
            for link in self.links():
                result = int(link.comm.get_async_error())
                if result not in (0, IN_PROGRESS):
                    return DistBackendError(
                        f"NCCL reports {self._library.core.get_error_string(result)} on rank {self.rank} of "
                        f"{self.size}: {link.comm.get_last_error()}"
                    )
            return None
        finally:
            self.use.release()

    # -- how they go -----------------------------------------------------------------------------------

    def interrupt(self, reason: str, thread: int | None = None) -> bool:
        """End the communicators and the calls under way on them, without the other ranks; any thread may call.

        Later calls, and ``wait()`` of the ended ones, raise DistBackendError; so does ``close`` if none of them has and
        the watchdog, which names a thread, has ended a call. Returns False while the communicators are destroyed, which
        cannot be interrupted.
        """
        with self._using(STUCK_SECONDS):
            if self._is_ending:
                return False
            if self.ended is not None:
                return True
            self._is_untold = thread is not None  # before a thread may raise it
            self.ended = DistBackendError(f"the NCCL communicator of rank {self.rank} of {self.size} is gone: {reason}")
            links = self.links()
            for link in links:
                link.streams.failure = self.ended  # before a kernel ends by the abort and seems to have succeeded
            self._abort(links)
            for link in links:
                link.streams.fail_all(self.ended)
            return True

    def _abort(self, links: list[Link]) -> None:
        """Abort communicators in one group call, on a thread of its own, and wait for it for a limited time.

        One by one, an abort may wait for a rank that waits in the abort of another communicator (pytorch#119797).
        """

        def abort_all() -> None:
            with self._library.core.group():
                end_all(link.comm.abort for link in links)

        if links:
            end_apart(links[0].streams, abort_all, ABORT_SECONDS)

    def close(self) -> None:
        """Free the communicators, once the device has ended what was queued; every rank calls it.

        ncclCommDestroy waits for the other ranks of the node, so all ranks free theirs in the same order; and until no
        CUDA graph holds calls, for which a thread waits. A communicator with an error is aborted, which does not wait.
        The error of a call is raised here if nobody has got it: a synchronous call has no ``wait``.
        """
        if self.ended is None and (failure := self.check_async()) is not None:
            self._is_untold = self.interrupt(str(failure))
        if self.ended is not None:
            is_told = any(link.streams.is_told for link in self.links())
            self.forget()
            if self._is_untold and not is_told:
                self.check_live()
            return
        try:
            self._await_device()
            with self.use:
                self.check_live()  # the watchdog may have ended them during the wait for the device
                self._is_ending = True
            with self.failing("destroy"):
                end_all(partial(destroy, link) for link in self.links())
        finally:
            self.forget()

    def _await_device(self) -> None:
        for link in self.links():
            try:
                link.streams.settle("destroy")
            except DistBackendError:
                raise
            except RuntimeError as error:
                self.interrupt(f"the device failed: {error}")
                raise DistBackendError(f"the device failed before the group was destroyed: {error}") from error

    def forget(self) -> None:
        """Drop the communicators, which have ended."""
        if self.ended is None:
            self.ended = DistBackendError("the NCCL communicator was freed: its group is destroyed")
        self._is_ending = False
        self.pairs, self.group = {}, None


def destroy(link: Link) -> None:
    """Free a communicator; a thread does so if a CUDA graph has held its calls, because NCCL waits for that."""

    def finalize_and_destroy() -> None:
        link.comm.finalize()
        link.comm.destroy()

    if link.streams.is_in_graph:
        end_apart(link.streams, finalize_and_destroy, GRAPH_SECONDS)
        return
    with link.streams.on_device():
        finalize_and_destroy()
