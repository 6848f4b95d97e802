"""State machine of the calls under way in this process: which are overdue, who asks about them, how their waits end.

    RUNNING --past the limit--> DUE --its turn--> ASKING --answers--> ENDING
                                 |^--a lower rank asks--|                ^
                                 +------another rank's verdict-----------+

A wait is ended by a list of means, the gentlest first. Each means that takes effect gets some time; if the call is
still under way after it, the next one follows. The last one aborts the job.

The machine reads no clock, asks nobody and touches no library: the watchdog tells it the time and does what it decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, NamedTuple

from hpcdist.watch.liveness import NEWS_SECONDS

YIELD_SECONDS = 1.5  # how long a rank leaves it to the one that reported to end a call for all
STUCK_SECONDS = 2.5  # how long a call that was made to raise may take for it


class State(Enum):
    """How far the watch over a call has come."""

    RUNNING = ""
    DUE = "due"  # past its limit; this rank waits for its turn to ask, or for another one's verdict
    ASKING = "asking"
    ENDING = "reported"


class Decision(Enum):
    """What is to be done about an overdue call now."""

    WAIT = "wait"
    ASK = "ask"  # the other ranks
    ACCEPT = "accept"  # another rank's verdict


class Means(Enum):
    """One way to end a wait."""

    CANCEL = "cancel the receive that it waits for"
    GIVE_UP = "have the wait for a queued call raise, while its thread stays in the call"
    SET_REASON = "leave it to the rank that reported, whose revocation ends it on all ranks"
    INTERRUPT = "revoke the communicator, or end the device's"
    ABORT = "abort the job"


class Facts(NamedTuple):
    """What the way to end a wait depends on."""

    has_work: bool  # whether it is a wait for a Work
    in_background: bool  # whether a worker thread or a device is at it
    on_device: bool
    is_running: bool  # whether the worker thread is in this call
    ends_waits: bool  # whether the library raises by itself
    interrupts_all: bool  # whether an interruption here ends the call on all ranks (ULFM)
    is_reported: bool  # whether another rank has reported the call, and ends it


Rung = tuple[Means, float]  # a means, and the seconds that it gets if it takes effect


def means_for(facts: Facts) -> list[Rung]:
    """Return the means to end a wait, in order."""
    if facts.in_background:
        if facts.on_device:
            return [(Means.INTERRUPT, math.inf)]
        if not facts.is_running:
            return []
        if facts.is_reported:
            # revoked here too: the reporter's revocation does not reach a communicator that it is not in
            also = [(Means.INTERRUPT, math.inf)] if facts.interrupts_all else []
            return [(Means.SET_REASON, 0.0), (Means.GIVE_UP, 0.0), *also]
        first = [] if facts.ends_waits else [(Means.INTERRUPT, 0.0)]
        return [*first, (Means.GIVE_UP, math.inf)]
    # a receive whose message has begun to come may not be cancelled (MPI 3.8.4), and its sender may be stopped
    found = [(Means.CANCEL, STUCK_SECONDS)] if facts.has_work else []
    if facts.ends_waits:
        return found
    if facts.is_reported:
        found.append((Means.SET_REASON, NEWS_SECONDS if facts.interrupts_all else YIELD_SECONDS))
    # Open MPI's revocation does not end a send that shared memory holds back, to a rank that takes nothing
    return [*found, (Means.INTERRUPT, STUCK_SECONDS), (Means.ABORT, math.inf)]


class Watched:
    """One call under way, and how far the watch over it has come."""

    def __init__(self, record: Any, now: float) -> None:
        self.record = record  # kept, so that no other call gets its id
        self.first_seen = now
        self.state = State.RUNNING
        self.since = now  # when it came to this state; while DUE: when it first did
        self.means: list[Rung] = []  # not tried yet
        self.next_at = 0.0  # when the next of them is to be tried
        self.tried: list[Means] = []  # those that took effect


class CallStates:
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

    def state(self, record: Any) -> State:
        """Return a call's state."""
        watched = self._watched.get(id(record))
        return State.RUNNING if watched is None else watched.state

    def seconds(self, record: Any, now: float) -> float:
        """Return for how long a call has been seen."""
        watched = self._watched.get(id(record))
        return 0.0 if watched is None else now - watched.first_seen

    def any_due(self) -> bool:
        """Tell whether a call waits for its turn to be asked about."""
        return any(each.state is State.DUE for each in self._watched.values())

    def decide(
        self, record: Any, now: float, limit: float, has_verdict: bool, turn: Callable[[float], float]
    ) -> Decision:
        """Tell what to do about a call, and move it to the state that follows.

        Args:
            record: the call's.
            now: the time.
            limit: the seconds that it may take.
            has_verdict: whether another rank has found out why it does not end.
            turn: returns from when on this rank may ask about a call that is overdue since a moment.
        """
        each = self.of(record, now)
        if each.state is State.RUNNING and now - each.first_seen >= limit:
            each.state, each.since = State.DUE, now
        if each.state is not State.DUE:
            return Decision.WAIT
        if has_verdict:
            return Decision.ACCEPT
        if now < turn(each.since):
            return Decision.WAIT
        each.state = State.ASKING
        return Decision.ASK

    def yield_to_lower(self, record: Any, now: float) -> None:
        """Take note that a lower rank asks about the same call: its verdict is waited for."""
        each = self.of(record, now)
        each.state, each.since = State.DUE, now

    def withdraw(self, record: Any) -> None:
        """Take note that a call is not overdue after all."""
        self._watched[id(record)].state = State.RUNNING

    def end(self, record: Any, now: float, facts: Facts) -> None:
        """Begin to end a wait."""
        each = self.of(record, now)
        each.state, each.means, each.next_at = State.ENDING, means_for(facts), now

    def next_means(self, record: Any, now: float) -> Means | None:
        """Return the means that is to be tried now, if any; ``note`` must follow."""
        each = self.of(record, now)
        return each.means[0][0] if each.means and now >= each.next_at else None

    def note(self, record: Any, now: float, took_effect: bool) -> None:
        """Take note of what became of the means that was tried."""
        each = self.of(record, now)
        means, seconds = each.means.pop(0)
        if took_effect:
            each.tried.append(means)
            each.next_at = now + seconds

    def was_interrupted(self, record: Any) -> bool:
        """Tell whether a call was made to raise."""
        watched = self._watched.get(id(record))
        return watched is not None and Means.INTERRUPT in watched.tried
