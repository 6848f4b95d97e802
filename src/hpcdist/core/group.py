"""Process group: ranks, a name, a time limit, and one backend per device type.

``core.process_group`` adds what torch's libraries need: the class ``torch.distributed.ProcessGroup``.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from hpcdist.core import errors, hooks
from hpcdist.core.backend import Backend
from hpcdist.core.backend_parts import Faults
from hpcdist.core.call import Call
from hpcdist.core.call_cache import CallCache
from hpcdist.core.journal import MESSAGES, RING, Journal
from hpcdist.core.printing import add_hint
from hpcdist.core.waiting import nap
from hpcdist.core.work import HeldWork, Work, check_timeout

UNGROUPED = nullcontext()
BEGUN_SECONDS = 0.0005  # in which a call that another thread was about to begin has begun
DAEMON_SECONDS = 0.05  # seconds that the end of a group waits for a call of a daemon thread


def hashed_name(*parts: object) -> str:
    """Return a short name: a hash of some parts."""
    return hashlib.sha1("_".join(map(str, ("hpcdist", *parts))).encode(), usedforsecurity=False).hexdigest()


def label(group: Group) -> str:
    """Return the name of a group in messages: with its description, if the user gave one."""
    name = group.group_name if group.group_desc in ("", "undefined", "default_pg") else group.group_desc
    return f"group '{name}'"


class ParentsBackend:
    """Backend in a forked child, which refuses all calls: MPI, sockets and threads belong to its parent."""

    has_groups = False
    ends_waits = True  # nothing here waits for the parent's calls
    peer = queue = None
    faults = Faults()

    def __init__(self, inner: Backend) -> None:
        self.name, self.rank, self.size = inner.name, inner.rank, inner.size
        self._inner = inner  # kept: objects that end with their last reference would be ended for the parent too

    def abort(self, reason: str = "") -> None:
        """Leave the communicator as it is."""

    close = close_queue = abort

    def pending(self) -> list[Work]:
        """Return no calls: waits for the parent's calls raise here."""
        return []

    def __getattr__(self, name: str) -> Any:
        """Raise: nothing else may be asked of it."""
        raise self._refusal()

    def _refusal(self) -> errors.DistBackendError:
        text = (
            f"this process was forked by rank {self.rank} of {self.size}, to which the communicators belong: "
            f"a forked child makes no calls on its parent's groups"
        )
        return errors.DistBackendError(add_hint(text, "forked-child"))

    def give_up(self) -> None:
        """Let the waits for calls that the parent has under way, and their futures, raise in this process."""
        queue = self._inner.queue
        works = [*getattr(self._inner, "unfinished", ()), *(queue.pending() if queue is not None else ())]
        for work in works:
            work.__dict__.pop("_event", None)  # the parent's profiler
            Work._finish(work, self._refusal())  # the base class's: a subclass would touch the library


class Group:
    """A set of ranks that communicate."""

    asked_name: str | None = None  # the backend's name for a script on ``torch.distributed``, if that differs
    bound_device_id: torch.device | None = None  # the device given as ``device_id``
    end_reason = ""  # the reason of an abort
    is_own_world = False  # whether the end of the default group does not end it (``dist2``)

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        backends: dict[str, Backend],
        config: str,
        name: str,
        description: str,
        timeout: timedelta,
    ) -> None:
        self.config = config  # the backend string that it was made with, such as ``"cpu:mpi,cuda:nccl"``
        self.timeout = timeout  # the limit of each call on the group
        self._name = name
        self._description = description
        self.ranks = ranks  # the global rank of each rank of the group, in order
        self._rank = rank
        self.group_ranks = {global_rank: index for index, global_rank in enumerate(ranks)}
        self.backends = backends  # the backend that carries each device type; empty once the group is destroyed
        self.cpu = backends.get("cpu")
        self.carriers = {device: backend.on(device) for device, backend in backends.items()}
        for backend in backends.values():
            if backend is not self.cpu and backend.peer is None:
                backend.peer = self.cpu
        self.journal = Journal(self._name)  # the calls of this rank on the group
        self.left: list[Backend] = []  # of a group that has ended: another thread may still be in a call of theirs
        self._ended: dict[Backend, None] = {}
        self.is_watched = True  # whether the watchdog looks at such calls: not if only daemon threads are in them
        self.named: Counter[tuple[int, ...]] = Counter()  # how often ``next_name`` was called for each list of ranks
        self.making: list[list[int]] = []  # global ranks of groups that this rank and other members make
        self.known = CallCache()  # the calls that are repeated without checks
        self.kept: dict[str, Any] = {}  # kept by calls of the layers above for the next one, by their names
        self.coalescing: list[tuple[Call, HeldWork | None]] | None = None  # the calls held back by a coalescing manager

    @property
    def sequence(self) -> int:
        """How many calls this rank has made on the group."""
        return self.journal.sequence + self.journal.messages

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks of the group."""
        return len(self.ranks)

    @property
    def group_name(self) -> str:
        """The name that is unique in this process and the same on every rank of the group."""
        return self._name

    def next_name(self, ranks: Sequence[int]) -> str:
        """Return a name for the next group of some ranks of this one; its members find the same without communication.

        It does not depend on other groups: another thread may split these in between.
        """
        self.named[tuple(ranks)] += 1
        return hashed_name(self._name, *ranks, self.named[tuple(ranks)])

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of each later call."""
        check_timeout(timeout, is_optional=False)
        self.timeout = timeout
        for backend in self.backends.values():
            backend.set_timeout(timeout)

    @property
    def group_desc(self) -> str:
        """The user's description of the group."""
        return self._description

    def __repr__(self) -> str:
        if not self.backends:
            return f"<hpcdist.ProcessGroup {self._name!r}, destroyed>"
        return f"<hpcdist.ProcessGroup {self._name!r}: rank {self.rank()} of {self.size()}, {self.config}>"

    def in_use(self) -> dict[Backend, None]:
        """Return its backends, each once; after its end those in which a call still blocks, if that is watched."""
        left = self.left if self.is_watched else []
        return dict.fromkeys(list(self.backends.values()) or left)

    def backend(self, device: torch.device | str) -> Backend:
        """Return the backend that carries tensors of a device; raise if there is none, or the group was destroyed."""
        kind = device if isinstance(device, str) else device.type
        try:
            return self.carriers[kind]
        except KeyError:
            if not self.backends:
                raise errors.destroyed(self) from None
            raise RuntimeError(
                f"No backend type associated with device type {kind}: group {self._name!r} carries {self.config}"
            ) from None

    def any_backend(self) -> Backend:
        """Return the backend for calls without a tensor: the CPU's if there is one."""
        if self.cpu is not None:
            return self.cpu
        if not self.backends:
            raise errors.destroyed(self)
        return next(iter(self.backends.values()))

    def during(self, call: str, peer: int | None = None) -> AbstractContextManager[object]:
        """Begin a call without a tensor, after all queued calls have ended; it blocks inside the context returned.

        At the debug level DETAIL it is compared with the other ranks' calls first. ``peer`` is its root or other rank.
        """
        backend = self.any_backend()
        backend.settle()
        if hooks.compare is not None and call not in MESSAGES:
            hooks.compare(self, backend, call)
        return self.journal.during(call, peer)

    def create_backends(
        self, ranks: Sequence[int], name: str, timeout: timedelta, kinds: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Make communicators of some ranks of this group, by device type; only these ranks call.

        The name is the same on all of them, and keeps apart groups that are made at the same time. ``kinds`` are the
        device types; None stands for all of this group.
        """
        members = [self.ranks[rank] for rank in ranks]
        self.making.append(members)
        try:
            with self.journal.during("create_group", limit=timeout.total_seconds()):
                return self.derive(lambda each: each.create_group(ranks, name, timeout), kinds)
        finally:
            self.making.remove(members)

    def grouped(self) -> AbstractContextManager[Any]:
        """Launch the calls begun inside together, on backends that can do so."""
        able = [backend for backend in self.backends.values() if backend.has_groups]
        if not able:
            return UNGROUPED
        with ExitStack() as groups:
            for backend in able:
                groups.enter_context(backend.grouped())
            return groups.pop_all()

    def derive(self, make: Callable[[Backend], Any], kinds: Collection[str] | None = None) -> dict[str, Any]:
        """Return, by device type, the result of ``make`` for each backend, called once even if it has several types."""
        kept = {kind: each for kind, each in self.backends.items() if kinds is None or kind in kinds}
        made = {each: make(each) for each in dict.fromkeys(kept.values())}
        return {kind: made[each] for kind, each in kept.items()}

    def detach(self) -> None:
        """Refuse all calls from now on, in a forked child: it would be a second process with the same rank."""
        if self.size() > 1:
            self.backends = self.carriers = theirs = self.derive(ParentsBackend)
            self.cpu = self.backends.get("cpu")
            self.known.clear()
            self.kept.clear()
            for each in dict.fromkeys(theirs.values()):
                each.give_up()

    def revoke(self, reason: str) -> None:
        """Make calls under way raise: on all ranks if the library can, else on this one if it can."""
        for backend in dict.fromkeys(self.backends.values()) or self.left:
            if not backend.faults.revoke(reason):
                backend.faults.interrupt(reason)
                for work in backend.pending():
                    work._interrupt(reason)

    def abort(self, reason: str = "", ends_calls: bool = True) -> None:
        """End the group without the other ranks; ``destroy_process_group`` forgets it.

        Calls under way raise the reason: NCCL's on this rank, MPI's on all ranks if this MPI can do so (ULFM); those of
        other ranks, and messages, only if it ``ends_calls``. The communicators stay: MPI_Comm_free is collective.
        """
        self.end_reason = reason = reason or f"group {self._name!r} was aborted"
        if ends_calls:
            self.revoke(reason)
        errors.end_all(partial(backend.abort, reason) for backend in self._forget(reason))

    def end(self) -> None:
        """Let no more calls begin, as the process ends; the communicators stay for those that are under way."""
        self._ended = self._forget("this process ends")

    def end_threads(self) -> None:
        """End the libraries' threads after ``end``, if no call is under way."""
        if not self.journal.blocked():
            errors.end_all(backend.end_threads for backend in self._ended)

    def close(self) -> None:
        """Free the communicators; every rank of the group calls it, and the watchdog watches until it is done.

        Receives that wait for a message raise, and so do calls that other threads begin. Those under way are waited
        for; a daemon that is in one is left in it if the library cannot end it, and the communicators with it.
        """
        backends = dict.fromkeys(self.backends.values())
        if not backends:
            return
        try:
            with self.journal.during("destroy_process_group"):
                errors.end_all([*(each.close_queue for each in backends), partial(self._close, backends)])
        finally:
            self._note_left(backends)

    def _close(self, backends: dict[Backend, None]) -> None:
        """Free the communicators once no other thread uses them; what is queued has ended."""
        reason = f"group {self._name!r} was destroyed"
        first = self.cpu
        self._forget(reason)  # a call that began while the communicators are closed would miss the other ranks
        self.left = sorted(backends, key=lambda backend: backend is not first)
        self.is_watched = True
        for backend in backends:
            backend.faults.end_receives(reason)
        if self._await_other_threads(backends):
            # the CPU's last: the others were made over it
            errors.end_all(backend.close for backend in reversed(backends))
        else:
            self.end_reason = reason
            self.revoke(reason)
            errors.end_all(partial(backend.abort, reason) for backend in backends)

    def _await_other_threads(self, backends: dict[Backend, None]) -> bool:
        """Wait until no other thread is in a call on the group; False if a daemon stays in one."""
        if all(backend.ends_waits for backend in backends):
            return True  # the library ends such a call by itself
        began = time.monotonic()
        time.sleep(BEGUN_SECONDS)
        while others := [each for each in self.journal.blocked() if not each.is_own()]:
            waited = time.monotonic() - began
            if waited > DAEMON_SECONDS and not any(each.is_lasting() for each in others):
                return False
            nap(waited)
        return True

    def _forget(self, reason: str) -> dict[Backend, None]:
        """Drop the communicators, for a reason, and return them."""
        forgotten = dict.fromkeys(self.backends.values())
        for work in [work for backend in forgotten for work in backend.pending()]:
            work._outlive(reason, self.timeout.total_seconds())
        if forgotten:
            RING.past += self.sequence
            self._note_left(forgotten)
        self.backends, self.cpu, self.carriers = {}, None, {}
        self.known.clear()
        self.kept.clear()
        return forgotten

    def _note_left(self, backends: dict[Backend, None]) -> None:
        """Record the backends of an ended group on which a call still blocks."""
        blocked = self.journal.blocked()
        self.left = [backend for backend in backends if blocked and not backend.ends_waits]
        self.is_watched = any(each.is_lasting() for each in blocked)
