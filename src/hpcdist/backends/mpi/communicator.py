"""Communicator of one group: an MPI communicator, with its errors and its interruption.

MPI's errors are translated here, and blocked calls are ended here: under ULFM (``process.ulfm``) by revoking the
communicator and all that were made from it, which raises in every rank's call on them; without ULFM only a receive can
be made to raise, by cancelling it.
"""

from __future__ import annotations

from _thread import get_ident
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from zlib import crc32

from mpi4py import MPI

from hpcdist.backends.mpi.datatypes import BYTE
from hpcdist.backends.mpi.process import ulfm
from hpcdist.backends.mpi.receives import PROBES, Receives
from hpcdist.core.agreement import subgroups_differ
from hpcdist.core.backend_parts import Faults
from hpcdist.core.errors import DistBackendError, MismatchError
from hpcdist.core.point_to_point import FIRST_KEPT
from hpcdist.core.printing import add_hint
from hpcdist.core.ranks import format_ranks
from hpcdist.core.waiting import wait_until
from hpcdist.core.work import Unfinished

NEWS_SECONDS = 0.25  # seconds by which the news of a death may come after the revocation that it caused
# of the messages by which the members of a group wait for each other
NOTHING, MEETING_TAG = (None, 0, BYTE), FIRST_KEPT + 2
TAGS = 32768  # MPI_TAG_UB is at least 32767 (MPI 9.1.2)
# 5.0.11 does not cut messages that it reads from another process's memory (large ones within a node)
OVERWRITTEN = "; Open MPI may have written beyond that memory too: end the program"


def group_tag(name: str) -> int:
    """Return the tag of MPI_Comm_create_group for a group's name: the same on all members, likely its own."""
    return crc32(name.encode()) % TAGS


def describe_error(error: MPI.Exception) -> str:
    """Return MPI's text of an error, and an explanation if a message was longer than its buffer."""
    text = str(error.Get_error_string())
    if error.Get_error_class() == MPI.ERR_TRUNCATE:
        text += ": a rank sent more than the tensor of this rank holds"
        if MPI.get_vendor()[0] == "Open MPI":
            text += OVERWRITTEN
    return text


class Translation(NamedTuple):
    """Context that raises c10d's error for MPI's."""

    communicator: Communicator
    call: str

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, MPI.Exception):
            raise self.communicator.failure(self.call, error) from error


class Steps(Translation):
    """The same for a call of several steps: a rank that an exception takes out of them makes no more such calls."""

    __slots__ = ()

    def __enter__(self) -> None:
        self.communicator.check_in_step(self.call)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.communicator.left_by = type(error).__name__
        super().__exit__(kind, error, trace)


class Token:
    """Cancellation token of a blocked receive: another thread sets the reason and cancels; the blocked one checks."""

    __slots__ = ("reason", "request")

    def __init__(self, request: Any) -> None:
        self.request, self.reason = request, ""

    def cancel(self, reason: str) -> None:
        """Make the receive raise; only once, because the waiting thread then frees the request."""
        if not self.reason:
            self.reason = reason
            with suppress(MPI.Exception):  # it may just have ended
                self.request.Cancel()

    def check(self, status: MPI.Status) -> None:
        """Raise the reason of a cancellation, unless the message came at the last moment."""
        if self.reason and status.Is_cancelled():
            raise DistBackendError(self.reason)


class Communicator(Faults):
    """An MPI communicator that belongs to one process group, and its ``Faults``."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.is_background: Callable[[], bool] = bool  # whether the call under way runs beside this rank's computation
        self.derived: list[MPI.Comm] = []  # made from it for the group's calls: revoked with it
        # a duplicate for the messages of collectives, apart from the user's messages
        self.private: MPI.Intracomm | None = None
        self.interruption: str | None = None  # why the communicator was revoked
        self.receives = Receives(comm)
        self.unfinished = Unfinished()  # its messages under way
        self.receiving: dict[int, Token] = {}  # the receives that block now, by thread
        self.is_checked = ulfm.is_tolerant()  # whether success is checked for a death that MPI did not report
        self.left_by: str | None = None  # the class of an exception that ended a call of several steps midway
        self._has_revoked = False

    def open_private(self) -> MPI.Intracomm:
        """Return the private duplicate, made by the first call; every rank calls, as part of a collective."""
        if self.private is None:
            # if a rank dies, a barrier ends more safely than the creation of a communicator (``ulfm.end_creation``)
            self.comm.Barrier()
            self.private = self.comm.Dup()
            self.derived.append(self.private)
        return self.private

    def close_private(self) -> None:
        """Free the private duplicate (MPI 7.4.3); every rank calls it."""
        if self.private is not None:
            self.derived.remove(self.private)
            self.private.Free()
            self.private = None

    # -- errors --------------------------------------------------------------------------------------

    def translating(self, call: str) -> Translation:
        """Return the context in which MPI's errors become c10d's."""
        return Translation(self, call)

    def in_step(self, call: str) -> Steps:
        """Return the context in which a call takes several steps."""
        return Steps(self, call)

    def failure(self, call: str, error: MPI.Exception) -> DistBackendError:
        """Return c10d's error for MPI's.

        If a process has died the communicator is revoked first: ranks that wait for a rank which has just left the same
        call by this error would not learn of it otherwise.
        """
        if not ulfm.is_loss(error, self.comm):
            return DistBackendError(
                f"{call} on rank {self.rank} of {self.size} failed in MPI: {describe_error(error)} "
                f"(class {error.Get_error_class()})"
            )
        return self._lost(call)

    def _lost(self, call: str) -> DistBackendError:
        """Revoke a group that has lost a rank, or was given up, and return the error for a call on it."""
        self.revoke()
        ulfm.end_creation()
        if self.interruption is not None:
            return DistBackendError(self.interruption)
        wait_until(self.failed, NEWS_SECONDS)
        dead = self.failed()
        who = (
            f"{format_ranks(dead)} of the group died"
            if dead
            else "another rank gave the group up (timeout, lost process, revoke_process_group)"
        )
        text = (
            f"{call} on rank {self.rank} of {self.size} failed: "
            f"{who}; the group takes no more calls, shrink_group makes one without the lost ranks"
        )
        return DistBackendError(add_hint(text, "lost-rank"))

    def check_in_step(self, call: str) -> None:
        """Raise for a call of several steps if this rank has revoked the communicator or left such a call.

        After a revocation MPI refuses its own calls, but the window would accept this rank's data, and the others would
        read it as part of the call that they are in.
        """
        if self._has_revoked:
            raise self._lost(call)
        if self.left_by is not None:
            text = (
                f"{call} on rank {self.rank} of {self.size} was not begun: {self.left_by} has ended an earlier call of "
                f"this rank on the group in its middle, so the group's ranks are not in step; make a new group"
            )
            raise DistBackendError(add_hint(text, "left-call"))

    def check(self, call: str) -> None:
        """Raise if a collective has returned success although a rank has died (if ``is_checked``).

        Open MPI's coll/han does so (``process.runtime.leave_out_han``), and a program that started MPI by itself may
        use it. The check takes 0.6 µs. It sees what this rank's MPI knows, so that the news of a death may still come
        too late for it.
        """
        dead = self.comm.Get_failed()
        count = dead.Get_size()
        dead.Free()
        if count or self.comm.Is_revoked():
            raise self._lost(call)

    # -- receives ------------------------------------------------------------------------------------

    def too_long(self, call: str, status: MPI.Status, nbytes: int) -> MismatchError:
        """Return the error of a message that is longer than its tensor of so many bytes."""
        length = status.Get_elements(BYTE)
        # for a message to itself Open MPI's status counts only the bytes that fitted
        found = f"{length:,}" if length > nbytes and status.Get_source() != self.rank else "more"
        text = (
            f"{call} on rank {self.rank} of {self.size}: rank {status.Get_source()} sent {found} bytes with tag "
            f"{status.Get_tag()}, the tensor has {nbytes:,}; expected one that is at least as large. Nothing was "
            "written past it, and the group can be used"
        )
        return MismatchError(add_hint(text, "long-message"))

    def failed_receive(self, call: str, error: MPI.Exception, status: MPI.Status, nbytes: int) -> Exception:
        if error.Get_error_class() == MPI.ERR_TRUNCATE:
            return self.too_long(call, status, nbytes)
        return self.failure(call, error)

    def match(self, src: int | None, tag: int) -> tuple[MPI.Message, MPI.Status]:
        """Wait for a message and match it (MPI 3.8.2); unlike MPI_Mprobe, past the timeout it can be cancelled."""
        awaited = self.receives.expect(src, tag)
        thread = get_ident()
        self.receiving[thread] = token = Token(awaited)
        try:
            wait_until(lambda: awaited.is_cancelled or awaited.is_matched(), looks=PROBES)
        finally:
            del self.receiving[thread]
            awaited.Cancel()
        if awaited.message is None:
            raise DistBackendError(token.reason)
        return awaited.message, awaited.status

    # -- calls that block ------------------------------------------------------------------------------

    def poll(self) -> None:
        """Make MPI progress, and raise if the communicator was revoked or a call was interrupted."""
        if self.interruption is not None:
            self.revoke()  # later calls depend on whether it is revoked, which is the same on all ranks
            raise DistBackendError(self.interruption)
        self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)

    def cancel(self, reason: str, thread: int | None = None) -> bool:
        """Make the receive that blocks a thread raise, or all receives; False if there is none."""
        tokens = self.receiving.copy()
        found = list(tokens.values()) if thread is None else [tokens[thread]] if thread in tokens else []
        for token in found:
            token.cancel(reason)  # that of the wait itself, so that no other call raises
        return bool(found)

    def drive(self) -> bool:
        """Drive MPI if a message is under way; tell whether one is."""
        if self.receives.waiting:  # all of them: ``any`` would stop at the first
            self.receives.match()
        return any(work._is_under_way() for work in list(self.unfinished))  # type: ignore[attr-defined]  # RequestWork

    def interrupt(self, reason: str, thread: int | None = None) -> bool:
        """Cancel a blocked receive, or revoke the communicator (ULFM); False if this MPI can do neither."""
        return self.cancel(reason, thread) or (self.comm != MPI.COMM_NULL and self.revoke(reason))

    def interrupts_all(self) -> bool:
        return ulfm.is_tolerant()

    def end_receives(self, reason: str) -> None:
        """Cancel the receives that wait for a message; under a revocation they end by themselves."""
        if MPI.Is_finalized() or self.is_revoked():
            return
        self.cancel(reason)
        for work in list(self.unfinished):
            if not work.is_completed():
                with suppress(MPI.Exception):  # it has just ended
                    work._interrupt(reason)
                work.is_completed()

    def set_revoke_reason(self, reason: str) -> None:
        if ulfm.is_tolerant():
            self.interruption = reason

    def revoke(self, reason: str = "") -> bool:
        """Make every call on the group's communicators raise, on all ranks (MPI_Comm_revoke); False without ULFM."""
        if not ulfm.is_tolerant():
            return False
        self.interruption = reason or self.interruption
        self._has_revoked = True
        for comm in (self.comm, *self.derived):
            if comm != MPI.COMM_NULL:
                comm.Revoke()
        return True

    def is_revoked(self) -> bool:
        if not ulfm.is_tolerant() or self.comm == MPI.COMM_NULL:
            return False
        MPI.COMM_SELF.Iprobe(0, 0)  # MPI learns of it only when it makes progress
        return bool(self.comm.Is_revoked())

    def failed(self) -> list[int]:
        return ulfm.failed(self.comm)

    def knows_death(self) -> bool:
        return bool(ulfm.failed(MPI.COMM_WORLD))

    # -- communicators of some of its ranks ------------------------------------------------------------

    def split(self, subgroups: Sequence[Sequence[int]]) -> MPI.Intracomm | None:
        """Make all subgroups by one MPI_Comm_split (MPI 7.4.2); the color is the subgroup's lowest rank.

        A rank may give only its own subgroup. Afterwards all agree that each got the one that it gave; if two ranks
        gave contradicting subgroups, every rank raises MismatchError.
        """
        mine = next((list(ranks) for ranks in subgroups if self.rank in ranks), None)
        color, key = (MPI.UNDEFINED, 0) if mine is None else (min(mine), mine.index(self.rank))
        with self.translating("new_group"):
            made = self.comm.Split(color, key)
            fits = array("i", [mine is None or self._has_ranks(made, mine)])
            self.comm.Allreduce(MPI.IN_PLACE, [fits, MPI.INT], MPI.MIN)
            if not fits[0]:
                if made != MPI.COMM_NULL:
                    made.Free()
                raise subgroups_differ(self.comm.allgather(mine))
        return None if mine is None else MPI.Intracomm(made)

    def _has_ranks(self, made: MPI.Comm, ranks: Sequence[int]) -> bool:
        """Tell whether a communicator has some ranks of this one, in this order."""
        found = made.Get_group()
        with self._members(ranks) as members:
            is_same = MPI.Group.Compare(found, members) == MPI.IDENT
        found.Free()
        return is_same

    @contextmanager
    def _members(self, ranks: Sequence[int]) -> Iterator[MPI.Group]:
        """Context with MPI's group of some ranks."""
        whole = self.comm.Get_group()
        members = whole.Incl(list(ranks))
        try:
            yield members
        finally:
            members.Free()
            whole.Free()

    def create_group(self, ranks: Sequence[int], name: str) -> MPI.Intracomm:
        """Make a communicator by MPI_Comm_create_group, which only its members call (MPI 7.4.2).

        The name is the same on all of them, and keeps apart communicators that are made at the same time.
        """
        with self._members(ranks) as members, self.translating("new_group"):
            self._await_members(ranks)
            return self.comm.Create_group(members, group_tag(name))

    def _await_members(self, ranks: Sequence[int]) -> None:
        """Return when all of some ranks have come, by empty messages in log n rounds (a dissemination barrier).

        In Open MPI a rank that waits in MPI_Comm_create_group keeps its other threads from making communicators of
        higher numbers, and the rank for which it waits may be in such a call with one of them. Under ULFM a message to
        a dead rank is an error, while MPI_Comm_create_group waits for it.
        """
        me, count, step = ranks.index(self.rank), len(ranks), 1
        while step < count:
            target, source = ranks[(me + step) % count], ranks[(me - step) % count]
            self.comm.Sendrecv(NOTHING, target, MEETING_TAG, NOTHING, source, MEETING_TAG)
            step *= 2

    def _more_dead_than(self, excluded: Sequence[int]) -> DistBackendError:
        return DistBackendError(
            f"shrink_group: MPI counts ranks {self.failed()} of the group as dead, more than the "
            f"{list(excluded)} to exclude; call it again with all of them"
        )

    def shrink(self, excluded: Sequence[int], name: str, aborts: bool) -> MPI.Intracomm:
        """Return a communicator without some ranks; the others call.

        Dead ranks are excluded by MPI_Comm_shrink, live ones by MPI_Comm_create_group (MPI 7.4.2). If there are both,
        or the communicator was revoked because of a live one, the rest makes a new one by MPI_Comm_create_from_group.
        The name, the same on all, keeps apart communicators that are made at the same time; ``aborts`` revokes the
        communicator first, so that calls under way on it raise.
        """
        comm = self.comm
        remaining = [rank for rank in range(self.size) if rank not in set(excluded)]
        try:
            # a rank whose wait was ended may come here before the revocation by the rank that ended it; so all see the
            # same
            if aborts or self.interruption is not None:
                self.revoke()
            # a death is known to all ranks; a revocation may become known when some already wait for each other
            if not ulfm.are_dead(comm, excluded):
                if not set(self.failed()).isdisjoint(remaining):  # for which MPI_Comm_create_group would wait
                    raise self._more_dead_than(excluded)
                with self._members(remaining) as members:
                    if not self.is_revoked():
                        try:
                            return comm.Create_group(members, group_tag(name))
                        except MPI.Exception as error:
                            if not ulfm.is_loss(error, comm):
                                raise
                    return MPI.Intracomm.Create_from_group(members, f"hpcdist-{name}", MPI.INFO_NULL, MPI.ERRORS_RETURN)
            made: MPI.Intracomm = comm.Shrink()  # type: ignore[assignment]  # the stub says Comm
            if made.Get_size() == len(remaining):
                return made
            raise self._more_dead_than(excluded)
        except MPI.Exception as error:
            hint = "" if ulfm.is_tolerant() else f"; this MPI cannot go on after a rank has died: {ulfm.LAUNCH_HINT}"
            raise DistBackendError(
                f"shrink_group without ranks {list(excluded)} failed in MPI: {error.Get_error_string()}{hint}"
            ) from error
