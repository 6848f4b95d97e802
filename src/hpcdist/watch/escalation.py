"""Escalation of the calls under way in this process: which are overdue, who asks about them, how their waits end.

    RUNNING --past the limit--> DUE --its turn--> ASKING --answers--> ENDING
                                 |^--a lower rank asks--|                ^
                                 +------another rank's report------------+

A wait is ended by a list of escalations, the gentlest first. Each one that takes effect gets some time; if the call is
still under way after it, the next one follows. The last one aborts the job.

Nothing here reads a clock or asks a rank: the watchdog gives the time and does what is decided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any

from hpcdist.watch.liveness import NEWS_SECONDS

if TYPE_CHECKING:
    from hpcdist.watch.calls_under_way import UnderWay

YIELD_SECONDS = 1.5  # how long a rank leaves it to the one that reported to end a call for all
STUCK_SECONDS = 2.5  # how long a call that was made to raise may take for it
AGAIN_SECONDS = 0.3  # to the second try, before the abort: a thread without a core may be about to wait, or done


class State(Enum):
    """How far the watch over a call has come."""

    RUNNING = ""
    DUE = "due"  # past its limit; this rank waits for its turn to ask, or for another one's report
    ASKING = "asking"
    ENDING = "reported"


class Escalation(Enum):
    """One way to end a wait."""

    CANCEL = "cancel the receive that it waits for"
    GIVE_UP = "have the wait for a queued call raise, while its thread stays in the call"
    SET_REASON = "leave it to the rank that reported, whose revocation ends it on all ranks"
    INTERRUPT = "revoke the communicator, or end the device's"
    ABORT = "abort the job"


def escalations(each: UnderWay, is_reported: bool) -> list[tuple[Escalation, float]]:
    """Return the ways to end a wait in order, each with the seconds that it gets if it takes effect.

    ``is_reported`` says whether another rank has reported the call, and ends it.
    """
    backend = each.backend
    interrupts_all = backend.faults.interrupts_all()  # an interruption here ends the call on all ranks (ULFM)
    if each.in_background:
        if backend.outstanding() is each.work:  # a device is at it
            return [(Escalation.INTERRUPT, math.inf)]
        if backend.queue is None or backend.queue.running is not each.work:
            return []
        if is_reported:
            # revoked here too: the reporter's revocation does not reach a communicator that it is not in
            also = [(Escalation.INTERRUPT, math.inf)] if interrupts_all else []
            return [(Escalation.SET_REASON, 0.0), (Escalation.GIVE_UP, 0.0), *also]
        first = [] if backend.ends_waits else [(Escalation.INTERRUPT, 0.0)]
        return [*first, (Escalation.GIVE_UP, math.inf)]
    # a receive whose message has begun to come may not be cancelled (MPI 3.8.4), and its sender may be stopped
    found = [(Escalation.CANCEL, STUCK_SECONDS)] if each.work is not None else []
    if backend.ends_waits:  # the library raises by itself
        return found
    if is_reported:
        found.append((Escalation.SET_REASON, NEWS_SECONDS if interrupts_all else YIELD_SECONDS))
    # Open MPI's revocation does not end a send that shared memory holds back, to a rank that takes nothing
    return [*found, (Escalation.INTERRUPT, STUCK_SECONDS), (Escalation.ABORT, math.inf)]


class Watched:
    """One call under way, and how far the watch over it has come."""

    def __init__(self, record: Any, now: float) -> None:
        self.record = record  # the call's, kept so that no other call gets its id
        self.first_seen = now  # when the watchdog saw it first
        self.state = State.RUNNING  # how far the watch has come
        self.since = now  # when it became due
        self.reason = ""  # why its wait is ended
        self.was_interrupted = False  # whether it was made to raise
        self._escalations: list[tuple[Escalation, float]] = []  # not tried yet
        self._next_at = 0.0  # when the next of them is to be tried
        self._is_again = False  # whether an interruption is tried for the second time

    def is_due(self, now: float, limit: float) -> bool:
        """Tell whether the call has taken longer than it may, and nobody has asked about it yet."""
        if self.state is State.RUNNING and now - self.first_seen >= limit:
            self.make_due(now)
        return self.state is State.DUE

    def make_due(self, now: float) -> None:
        """Wait for the turn to ask about the call, or for another rank's report."""
        self.state, self.since = State.DUE, now

    def end(self, now: float, reason: str, steps: list[tuple[Escalation, float]]) -> None:
        self.state, self.reason = State.ENDING, reason
        self._escalations, self._next_at = steps, now

    def next_escalation(self, now: float) -> Escalation | None:
        """Return the way to end the wait that is to be tried now, if any; ``note`` must follow."""
        return self._escalations[0][0] if self._escalations and now >= self._next_at else None

    def note(self, now: float, took_effect: bool) -> None:
        """Take note of what became of the escalation that was tried."""
        tried, seconds = self._escalations.pop(0)
        if took_effect:
            self.was_interrupted = self.was_interrupted or tried is Escalation.INTERRUPT
            self._next_at = now + seconds
        elif tried is Escalation.INTERRUPT and self.next_escalation(now) is Escalation.ABORT and not self._is_again:
            self._is_again = True
            self._escalations.insert(0, (tried, seconds))
            self._next_at = now + AGAIN_SECONDS


class WatchedCalls:
    """All calls under way, by their records."""

    def __init__(self) -> None:
        self._watched: dict[int, Watched] = {}  # by id of the record

    def see(self, records: Iterable[Any], now: float) -> None:
        """Take note of the calls that are under way now, and forget those that have ended."""
        kept = [self._watched.get(id(record)) or Watched(record, now) for record in records]
        self._watched = {id(each.record): each for each in kept}

    def of(self, record: Any, now: float) -> Watched:
        """Return how far the watch over a call has come; over one that was not seen yet it begins."""
        return self._watched.setdefault(id(record), Watched(record, now))

    def forgive(self, seconds: float) -> None:
        """Count some seconds, in which this process stood still, for no call."""
        for each in self._watched.values():
            each.first_seen += seconds

    def any_due(self) -> bool:
        """Tell whether a call waits for its turn to be asked about."""
        return any(each.state is State.DUE for each in self._watched.values())
