"""What if a rank leaves the program while others wait for it?

MPI_Finalize waits for every rank. A rank that ends without ``destroy_process_group`` while the others are in a
collective would wait in it for ever, and they for it. So a rank that leaves begins a farewell (a non-blocking
barrier), and until all have joined asks the others where they are: one that is in a call which cannot end
without this rank is the sign to end the job. Once a process has ended without a farewell, that barrier may never
end: then this rank leaves when all others have ended or said that they leave. One that is stopped is waited for until
the timeout. A forked child is no rank, and just leaves.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from types import TracebackType
from typing import Any

from hpcdist.core.backend import Backend
from hpcdist.core.world import WORLD
from hpcdist.watch import report
from hpcdist.watch.watchdog import ABORT_STATUS, RUNNING, Watchdog

FIRST_ASK, LONGEST_PAUSE = 0.2, 5.0  # seconds
LACKING_PAUSE = 1.0  # the longest where a process has ended
SHORTEST_NAP, LAST_NAP = 0.0005, 0.02
ASKED_AT_ONCE = 64  # ranks that one look asks: N ranks that wait for a late one would ask N² otherwise
QUEUE_SECONDS = 1.0  # how long a worker thread that was given up may still take


class Departure:
    """What this process leaves by."""

    def __init__(self) -> None:
        self.backend: Backend | None = None  # the last default group's
        self.limit = 0.0  # its timeout, in seconds
        self.failed = False  # an uncaught exception is on its way

    def leave(self) -> None:
        """End the queues, and wait until every rank leaves; abort the job where one waits for this one."""
        watchdog = RUNNING[0] if RUNNING else None
        if watchdog is None or self.backend is None:
            return
        watchdog.leaving = True
        if is_stuck():
            watchdog.say("leaving with a call that never ended; the job is aborted")
            self.backend.abort(ABORT_STATUS)
        for group in list(WORLD.groups.values()):
            for backend in list(group.backends.values()):
                if backend.queue is not None:
                    backend.queue.close()
        watchdog.has_left = True
        everyone_leaves = self.backend.farewell()
        if everyone_leaves is None:
            return
        looks = Looks(watchdog, self.backend, self.limit)
        next_look, nap = time.monotonic() + looks.pause, SHORTEST_NAP
        while not everyone_leaves():
            if time.monotonic() >= next_look:
                if looks.look():
                    return
                next_look = time.monotonic() + looks.pause
            time.sleep(nap)
            nap = min(LAST_NAP, 2 * nap)

    def forget(self) -> None:
        """Forget the job, in a forked child: its threads and its MPI are the parent's."""
        self.backend = None
        RUNNING.clear()

    def on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Write a trace, then do what was to be done with an uncaught exception."""
        if RUNNING:
            RUNNING[0].dump()
        before = self.hook
        try:
            before(kind, error, trace)
        except Exception:
            traceback.print_exc()

    hook = staticmethod(sys.__excepthook__)


class Looks:
    """What a rank that leaves has seen of the others, look by look.

    Attributes:
        pause: seconds to the next look.
    """

    def __init__(self, watchdog: Watchdog, backend: Backend, limit: float) -> None:
        self.watchdog, self.backend, self.limit = watchdog, backend, limit
        self.pause = FIRST_ASK
        self.suspects: set[tuple[int, str, int]] = set()  # calls that waited for this rank at the last look
        self.lacks_one = False  # whether a process was gone at the last look, or MPI knew of one
        self.moved = time.monotonic()  # when no process was stopped, last
        self.asked = 0  # how many were asked in turn

    def look(self) -> bool:
        """Abort the job where it cannot end otherwise; tell whether to wait for the others no longer."""
        channel = self.watchdog.channel
        now = waiting_for(self.watchdog, self._asked())
        if lasting := [text for key, text in now.items() if key in self.suspects]:
            self._abort("\n  ".join(["this rank has left the program, and the job is aborted:", *lasting]))
        stopped = channel.stopped()
        self.moved = self.moved if stopped else time.monotonic()
        if time.monotonic() - self.moved >= self.limit:
            pids = ", ".join(map(str, stopped))
            self._abort(f"process {pids} is stopped, so that the job cannot end; it is aborted")
        lacks_one = channel.any_ended() or self.backend.knows_death()
        if lacks_one and self.lacks_one and not self._others():  # it did not end just now, with all others
            self.backend.abandon()
            return True
        self.suspects, self.lacks_one = set(now), lacks_one
        self.pause = min(LACKING_PAUSE if lacks_one else LONGEST_PAUSE, self.pause if now else 2 * self.pause)
        return False

    def _others(self) -> list[int]:
        """Return the other ranks that have neither ended nor left, those after this one first."""
        me, staying = self.watchdog.rank, self.watchdog.channel.staying()
        return sorted((rank for rank in staying if rank != me), key=lambda rank: (rank < me, rank))

    def _asked(self) -> list[int]:
        """Return the ranks to ask now: all where one has ended, and else so many as are looked at in turn."""
        others = self._others()
        if self.lacks_one or len(others) <= ASKED_AT_ONCE:
            return others
        start = self.asked % len(others)
        self.asked += ASKED_AT_ONCE
        turn = [*others, *others][start : start + ASKED_AT_ONCE]
        return list({*turn, *(rank for rank, _, _ in self.suspects)})

    def _abort(self, reason: str) -> None:
        self.watchdog.say(reason)
        self.watchdog.dump()
        self.backend.abort(ABORT_STATUS)


DEPARTURE = Departure()
os.register_at_fork(after_in_child=DEPARTURE.forget)


def is_stuck() -> bool:
    """Tell whether a worker thread was given up and is still in its call."""
    broken = [
        backend.queue
        for group in list(WORLD.groups.values())
        for backend in list(group.backends.values())
        if backend.queue is not None and backend.queue.broken is not None
    ]
    deadline = time.monotonic() + QUEUE_SECONDS
    while any(queue.running is not None for queue in broken):
        if time.monotonic() >= deadline:
            return True
        time.sleep(LAST_NAP)
    return False


def waiting_for(watchdog: Watchdog, ranks: list[int]) -> dict[tuple[int, str, int], str]:
    """Ask ranks, and return their calls that cannot end without this one."""
    found = {}
    for rank, answer in watchdog.ask(ranks, "", 0.5, left=watchdog.channel.own.process).items():
        if answer["left"]:
            watchdog.channel.note_left(rank)
        for call in answer["calls"]:
            if watchdog.rank in call["ranks"] and needs(call, watchdog.rank):
                where = f"{report.title(call)} on {call['label']}, {call['where']}"
                found[rank, call["group"], call["number"]] = f"rank {rank} waits for it in {where}"
    return found


def needs(call: dict[str, Any], me: int) -> bool:
    """Tell whether another rank's call cannot end, now that this rank makes no more calls."""
    group = WORLD.groups.get(call["group"])
    if call["message"]:
        return call["peer"] == me
    return group is None or call["number"] > group.journal.sequence
