"""Who notices that a call never ends, and what happens then?

One thread a process. At each tick it looks at what blocks (``whereabouts``); what it has seen for longer than
the group's timeout is overdue, and so is at once what waits for a rank of this machine that has ended. It asks
the other ranks where they are (``side_channel``), writes the report (``report``) and the trace
(``flight_recorder``), and then ends the wait in the gentlest way there is:

1. the library raises by itself (gloo): nothing more;
2. a queued call or a receive: the wait raises DistBackendError;
3. ULFM: the communicator is revoked, and the blocked call raises;
4. else, or where it does not raise, the job is aborted, because MPI cannot be taken out of a blocking call.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections import deque
from typing import Any

from hpcdist.core.errors import DistBackendError
from hpcdist.core.group import ProcessGroup
from hpcdist.core.journal import Call, Explanation
from hpcdist.core.world import WORLD
from hpcdist.watch import logs, report, whereabouts
from hpcdist.watch.flight_recorder import Recorder
from hpcdist.watch.side_channel import SideChannel
from hpcdist.watch.signals import Signals, end_by
from hpcdist.watch.whereabouts import UnderWay

SHORTEST_TICK, LONGEST_TICK = 0.02, 1.0  # seconds
TICKS_PER_TIMEOUT = 20
ANSWER_SECONDS = 1.0  # how long the others have to answer, past the deadline
CLASH_SECONDS = 0.1
ENDED_SECONDS = 2.0  # how long MPI or the launcher may take to tell of a rank that has ended, before the watchdog does
STUCK_SECONDS = 2.5  # how long a call that was made to raise may take for it
YIELD_SECONDS = 1.5  # how long a rank whose report another one writes waits before it ends the job
ABORT_STATUS = 1


class Watchdog:
    """The watch over this process's calls.

    Attributes:
        channel: how the ranks ask each other.
        recorder: writes the traces.
        signals: what came from outside.
        leaving: whether the program has ended, and only MPI's end is to come.
    """

    def __init__(self, name: str, rank: int) -> None:
        self.channel = SideChannel()
        self.recorder = Recorder(name)
        self.signals = Signals()
        self.rank = rank
        self.leaving = False
        self.waits_until = 0.0  # no call is overdue before; for a rank in the debugger
        self._since: dict[int, tuple[Any, float]] = {}  # by id of the call's record: the record, when first seen
        self._handled: dict[int, tuple[Any, str]] = {}  # the overdue ones: the record, "asking" or "reported"
        self._interrupted: dict[int, tuple[Any, float]] = {}  # those that the library was told to end: the record, when
        self._given_up: deque[dict[str, Any]] = deque(maxlen=8)  # calls whose wait was ended, as others are told
        self._thread = threading.Thread(target=self._run, name="hpcdist-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self.signals.install()
        self._thread.start()

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        next_look = 0.0
        while True:
            wait = max(0.0, next_look - time.monotonic())
            ready, _, _ = select.select([self.channel.socket, self.signals.reader], [], [], wait)
            if self.signals.reader in ready:
                for number in self.signals.arrived():
                    self._heed(number)
            if self.channel.socket in ready:
                self.channel.answer(self.reply)
            if time.monotonic() >= next_look:
                self.look()
                next_look = time.monotonic() + self.tick()

    def tick(self) -> float:
        """Return the seconds to the next look: a part of the shortest timeout."""
        limits = [group.timeout.total_seconds() for group in list(WORLD.groups.values())]
        return min(LONGEST_TICK, max(SHORTEST_TICK, min(limits, default=60.0) / TICKS_PER_TIMEOUT))

    def look(self) -> None:
        """Note what is under way, and deal with what is overdue."""
        now = time.monotonic()
        self.recorder.tick()
        self._end_failed()
        since: dict[int, tuple[Any, float]] = {}
        overdue = []
        for each in whereabouts.under_way():
            if each.group.size() == 1:
                continue
            record = self._record(each)
            _, first = since[id(record)] = self._since.get(id(record), (record, now))
            limit = each.group.timeout.total_seconds()
            has_own_limit = each.work is not None and not each.in_background and each.work._limit is not None
            if now - first >= ENDED_SECONDS and self._lacks_process(each.group):
                limit = ENDED_SECONDS
            if now - first >= limit and now >= self.waits_until and not has_own_limit:
                overdue.append((each, now - first))
        self._since = since
        self._handled = {key: value for key, value in self._handled.items() if key in since}
        self._interrupted = {key: value for key, value in self._interrupted.items() if key in since}
        for each, seconds in overdue:
            if id(self._record(each)) not in self._handled:
                self._expire(each, seconds)
            elif now - self._interrupted.get(id(self._record(each)), (None, now))[1] >= STUCK_SECONDS:
                self.say("the job is aborted: a call that was interrupted has not ended")
                each.group.any_backend().abort(ABORT_STATUS)

    def _lacks_process(self, group: ProcessGroup) -> bool:
        """Tell whether a rank of a group has ended, so that its calls cannot."""
        return any(self.channel.has_ended(self.channel.places.get(rank)) for rank in group.ranks)

    def _end_failed(self) -> None:
        """End what is under way on communicators that the library itself reports as broken (NCCL)."""
        for group in list(WORLD.groups.values()):
            for backend in list(group.backends.values()):
                failure = backend.check_async()
                if failure is not None:
                    self.say(f"group {group.group_name!r}: {failure}")
                    backend.interrupt(str(failure))

    def _record(self, each: UnderWay) -> Any:
        """Return the tuple that stands for a call, the same object as long as it is under way."""
        if each.in_background:
            assert each.work is not None
            return each.work._call
        return each.group.journal.current

    def _heed(self, number: int) -> None:
        path = self.dump()
        if number == signal.SIGUSR1:
            self.say(f"SIGUSR1: trace written to {path}; at {whereabouts.main_line()}")
        logs.LOG.info("signal %d; trace written to %s", number, path)
        if self.signals.ends_process(number):
            end_by(number)

    # -- what this rank tells others -----------------------------------------------------------------

    def reply(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return where this rank is; ``dump`` in the question asks for a trace too."""
        group = WORLD.groups.get(question.get("group", ""))
        if question.get("dump"):
            self.dump()
        now = time.monotonic()
        calls = []
        for each in whereabouts.under_way():
            record = self._record(each)
            first = self._since.get(id(record), (record, now))[1]
            made = report.described(each, now - first, whereabouts.call_site(each))
            made["ranks"] = list(each.group.ranks) if question.get("from") in each.group.ranks else []
            made["state"] = self._handled.get(id(record), (record, ""))[1]
            calls.append(made)
        calls += [{**made, "ranks": [], "state": "reported"} for made in self._given_up]
        return {
            "rank": question.get("to"),
            "entered": None if group is None else group.journal.sequence,
            "calls": calls,
            "main": whereabouts.main_line(),
            "leaving": self.leaving,
        }

    def ask(self, ranks: list[int], group: str, seconds: float, dump: bool = False) -> dict[int, dict[str, Any]]:
        """Ask other ranks where they are."""
        question = {"from": self.rank, "group": group, "dump": dump}
        is_watchdog = threading.current_thread() is self._thread
        return self.channel.ask(
            [rank for rank in ranks if rank != self.rank],
            question,
            seconds,
            self.reply if is_watchdog else None,
        )

    def renumber(self, remaining: list[int]) -> None:
        """Take note that the world's ranks were numbered anew: ``remaining`` are their numbers until now."""
        self.channel.renumber(remaining)
        self.rank = remaining.index(self.rank)
        logs.locate(self.rank, len(remaining))

    def dump(self) -> str:
        """Write this rank's trace; a failure to write must not hide what it is written for."""
        try:
            return self.recorder.dump(self.rank)
        except OSError as error:
            return f"nowhere ({error})"

    def explain(self, record: Any) -> str:
        """Return where the other ranks are, for the error of a wait that timed out."""
        if record is None or record[0].group not in WORLD.groups:
            return ""
        group = WORLD.groups[record[0].group]
        mine = report.described(UnderWay(group, Call(*record), None, False), 0.0, "")
        answers = self.ask(list(group.ranks), group.group_name, ANSWER_SECONDS / 2)
        return "; ".join(report.compose(mine, self.rank, group.ranks, answers, self.channel.judge))

    # -- past the deadline ---------------------------------------------------------------------------

    def _expire(self, each: UnderWay, seconds: float) -> None:
        group, record = each.group, self._record(each)
        if record is None:
            return  # it has just ended
        key = id(record)
        self._handled[key] = (record, "asking")
        timeout = group.timeout.total_seconds()
        mine = report.described(each, seconds, whereabouts.call_site(each))
        answers = self.ask(list(group.ranks), group.group_name, ANSWER_SECONDS, dump=True)
        if self._states(mine, answers).get("asking"):
            # two of us ask at once: one will have reported at the second look, or else the lower one does
            self.ask([], "", CLASH_SECONDS)
            answers = self.ask(list(group.ranks), group.group_name, ANSWER_SECONDS)
        if self._record(each) is not record:
            return  # it ended while the others were asked
        headline = report.headline(mine, timeout)
        lines = report.compose(mine, self.rank, group.ranks, answers, self.channel.judge)
        path = self.dump()
        reporter = self._reporter(mine, answers)
        if reporter is None:
            reading = f"traces: {path}; all of them: torchfrtrace {os.path.dirname(path)}"
            text = "\n".join(f"  {line}" for line in [*lines, reading])
            self.say(f"{headline}\n{text}")
        else:
            self.say(f"{headline}; see the report of rank {reporter}")
        self._handled[key] = (record, "reported")
        self._end(each, mine, f"{headline}: {'; '.join(lines)}", reporter is not None)

    def _states(self, mine: dict[str, Any], answers: dict[int, dict[str, Any]]) -> dict[str, list[int]]:
        """Return which ranks are at which state of reporting this hang."""
        found: dict[str, list[int]] = {}
        for rank, answer in sorted(answers.items()):
            for call in answer["calls"]:
                if call["group"] == mine["group"] and not call["message"] and not mine["message"]:
                    found.setdefault(call["state"], []).append(rank)
        return found

    def _reporter(self, mine: dict[str, Any], answers: dict[int, dict[str, Any]]) -> int | None:
        """Return the rank that reports this hang in place of this one, or None."""
        states = self._states(mine, answers)
        lower = [rank for rank in states.get("asking", []) if rank < self.rank]
        return min([*states.get("reported", []), *lower], default=None)

    def _end(self, each: UnderWay, described: dict[str, Any], reason: str, is_reported: bool) -> None:
        """End an overdue wait."""
        backends = list(dict.fromkeys(each.group.backends.values()))
        if each.in_background:
            for backend in backends:
                if backend.queue is not None and backend.queue.running is each.work:
                    if not backend.ends_waits:
                        backend.interrupt(reason)
                    self._given_up.append(described)
                    backend.queue.fail(DistBackendError(reason))
            return
        if each.work is not None and each.work._interrupt(reason):
            return
        backend = each.group.cpu if each.group.cpu is not None else each.group.any_backend()
        if backend.ends_waits:
            return
        record = self._record(each)
        if backend.interrupt(reason):
            # Open MPI's revocation does not end a send that shared memory holds back, to a rank that takes nothing
            self._interrupted[id(record)] = (record, time.monotonic())
            return
        if is_reported:
            time.sleep(YIELD_SECONDS)
        self.say("the job is aborted: this MPI cannot be taken out of a blocking call")
        backend.abort(ABORT_STATUS)

    def say(self, text: str) -> None:
        """Write to stderr, whole."""
        sys.stdout.flush()
        sys.stderr.write(f"[rank {self.rank} of {logs.ORIGIN.size}] hpcdist: {text}\n")
        sys.stderr.flush()


RUNNING: list[Watchdog] = []  # the process's own: one, from its first group on to its end


def begin(group: ProcessGroup) -> Watchdog:
    """Watch over a default group's calls from now on; every rank of it calls this.

    One collective on the group lets the ranks know where the others listen.
    """
    rank = group.ranks[group.rank()]
    logs.locate(rank, group.size())
    first = not RUNNING
    watchdog = RUNNING[0] if RUNNING else Watchdog("", rank)
    group.journal.follow()  # the ring that the recorder and the log have set up
    watchdog.rank = rank
    if group.size() > 1:
        places = group.any_backend().all_gather_object(tuple(watchdog.channel.own))
        watchdog.channel.learn(group.ranks, places)
        watchdog.recorder.name = places[0][2][:8]
    else:
        watchdog.recorder.name = watchdog.channel.own.secret[:8]
    if first:
        RUNNING.append(watchdog)
        watchdog.start()
    Explanation.of = staticmethod(watchdog.explain)
    logs.LOG.info("default group of %d ranks, %s", group.size(), group.config, extra=logs.of(group))
    return watchdog
