"""Supervision of a backend: what the watchdog asks and does while a call blocks, and when a rank dies or leaves.

Each method has an answer for a library that knows nothing of it.
"""

from __future__ import annotations

import os
from abc import ABC
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from hpcdist.core.errors import DistBackendError
    from hpcdist.core.queue import Queue
    from hpcdist.core.work import Work


ASKED_FROM = 16  # messages under way before they are asked whether they have ended: asking costs an MPI call each


class Unfinished(deque["Work"]):
    """Works of messages under way, kept with their buffers until they have ended though the caller may drop them.

    Attributes:
        limit: from how many on they are asked whether they have ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.limit = ASKED_FROM

    def hold(self, work: Work) -> None:
        """Keep one, and ask all if they are twice as many as were left the last time."""
        if len(self) >= self.limit:
            for each in list(self):
                each.is_completed()  # which releases it
            self.limit = max(ASKED_FROM, 2 * len(self))
        self.append(work)

    def let_go(self, work: Work) -> None:
        """Keep one no longer: it has ended."""
        try:  # noqa: SIM105  # suppress takes 0.5 µs, the whole 0.1
            self.remove(work)
        except ValueError:  # another thread has done so
            pass


class Supervised(ABC):
    """What can be supervised: calls under way on one communicator."""

    queue: Queue | None = None  # made by the first asynchronous call
    unfinished: Unfinished  # messages under way, where the library keeps any
    ends_waits: ClassVar[bool] = False  # whether the library itself raises in a call that is past the timeout

    def pending(self) -> list[Work]:
        """Return the asynchronous calls that have not ended."""
        queued = [] if self.queue is None else self.queue.pending()
        messages = list(getattr(self, "unfinished", ()))
        return [*queued, *(work for work in messages if not work._done)]

    def outstanding(self) -> Work | None:
        """Return the first call that was handed to a device and that it is not through with, the same until it is.

        The host does not wait for such a call, so only who asks can tell that it hangs; the watchdog does.
        """
        return None

    def interrupt(self, reason: str, thread: int | None = None) -> bool:
        """Make a call that blocks on this communicator raise; return False if the library cannot.

        Args:
            reason: what it raises.
            thread: the journal's identifier of the thread that it blocks, 0 if that is unknown; None for any call.
        """
        return False

    def end_receives(self, reason: str) -> None:  # noqa: B027  # nothing to do is the answer of most
        """Make receives raise that wait for a message, of other threads too: no rank sends one any more."""

    def leave(self) -> None:  # noqa: B027  # as above
        """Say that this rank makes no more calls, once every rank of the job has made its last one.

        Raises:
            CallsDifferError: another rank has made a call in this one's place.
            DistBackendError: a rank has died.
        """

    def set_revoke_reason(self, reason: str) -> None:  # noqa: B027  # as above
        """Take note of why another rank is about to interrupt the call that blocks on all ranks, for its error."""

    def interrupts_all(self) -> bool:
        """Tell whether to interrupt a collective ends it on all ranks."""
        return False

    def revoke(self, reason: str) -> bool:
        """Make every call on this communicator raise, on all ranks, now and later; False if the library cannot."""
        return False

    def is_revoked(self) -> bool:
        """Tell whether a rank has revoked this communicator; makes progress."""
        return False

    def check_async(self) -> DistBackendError | None:
        """Return an error that the library met outside any call, which the watchdog asks for."""
        return None

    def failed(self) -> list[int]:
        """Return the ranks that the library knows to have died."""
        return []

    def knows_death(self) -> bool:
        """Tell whether the library knows that a rank of the job has died; it need not be one of this group."""
        return False

    def exit_barrier(self) -> Callable[[], bool] | None:
        """Begin a barrier of all ranks that leave the job; return what tells, without waiting, whether all have come.

        None says that a rank may leave without the others.
        """
        return None

    def skip_finalize(self, seconds: float | None = None, ends_well: bool = False) -> None:  # noqa: B027  # as above
        """Leave the library's end out, in which all ranks take part, when this process ends.

        Args:
            seconds: how long the process may take to end from now on; None for no limit.
            ends_well: whether the launcher is told that this is no failure.
        """

    def end_threads(self) -> None:  # noqa: B027  # as above
        """End the library's own threads, as the process ends and no call is under way; no other rank takes part."""

    def abort(self, status: int) -> None:
        """End this process, and with it the job: the launcher ends the others."""
        os._exit(status)
