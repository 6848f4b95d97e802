"""Who notices that a call never ends, and what happens then?

One thread a process. At each tick it looks at what blocks (``whereabouts``); what it has seen for longer than
the group's timeout is overdue, and so is at once what waits for a rank that is known to have ended. One of the ranks
that wait (``inquiry``) asks the others where they are (``side_channel``), writes the report (``report``) and the trace
(``flight_recorder``), and tells those in the same call. Each then ends its wait in the gentlest way there is:

1. the library raises by itself (gloo): nothing more;
2. a queued call, a receive, or a call that a device is at: the wait raises DistBackendError;
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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hpcdist.core.backend import Backend
from hpcdist.core.errors import DistBackendError
from hpcdist.core.group import Group
from hpcdist.core.journal import Explanation
from hpcdist.core.world import WORLD
from hpcdist.watch import logs, report, whereabouts
from hpcdist.watch.flight_recorder import Recorder
from hpcdist.watch.inquiry import RANK_SECONDS, Inquiries, Subject, Verdict, turn, witnessed
from hpcdist.watch.report import Answers
from hpcdist.watch.side_channel import LARGEST, SideChannel
from hpcdist.watch.signals import Signals, end_by
from hpcdist.watch.whereabouts import UnderWay

SHORTEST_TICK, LONGEST_TICK = 0.02, 1.0  # seconds
TICKS_PER_TIMEOUT = 20
ANSWER_SECONDS = 1.0  # how long the others have to answer, past the deadline
NEWS_SECONDS = 0.5  # how long they have to take note of what they are told
ENDED_SECONDS = 2.0  # how long MPI or the launcher may take to tell of a rank that has ended, before the watchdog does
STUCK_SECONDS = 2.5  # how long a call that was made to raise may take for it
GREETING_SECONDS = 10.0  # how often a rank from whose other nodes no datagram has come asks one for a sign of life
YIELD_SECONDS = 1.5  # how long a rank leaves it to the one that reported to end a call for all
ABORT_STATUS = 1


class Watchdog:
    """The watch over this process's calls.

    Attributes:
        channel: how the ranks ask each other.
        recorder: writes the traces.
        signals: what came from outside.
        inquiries: who asks whom about calls that do not end.
        leaving: whether the program has ended, and only MPI's end is to come.
        has_left: whether the calls that it had queued have ended too.
    """

    def __init__(self, name: str, rank: int) -> None:
        self.channel = SideChannel()
        self.recorder = Recorder(name)
        self.signals = Signals()
        self.rank = rank
        self.inquiries = Inquiries()
        self.leaving = self.has_left = False
        self.waits_until = 0.0  # no call is overdue before; for a rank in the debugger
        self._next_greeting = 0.0
        self._since: dict[int, tuple[Any, float]] = {}  # by id of the call's record: the record, when first seen
        # the overdue ones: the record, "due", "asking" or "reported", and from when on this rank may ask
        self._handled: dict[int, tuple[Any, str, float]] = {}
        # those that were to end: the record, and from when on what is to be done if they have not
        self._last: dict[int, tuple[Any, float, Callable[[], None]]] = {}
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
                is_due = any(state == "due" for _, state, _ in self._handled.values())
                next_look = time.monotonic() + (SHORTEST_TICK if is_due else self.tick())

    def tick(self) -> float:
        """Return the seconds to the next look: a part of the shortest timeout."""
        limits = [group.timeout.total_seconds() for group in list(WORLD.groups.values())]
        return min(LONGEST_TICK, max(SHORTEST_TICK, min(limits, default=60.0) / TICKS_PER_TIMEOUT))

    def look(self) -> None:
        """Note what is under way, and deal with what is overdue."""
        now = time.monotonic()
        self.recorder.tick()
        self._end_failed()
        if not self.leaving and WORLD.default is not None:
            strangers, gone = self.channel.to_tell()
            if strangers:
                self.ask(strangers, "", NEWS_SECONDS, ended=gone)
            if now >= self._next_greeting and (unheard := self.channel.unheard()):
                self._next_greeting = now + GREETING_SECONDS
                self.ask(unheard, "", NEWS_SECONDS)
        since: dict[int, tuple[Any, float]] = {}
        overdue = []
        for each in whereabouts.under_way():
            if each.group.size() == 1:
                continue
            _, first = since[id(each.record)] = self._since.get(id(each.record), (each.record, now))
            limit = each.group.timeout.total_seconds()
            if now - first >= ENDED_SECONDS and self.channel.lacks(each.group.ranks):
                limit = ENDED_SECONDS
            if now - first >= limit and now >= self.waits_until and not each.has_own_limit:
                overdue.append((each, now - first))
        self._since = since
        self._handled = {key: value for key, value in self._handled.items() if key in since}
        self._last = {key: value for key, value in self._last.items() if key in since}
        for each, seconds in overdue:
            self._press(each, seconds)
        for _, limit, step in list(self._last.values()):
            if time.monotonic() >= limit:
                step()

    def _end_failed(self) -> None:
        """End what is under way on communicators that the library itself reports as broken (NCCL)."""
        for group in list(WORLD.groups.values()):
            for backend in list(group.backends.values()):
                failure = backend.check_async()
                if failure is not None:
                    self.say(f"group {group.group_name!r}: {failure}")
                    backend.interrupt(str(failure))

    def _heed(self, number: int) -> None:
        path = self.dump()
        if number == signal.SIGUSR1:
            self.say(f"SIGUSR1: trace written to {path}; at {whereabouts.main_line()}")
        logs.LOG.info("signal %d; trace written to %s", number, path)
        if self.signals.ends_process(number):
            end_by(number)

    # -- what this rank tells others -----------------------------------------------------------------

    def reply(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return where this rank is, and take note of what the question tells.

        Args:
            question: ``from``, and what it may hold besides: the ``group`` that it is about; ``dump`` asks for a trace
                too; ``about``, a call that the asker waits in; ``verdict``, what it found out; ``left``, that it makes
                no more calls; ``ended``, processes of its node that are gone; ``judge``, ranks that do not answer.
        """
        group = WORLD.groups.get(question.get("group", ""))
        if question.get("dump"):
            self.inquiries.note_sweep(question["group"])
            self.dump()
        if question.get("about"):
            self.inquiries.note(Subject(*question["about"]), question["from"], group.size() if group else 0)
        if question.get("verdict"):
            self._hear(Verdict.read(question["verdict"]))
        if question.get("left"):
            self.channel.left.add(tuple(question["left"]))
        self.channel.ended.update((machine, pid) for machine, pid in question.get("ended", ()))
        now = time.monotonic()
        calls = []
        for each in whereabouts.under_way():
            first = self._since.get(id(each.record), (each.record, now))[1]
            made = report.described(each, now - first, whereabouts.call_site(each))
            made["ranks"] = list(each.group.ranks) if question.get("from") in each.group.ranks else []
            made["state"] = self._handled.get(id(each.record), (each.record, "", 0.0))[1]
            calls.append(made)
        calls += [{**made, "ranks": [], "state": "reported"} for made in self._given_up]
        return {
            "rank": question.get("to"),
            "entered": None if group is None else group.journal.sequence,
            "calls": calls,
            "main": whereabouts.main_line(),
            "leaving": self.leaving,
            "left": self.has_left,
            "judged": [(rank, self.channel.judge(rank)) for rank in question.get("judge", ())],
        }

    def ask(self, ranks: Sequence[int], group: str, seconds: float, **more: Any) -> Answers:
        """Ask other ranks where they are; ``more`` is what else the question holds, as ``reply`` reads it."""
        question = {"from": self.rank, "group": group, **more}
        reply = self.reply if threading.current_thread() is self._thread else None
        others = [rank for rank in ranks if rank != self.rank]
        return self.channel.ask(others, question, seconds + len(others) * RANK_SECONDS, reply)

    def renumber(self, remaining: list[int]) -> None:
        """Take note that the world's ranks were numbered anew: ``remaining`` are their numbers until now."""
        self.channel.renumber(remaining)
        self.inquiries.forget()
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
        each = UnderWay(group, record, group.any_backend(), None, False)
        mine, subject = report.described(each, 0.0, ""), Subject.of(each)
        asked: Sequence[int] = group.ranks if mine["peer"] is None else [mine["peer"]]
        if subject is not None:
            start = time.monotonic()
            while time.monotonic() < min(self._turn(subject, group, start), start + ANSWER_SECONDS):
                time.sleep(SHORTEST_TICK)
                if verdict := self.inquiries.verdict(subject, ANSWER_SECONDS):
                    return "; ".join(verdict.lines)
        answers = self.ask(asked, group.group_name, ANSWER_SECONDS / 2, about=subject)
        lines = self._compose(mine, asked, group, answers)
        if subject is not None:
            self._tell(Verdict(subject, self.rank, report.title(mine), lines, False), answers)
        return "; ".join(lines)

    # -- past the deadline ---------------------------------------------------------------------------

    def _turn(self, subject: Subject | None, group: Group, start: float) -> float:
        """Return from when on this rank may ask about a call that it was ready to ask about at ``start``."""
        own = start + turn(group.rank())
        return own if subject is None else max(own, self.inquiries.next_turn(subject, group.rank()))

    def _press(self, each: UnderWay, seconds: float) -> None:
        """Take an overdue call one step further: wait for what another rank finds out, or ask."""
        _, state, start = self._handled.setdefault(id(each.record), (each.record, "due", time.monotonic()))
        if state == "reported":
            return
        subject = Subject.of(each)
        if subject is not None and (verdict := self.inquiries.verdict(subject)):
            self._accept(each, seconds, verdict)
        elif time.monotonic() >= self._turn(subject, each.group, start):
            self._inquire(each, seconds, subject)

    def _inquire(self, each: UnderWay, seconds: float, subject: Subject | None) -> None:
        """Ask where the others are, report it, tell those in the same call, and end the wait."""
        group, record = each.group, each.record
        mine = report.described(each, seconds, whereabouts.call_site(each))
        self._handled[id(record)] = (record, "asking", time.monotonic())
        asked: Sequence[int] = group.ranks
        if mine["peer"] is not None and self.inquiries.was_swept(group.group_name):
            asked = [mine["peer"]]  # the others have written their traces already
        answers = self.ask(asked, group.group_name, ANSWER_SECONDS, dump=True, about=subject)
        if each.has_ended() or self._handled[id(record)][1] == "reported":
            return  # it ended while the others were asked
        if subject is not None and self.inquiries.has_lower(subject, self.rank):
            self._handled[id(record)] = (record, "due", time.monotonic())
            return  # a lower rank asks about the same call; its verdict comes
        headline = report.headline(mine, group.timeout.total_seconds())
        lines = self._compose(mine, asked, group, answers)
        path = self.dump()
        reporter = None if subject is None else self.inquiries.reporter(subject.group, self.rank, answers)
        if reporter is None:
            reading = f"traces: {path}; all of them: torchfrtrace {os.path.dirname(path)}"
            text = "\n".join(f"  {line}" for line in [*lines, reading])
            self.say(f"{headline}\n{text}")
        else:
            self.say(f"{headline}; see the report of rank {reporter}")
        self._handled[id(record)] = (record, "reported", 0.0)
        if subject is not None:
            source = self.rank if reporter is None else reporter
            self._tell(Verdict(subject, source, report.title(mine), lines, self._ends_all(each)), answers)
        self._end(each, mine, f"{headline}: {'; '.join(lines)}", reporter is not None)

    def _compose(self, mine: dict[str, Any], asked: Sequence[int], group: Group, answers: Answers) -> list[str]:
        judge = witnessed(self.channel, asked, answers, partial(self.ask, group=group.group_name, seconds=NEWS_SECONDS))
        return report.compose(mine, self.rank, group.ranks, answers, judge)

    def _ends_all(self, each: UnderWay) -> bool:
        """Tell whether to end an overdue collective here ends it on all ranks: by ULFM, or with the job."""
        return not each.backend.ends_waits and (not each.in_background or each.backend.interrupts_all())

    def _tell(self, verdict: Verdict, answers: Answers) -> None:
        """Send a verdict to the ranks that it is for."""
        if meant := verdict.meant(answers):
            self.ask(meant, verdict.subject.group, NEWS_SECONDS, verdict=verdict.fitted(LARGEST // 2))

    def _hear(self, verdict: Verdict) -> None:
        """Take note of a verdict; one that ends the call for all ranks ends it here too, before the library does."""
        self.inquiries.conclude(verdict)
        if not verdict.is_final:
            return
        for each in whereabouts.under_way():
            record = each.record
            others = each.call.is_message or each.has_own_limit or each.group.group_name != verdict.subject.group
            if not others and self._handled.get(id(record), (None, ""))[1] != "reported":
                _, first = self._since.get(id(record), (record, time.monotonic()))
                self._accept(each, time.monotonic() - first, verdict)

    def _accept(self, each: UnderWay, seconds: float, verdict: Verdict) -> None:
        """End a wait for what another rank found out."""
        mine = report.described(each, seconds, whereabouts.call_site(each))
        headline = report.headline(mine, each.group.timeout.total_seconds())
        self.say(f"{headline}; see the report of rank {verdict.reporter}")
        self._handled[id(each.record)] = (each.record, "reported", 0.0)
        found = "; ".join(verdict.lines)
        if Subject.of(each) != verdict.subject:
            found = f"rank {verdict.reporter} gave {verdict.title} of {mine['label']} up: {found}"
        self._end(each, mine, f"{headline}: {found}", True)

    def _end(self, each: UnderWay, described: dict[str, Any], reason: str, is_reported: bool) -> None:
        """End an overdue wait; where another rank has reported it and ends it for all, only if that fails."""
        backend = each.backend
        if each.in_background:
            if backend.outstanding() is each.work:  # a device is at it: its communicator ends, and with it the call
                self._given_up.append(described)
                backend.interrupt(reason)
            elif backend.queue is not None and backend.queue.running is each.work:
                if is_reported:
                    backend.foretell(reason)
                elif not backend.ends_waits:
                    backend.interrupt(reason)
                self._given_up.append(described)
                backend.queue.fail(DistBackendError(reason))
            return
        if each.work is not None and each.work._interrupt(reason):
            return
        if backend.ends_waits:
            return
        if is_reported:
            backend.foretell(reason)
            limit = NEWS_SECONDS if backend.interrupts_all() else YIELD_SECONDS
            step: Callable[[], None] = partial(self._end, each, described, reason, False)
        elif backend.interrupt(reason):
            # Open MPI's revocation does not end a send that shared memory holds back, to a rank that takes nothing
            limit, step = STUCK_SECONDS, partial(self._abort, backend, "a call that was interrupted has not ended")
        else:
            self._abort(backend, "this MPI cannot be taken out of a blocking call")
            return
        self._last[id(each.record)] = (each.record, time.monotonic() + limit, step)

    def _abort(self, backend: Backend, why: str) -> None:
        self.say(f"the job is aborted: {why}")
        backend.abort(ABORT_STATUS)

    def say(self, text: str) -> None:
        """Write to stderr, whole."""
        sys.stdout.flush()
        sys.stderr.write(f"[rank {self.rank} of {logs.ORIGIN.size}] hpcdist: {text}\n")
        sys.stderr.flush()


RUNNING: list[Watchdog] = []  # the process's own: one, from its first group on to its end


def begin(group: Group) -> Watchdog:
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
        places = group.any_backend().objects.all_gather(tuple(watchdog.channel.own))
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
