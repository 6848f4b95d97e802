"""Watchdog: the thread that detects calls which do not end, reports the positions of the ranks, and ends the wait.

Each process has one. At each tick it checks the calls that block (``calls_under_way``). A call that it has seen for
longer than the group's timeout is overdue, and so is, after 2 s, one that waits for a rank that is known to have ended.
One of the waiting ranks asks the others for their calls (``channel``), writes the report (``report``) and the trace
(``recorder``), and sends the report to the ranks in the same call. ``escalation`` decides the order and times of the
steps. Each rank ends its wait in the mildest possible way:

1. the library raises by itself (gloo): nothing more; its error contains what the report would say;
2. a queued call, a receive, or a device's call: the wait raises DistBackendError;
3. ULFM: the communicator is revoked, and the blocked call raises;
4. else, or if it does not raise, the job is aborted, because a blocked call of MPI or NCCL cannot be ended.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from traceback import format_exception
from typing import Any

from hpcdist.core import hooks
from hpcdist.core.backend import Backend
from hpcdist.core.group import Group
from hpcdist.core.printing import add_hint, printable, write_to_stderr
from hpcdist.core.waiting import wait_readable
from hpcdist.core.world import WORLD
from hpcdist.launch.pmi import ABORT_STATUS
from hpcdist.watch import calls_under_way, logs, report
from hpcdist.watch.call_exchange import CallExchange
from hpcdist.watch.calls_under_way import REMAKING, State, UnderWay, under_way
from hpcdist.watch.channel import Channel, key_of
from hpcdist.watch.debug_socket import SECRET_VARIABLE, SLURM_JOB, DebugSocket, JobRank
from hpcdist.watch.escalation import NO_THREAD, end_blocked, end_in_background
from hpcdist.watch.inspection import Inspection, program
from hpcdist.watch.job_end import LAUNCHER_SECONDS, JobEnd, Meeting
from hpcdist.watch.liveness import NEWS_SECONDS, Liveness
from hpcdist.watch.question import Answers, Message
from hpcdist.watch.recorder import Recorder
from hpcdist.watch.report import Collective, Report, Reports, judge_of
from hpcdist.watch.signals import HANDLED, WATCHED, Signals, end_by, is_pythons

SHORTEST_TICK, LONGEST_TICK = 0.02, 1.0  # seconds
TICKS_PER_TIMEOUT = 20
ANSWER_SECONDS = 1.0  # seconds that the others have to answer, past the deadline
ENDED_SECONDS = 2.0  # seconds that MPI or the launcher have to act on an ended rank, before the watchdog does
SIGINT_SECONDS = 1.0  # seconds that a call may continue after a Ctrl-C
FAILURES = 20  # the most failures of its own that the watchdog reports
STANDSTILL_SECONDS = 1.0  # seconds of delay that show that the process was suspended
TRACE_SECONDS = 2.0  # seconds to wait for a trace: a file system may never answer
OTHERS_TRACE_SECONDS = 0.1  # the same on a rank that others ask for a trace, and for more


class Watchdog:
    """The watch over this process's calls."""

    def __init__(self, name: str, rank: int) -> None:
        self.channel = Channel(rank)
        self.liveness = Liveness(self.channel)
        self.recorder = Recorder(name)
        self.signals = Signals()
        self.calls: list[UnderWay] = []  # the calls under way at the last tick
        self.reports = Reports()
        self.inspection = Inspection()
        self.job_end = JobEnd(self.liveness, self.say)
        self.meeting: Meeting | None = None  # the meeting of an elastic job in which this process waits
        self.leaving = False  # whether the program has ended, and only MPI_Finalize is left
        self.has_left = False  # whether the queued calls have ended too
        self.waits_until = 0.0  # no call is overdue before this time; for a rank in the debugger
        self._given_up: deque[dict[str, Any]] = deque(maxlen=8)  # calls whose wait was ended, in the form of answers
        self._found: list[UnderWay] = []  # the calls that were under way at the last SIGINT
        self._sigint_due = 0.0  # the time when one of them is ended
        self._is_dump_due = False  # whether another rank has asked for a trace that is not written yet
        self._stood_still = 0.0  # seconds
        self._next_look = 0.0
        self._next_second = 0.0  # the time of the next checks, once a second
        self._failures: set[str] = set()  # failures of this thread that were reported
        self._tracer: threading.Thread | None = None  # the thread that writes a trace, or has written the last one
        self._debug_socket: DebugSocket  # set by ``start``
        self.channel.note_failure = self._note_failure
        register = self.channel.register
        register("where", self._where)
        register("report", self._take_report)
        register("abort", self._note_abort)
        self.call_exchange = CallExchange(self.channel, self.end_call)
        self._thread = threading.Thread(target=self._run, name="hpcdist-watchdog", daemon=True)

    @property
    def rank(self) -> int:
        return self.channel.rank

    def start(self) -> None:
        self._debug_socket = DebugSocket()
        self._thread.start()
        self.channel.thread = self._thread.ident or 0

    def leave_to_parent(self) -> None:
        """Undo the parent's settings in a forked child; close its sockets: an open port makes it look alive."""
        self.signals.remove()
        self.liveness.close()
        self.channel.close()
        self._debug_socket.close()

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                self._take_in(min(self._next_look, self.channel.push()) - time.monotonic())
                if time.monotonic() >= self._next_look:
                    self._next_look = time.monotonic() + SHORTEST_TICK  # also if a tick raises
                    self.look()
                    is_one_due = any(each.state is State.DUE for each in self.calls)
                    self._next_look = time.monotonic() + (SHORTEST_TICK if is_one_due else self.tick())
                for each in self.calls:
                    each.release()
            except Exception as error:  # without this thread a hang would not be detected
                with suppress(Exception):  # memory may be exhausted
                    self._note_failure(error)
                time.sleep(SHORTEST_TICK)

    def _note_failure(self, error: Exception) -> None:
        """Report an exception of this thread's work, each kind once; the thread continues."""
        lines = format_exception(error)
        if len(self._failures) < FAILURES and (where := str(lines[-2:])) not in self._failures:
            self._failures.add(where)
            text = f"the watchdog goes on after an error of its own:\n{''.join(lines)}"
            self.say(add_hint(text, "watchdog-error"))

    def _take_in(self, seconds: float) -> None:
        """Wait for datagrams, signals and clients, and handle them."""
        debug_socket, began = self._debug_socket, time.monotonic()
        ready = wait_readable([self.channel.socket, self.signals.reader, *debug_socket.sockets], seconds)
        if (late := time.monotonic() - began - max(0.0, seconds)) > STANDSTILL_SECONDS:
            self._stood_still += late
            for each in self.calls:
                each.first_seen += late
        if any(each in ready for each in debug_socket.sockets):
            slurm_job = os.environ.get(SLURM_JOB, "")
            debug_socket.answer(JobRank(self.channel.own, self.rank, self.recorder.name, program(), slurm_job))
        if self.signals.reader in ready:
            for number in self.signals.arrived():
                self._on_signal(number)
        if self.channel.socket in ready:
            self.channel.answer()
            self.dump_if_due(OTHERS_TRACE_SECONDS)

    def clock(self) -> float:
        """Return the seconds of a clock that stops while the process is suspended."""
        return time.monotonic() - self._stood_still

    def tick(self) -> float:
        """Return the seconds to the next tick: a fraction of the shortest timeout."""
        limits = [group.timeout.total_seconds() for group in list(WORLD.groups.values())]
        return min(LONGEST_TICK, max(SHORTEST_TICK, min(limits, default=60.0) / TICKS_PER_TIMEOUT))

    def look(self) -> None:
        """Update the calls under way, and handle overdue ones."""
        now = time.monotonic()
        self.recorder.tick()
        self.inspection.look(now)
        self.job_end.look(now)
        meeting = self.meeting  # the main thread may end it meanwhile
        if meeting is not None and (reason := meeting.find_reason(self.liveness, self.clock())):
            self.abort(meeting.backend, reason)
        self._end_failed()
        if now >= self._next_second:
            self._next_second = now + LONGEST_TICK
            if not self.leaving and WORLD.default is not None:
                self.liveness.look()
            self.call_exchange.look(self.under_way())
        calls = [each for each in self.under_way() if each.group.size() > 1]
        for each in calls:
            if self.job_end.is_known and not each.backend.faults.interrupts_all():
                continue  # the launcher ends the job, with the status of the rank that has exited
            if each.limit is None and now >= self.waits_until:
                self._advance(each, now)
            self._escalate(each)
        if self._found and now >= self._sigint_due:
            self._end_interrupted(calls)

    def _end_interrupted(self, calls: list[UnderWay]) -> None:
        """End the call that was interrupted by SIGINT on the main thread, if Python would raise after it."""
        found, self._found = self._found, []
        if not is_pythons(signal.getsignal(signal.SIGINT)):
            return
        for each in calls:
            is_main = not each.in_background and each.thread == threading.main_thread().ident
            if is_main and each in found and not each.backend.ends_waits:
                mine = each.described()
                text = f"SIGINT: {report.title(mine)} on {mine['label']}, called at {mine['where']}, has not ended"
                self.end_call(each, text)

    def under_way(self) -> list[UnderWay]:
        """Return the calls that are under way now."""
        self.calls = under_way(self.calls)
        return self.calls

    def end_call(self, each: UnderWay, reason: str) -> None:
        """Report why a call is ended, and begin to end it, unless that has begun."""
        if each.state is not State.ENDING and not each.has_ended():
            self.say(reason)
            self._end(each, reason, False)

    def _end_failed(self) -> None:
        """End the calls on communicators that the library itself reports as broken (NCCL)."""
        for group in list(WORLD.groups.values()):
            for backend in group.in_use():
                if (failure := backend.faults.check_async()) is not None:
                    self.say(f"group {group.group_name!r}: {failure}")
                    backend.faults.interrupt(str(failure), NO_THREAD)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGINT:
            self._found = self.under_way()
            self._sigint_due = time.monotonic() + SIGINT_SECONDS
            return
        if number == HANDLED:
            self._found = []
            return
        ends_process = self.signals.ends_process(number)  # the program may put our handler back meanwhile
        path = self.dump()
        if number == signal.SIGUSR1:
            self.say(f"SIGUSR1: trace written to {path}; at {calls_under_way.line_in()}")
        logs.LOG.info("signal %d; trace written to %s", number, path)
        if ends_process and self.signals.ends_process(number):
            end_by(number)

    # -- answers to other ranks ----------------------------------------------------------------------

    def _note_abort(self, message: Message) -> Message:
        self.dump_if_due()  # while there is time
        self.job_end.note_message(f"rank {message['from']} aborts the job ({message['reason']})", message["leaves"])
        return {}

    def _where(self, message: Message) -> Message:
        """Return this rank's position in a ``group``, the answer to other ranks.

        ``dump`` requests a trace too; ``about`` is the call in which the asker waits; ``left`` is its process, if it
        makes no more calls; ``first`` requests the data of the command ``debug`` (``Inspection.answer``).
        """
        asker, group = message["from"], WORLD.groups.get(message["group"])
        if message.get("left"):
            self.liveness.left.add(tuple(message["left"]))
        if message.get("dump"):
            self.reports.note_sweep(message["group"])
            self._is_dump_due = True  # after the answer: a slow disk must not make this rank look silent
        if message.get("about"):
            self.reports.note_asker(Collective(*message["about"]), asker, group.size() if group else 0)
        calls = [{**each.described(), "has_asker": each.takes_part(asker)} for each in self.under_way()]
        calls += self._given_up
        endpoints, first = self.channel.endpoints or {self.rank: self.channel.own}, message.get("first")
        return {
            "entered": None if group is None else group.journal.sequence,
            # in whole seconds, so that the answers of many ranks are equal
            "calls": [{**each, "seconds": round(each["seconds"])} for each in calls],
            "main": calls_under_way.line_in(),
            "halted": [] if group is None else self.liveness.halted(),
            "leaving": self.leaving,
            "left": self.has_left,
            "inspected": None if first is None else self.inspection.answer(endpoints, first),
        }

    def renumber(self, remaining: list[int]) -> None:
        """Renumber the world's ranks: ``remaining`` are their old numbers.

        If none remain, ``watch`` assigns new numbers.
        """
        self.channel.renumber(remaining)
        self.reports = Reports()  # the next groups and calls will have the same names and numbers
        self._given_up.clear()
        if remaining:
            self.channel.rank = remaining.index(self.rank)
            logs.ORIGIN.rank, logs.ORIGIN.size = self.rank, len(remaining)

    def dump_if_due(self, seconds: float = TRACE_SECONDS) -> None:
        """Write the trace that other ranks have requested, once for all their questions."""
        if self._is_dump_due:
            self.dump(seconds)

    def dump(self, seconds: float = TRACE_SECONDS) -> str:
        """Write this rank's trace, and what it has printed; wait some seconds for it, and return the trace's place.

        Neither a failed write nor a file system that never answers may hide the error for which it is written. The
        process may be ended next, by a signal, and Python's buffer with it.
        """
        self._is_dump_due = False
        if self._tracer is not None:
            self._tracer.join(seconds)
            if self._tracer.is_alive():
                return "nowhere (an earlier one is still being written)"
        said: list[str] = []

        def write() -> None:
            try:
                said.append(self.recorder.dump(self.rank))
            except Exception as error:
                said.append(f"nowhere ({error})")
            with suppress(Exception):  # it is None, closed or broken
                sys.stdout.flush()

        tracer = threading.Thread(target=write, name="hpcdist-trace", daemon=True)
        try:
            tracer.start()
        except RuntimeError:  # no thread can be started, such as at Python's end
            write()
        else:
            self._tracer = tracer
            tracer.join(seconds)
        return said[0] if said else f"nowhere yet (it takes more than {seconds:g} s)"

    def explain(self, record: Any) -> str:
        """Return the positions of the other ranks, for the error of a timed out wait: a record's, or this thread's."""
        if record is None:
            record = next((each.record for each in under_way() if each.is_own()), None)
        if record is None or record[0].group not in WORLD.groups:
            return ""
        group = WORLD.groups[record[0].group]
        each = UnderWay(group, record, group.any_backend())
        mine, collective = each.described(), Collective.of(each)
        asked: Sequence[int] = group.ranks if mine["peer"] is None else [mine["peer"]]
        if collective is not None:
            start = time.monotonic()
            while time.monotonic() < min(self.reports.turn(collective, group.rank(), start), start + ANSWER_SECONDS):
                time.sleep(SHORTEST_TICK)
                if found := self.reports.find(collective, ANSWER_SECONDS):
                    return "; ".join(found.lines)
        answers, lines = self._find_out(mine, group, asked, ANSWER_SECONDS / 2, about=collective)
        if collective is not None:
            self._send_report(Report(collective, self.rank, report.title(mine), lines, True, False), answers)
        return "; ".join(lines)

    # -- past the deadline ---------------------------------------------------------------------------

    def _limit(self, each: UnderWay, seconds: float) -> float:
        """Return the limit of a call that has taken some seconds already: less if a rank of it has ended."""
        if seconds < ENDED_SECONDS or self.liveness.gone().isdisjoint(each.group.ranks):
            return each.timeout
        return min(each.timeout, ENDED_SECONDS)

    def _advance(self, each: UnderWay, now: float) -> None:
        """Take the next step for an overdue call: end it by another rank's report, or ask."""
        collective = Collective.of(each)
        if not each.is_due(now, self._limit(each, now - each.first_seen)):
            return
        if (found := self.reports.find(collective)) is not None:
            self._end_as_reported(each, found)
        elif now >= self.reports.turn(collective, each.group.rank(), each.since):
            each.state = State.ASKING
            try:
                self._report(each, now - each.first_seen, collective)
            except Exception as error:  # the call must still be ended
                self._note_failure(error)
                headline = report.headline(each.described(), each.timeout, now - each.first_seen >= each.timeout)
                self.end_call(each, f"{headline}; where the others are could not be found out")

    def _report(self, each: UnderWay, seconds: float, collective: Collective | None) -> None:
        """Ask for the others' positions, write and send the report, and end the wait."""
        group, mine = each.group, each.described()
        asked: Sequence[int] = group.ranks
        if mine["peer"] is not None and self.reports.was_swept(group.group_name):
            asked = [mine["peer"]]  # the others have written their traces already
        answers, lines = self._find_out(mine, group, asked, ANSWER_SECONDS, about=collective, dump=True)
        if each.has_ended() or each.state is State.ENDING:
            return  # it ended while the others were asked
        if self._limit(each, seconds) > seconds:  # the rank that was believed to have ended has answered
            each.state = State.RUNNING
            return
        asker = self.reports.asker(collective)
        if asker is not None and asker < self.rank:
            each.make_due(time.monotonic())
            return
        is_overdue = seconds >= each.timeout  # else a rank has ended
        headline = report.headline(mine, each.timeout, is_overdue)
        path = self.dump()
        reporter = None if collective is None else self.reports.reporter(collective.group, self.rank, answers)
        if reporter is None:
            folder = os.path.dirname(path) or "."
            reading = "" if path.startswith("nowhere ") else f"; all of them: torchfrtrace {folder}"
            text = "\n".join(f"  {line}" for line in [*lines, f"traces: {path}{reading}"])
            self.say(f"{headline}\n{text}")
        else:
            self.say(f"{headline}; see the report of rank {reporter}")
        if collective is not None:
            # whether ending the call here ends it on all ranks: by ULFM, or with the job
            ends_all = not each.backend.ends_waits and (not each.in_background or each.backend.faults.interrupts_all())
            source = self.rank if reporter is None else reporter
            self._send_report(Report(collective, source, report.title(mine), lines, is_overdue, ends_all), answers)
        self._end(each, f"{headline}: {'; '.join(lines)}", reporter is not None)

    def _find_out(
        self, mine: dict[str, Any], group: Group, asked: Sequence[int], seconds: float, **more: Any
    ) -> tuple[Answers, list[str]]:
        """Ask ranks of a group for their positions; return the answers, and the lines of a report."""
        answers = self.channel.ask(asked, "where", seconds, group=group.group_name, **more)
        return answers, report.compose(mine, self.rank, group.ranks, answers, judge_of(self.liveness, answers))

    def _send_report(self, made: Report, answers: Answers) -> None:
        if receivers := made.receivers(answers):
            self.channel.ask(receivers, "report", NEWS_SECONDS, report=made)

    def _take_report(self, message: Message) -> Message:
        """Store a report; one that ends the call for all ranks ends it here too, before the library does."""
        collective, *rest = message["report"]
        found = Report(Collective(*collective), *rest)
        is_known = self.reports.find(found.collective) == found  # a repetition, because the receipt was late
        self.reports.add(found)
        if is_known or not found.ends_all:
            return {}
        for each in self.under_way():
            others = each.call.is_message or each.limit is not None or each.group.group_name != found.collective.group
            # a rank whose call has raised continues with it, without the ranks of the report
            others = others or (each.call.name in REMAKING and found.collective.name not in REMAKING)
            if not others and each.state is not State.ENDING:
                self._end_as_reported(each, found)
        return {}

    def _end_as_reported(self, each: UnderWay, found: Report) -> None:
        """End a wait by another rank's report."""
        mine, is_same = each.described(), Collective.of(each) == found.collective
        headline = report.headline(mine, each.timeout, is_same and found.is_overdue)
        self.say(f"{headline}; see the report of rank {found.reporter}")
        lines = "; ".join(found.lines)
        if not is_same:
            lines = f"rank {found.reporter} gave {found.title} of {mine['label']} up: {lines}"
        self._end(each, f"{headline}: {lines}", True)

    def _end(self, each: UnderWay, reason: str, is_reported: bool) -> None:
        each.state, reason = State.ENDING, add_hint(reason, "call-timeout")
        if each.in_background:
            if end_in_background(each, reason, is_reported, self._attempt):
                self._given_up.append({**each.described(), "has_asker": False})
            return
        each.ways = end_blocked(each, reason, is_reported, self._attempt, partial(self.abort, each.backend))
        each.next_at = time.monotonic()
        self._escalate(each)

    def _escalate(self, each: UnderWay) -> None:
        """End a wait, by the next way whose time has come."""
        while time.monotonic() >= each.next_at:
            seconds = next(each.ways, math.inf)
            each.next_at = time.monotonic() + seconds

    def _attempt(self, action: Callable[..., Any], *arguments: Any) -> bool:
        """Take an action, and tell whether it took effect; if it raises, others follow."""
        try:
            return action(*arguments) is not False
        except Exception as error:
            self._note_failure(error)
            return False

    def abort(self, backend: Backend, reason: str) -> None:
        """Abort the job; every process of it ends, also if the launcher cannot end it."""
        try:
            self.announce_abort(reason)
        finally:
            backend.end_job(ABORT_STATUS)

    def announce_abort(self, reason: str, leaves: bool = False) -> bool:
        """Write why the job is aborted, and inform all its processes, which end by themselves if need be.

        ``leaves``: this process ends with its own status. Returns whether all of them have acknowledged.
        """
        self.say(reason)
        first_line, has_reached_all = reason.splitlines()[0], False
        if not self.job_end.is_known:  # otherwise the others know
            news = {"reason": first_line[:1000], "leaves": leaves}
            seconds = LAUNCHER_SECONDS if leaves else NEWS_SECONDS
            others = self.channel.others()
            answers = self.channel.ask(others.keys() - self.liveness.gone(), "abort", seconds, **news)
            has_reached_all = len(answers) == len(others) and not self.channel.left_out
        self.job_end.note(first_line, leaves)
        return has_reached_all

    def say(self, text: str) -> None:
        """Write to stderr, in one piece, if the launcher that forwards it still exists."""
        write_to_stderr(f"[rank {self.rank} of {logs.ORIGIN.size}] hpcdist: {printable(text)}\n")


RUNNING: list[Watchdog] = []  # the watchdog of this process: one, from its first group to its end
FORKING = threading.local()  # the signals that a forking thread had blocked before


def before_fork() -> None:
    """Block signals and the reading of frames while the child still has the parent's settings."""
    calls_under_way.LOOKING.acquire()  # the child lacks the thread that would release it
    FORKING.mask = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)


def after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, FORKING.mask)
    calls_under_way.LOOKING.release()


def leave_to_parent() -> None:
    """After a fork, in the child: it is not a rank, and has no watchdog."""
    try:
        hooks.explain = hooks.nothing
        hooks.compare_calls = hooks.nothing
        for watchdog in RUNNING:
            watchdog.leave_to_parent()
        RUNNING.clear()
    finally:
        after_fork()


os.register_at_fork(before=before_fork, after_in_parent=after_fork, after_in_child=leave_to_parent)


def watch(group: Group) -> Watchdog:
    """Start the watch over a default group's calls; every rank of it calls this.

    One collective on the group exchanges the endpoints.
    """
    rank = group.ranks[group.rank()]
    logs.ORIGIN.rank, logs.ORIGIN.size = rank, group.size()
    watchdog = RUNNING[0] if RUNNING else Watchdog("", rank)
    group.journal.follow()  # use the ring of the recorder and the log
    watchdog.channel.rank = rank
    own, secret = watchdog.channel.own, os.environ.get(SECRET_VARIABLE)
    mine = (tuple(own), secrets.token_hex(8), key_of(secret) if secret else "")
    all_ranks = [mine]
    if group.size() > 1:
        all_ranks = group.any_backend().objects.all_gather(mine, call="init_process_group")
        watchdog.channel.learn(group.ranks, [endpoint for endpoint, _, _ in all_ranks])
    _, watchdog.recorder.name, user_key = all_ranks[0]
    watchdog.channel.keys = [each for each in (own.key, user_key) if each]
    if rank == 0 and secret and not RUNNING:
        watchdog.say(f"python -m hpcdist debug {own.host}:{own.port}")
    if not RUNNING:
        watchdog.start()
        RUNNING.append(watchdog)
    watchdog.signals.install()  # unless another thread makes the group; the main thread may make the next one
    hooks.explain = watchdog.explain
    extra = {"group": group.group_name}
    logs.LOG.info("default group of %d ranks, %s", group.size(), group.config, extra=extra)
    return watchdog
