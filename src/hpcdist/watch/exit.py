"""Exit of a rank: it waits until every rank exits, and aborts the job if that is impossible.

MPI_Finalize waits for every rank. A rank that ends without ``destroy_process_group`` while the others are in a
collective would wait in it forever, and they for it. So a rank that exits begins the exit barrier, a non-blocking one,
and until all have come asks the others for their calls. If one is in a call that cannot end without this rank, the
process ends without MPI_Finalize and with its own status, so that the launcher ends the others; they also get a
message, and end by themselves if the launcher does not end them. If a process has ended before the barrier, that may
never end: then this rank exits when all others have ended or answered that they exit. It waits until the timeout for a
process that is stopped or does not answer. A forked child is not a rank, and exits at once.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from contextlib import suppress
from enum import Enum
from fcntl import ioctl
from termios import TIOCOUTQ
from typing import Any, NamedTuple

from hpcdist.core import hooks, shutdown
from hpcdist.core.backend import Backend
from hpcdist.core.errors import CallsDifferError, DistBackendError, run_hook
from hpcdist.core.group import BEGUN_SECONDS
from hpcdist.core.journal import Blocked, CallRecord, made_on
from hpcdist.core.printing import add_hint
from hpcdist.core.waiting import wait_until
from hpcdist.core.world import WORLD
from hpcdist.launch.pmi import leave_hydra
from hpcdist.watch import report
from hpcdist.watch.calls_under_way import DESTROY, LOOKING, MAKING, REMAKING
from hpcdist.watch.job_end import END_SECONDS
from hpcdist.watch.watchdog import RUNNING, Watchdog

FIRST_ASK, LONGEST_PAUSE = 0.2, 5.0  # seconds
LACKING_PAUSE = 1.0  # the longest pause if a process has ended, or may be stuck: a busy node misses an answer or two
LONGEST_NAP = 0.02
ANSWER_SECONDS = 0.5
# seconds until sent messages have arrived, since the kernel held the last bytes of them: MPI completes a send when it
# has buffered it, up to 10 MB
ARRIVAL_SECONDS = 5.0
ASKED_AT_ONCE = 64  # ranks asked at a time: otherwise N ranks that wait for a late one would ask N²
COLLECTION_SECONDS = 1.0  # seconds to wait for another thread's collection
CALL_SECONDS = 0.5  # seconds that another thread's last call may take, after every rank has come to the exit
QUEUE_SECONDS = 1.0  # seconds that a worker thread which was given up may still take


class Decision(Enum):
    """The next step of a rank that exits."""

    WAIT = "wait"
    LEAVE = "leave without the others"
    END = "end the job with this process's own status: the others wait for it"
    ABORT = "abort the job"


class Look(NamedTuple):
    """The state of the other ranks at one moment, for a rank that exits."""

    waits: dict[tuple[int, str, int], str]  # calls that cannot end without this rank, by rank, group and number
    stuck: list[str]  # processes that are stopped, or do not answer, and have not come to the exit, as text
    lacks_one: bool  # whether a process has ended, or MPI knows that one died
    others_stay: bool  # whether another rank has neither ended nor come to the exit


class ExitStates:
    """State machine of a rank that exits; its inputs are the time and a ``Look``."""

    def __init__(self, limit: float, now: float) -> None:
        self.limit = limit  # the seconds to wait for stuck processes
        self.pause = FIRST_ASK  # seconds to the next look
        self.reason = ""  # why the job must be aborted
        self.last = Look({}, [], False, True)
        self._moved = now  # the last time without a stuck process, or the first with one

    def decide(self, look: Look, now: float) -> Decision:
        if lasting := [text for key, text in look.waits.items() if key in self.last.waits]:
            self.reason = "\n  ".join(["this rank has left the program, and the job is aborted:", *lasting])
            return Decision.END
        if not look.stuck or not self.last.stuck:
            self._moved = now
        elif now - self._moved >= self.limit:
            self.reason = f"{'; '.join(look.stuck)}: the job cannot end, and is aborted"
            return Decision.ABORT
        if look.lacks_one and self.last.lacks_one and not look.others_stay:  # unless it ended just now, with all others
            return Decision.LEAVE
        self.last = look
        longest = LACKING_PAUSE if look.lacks_one or look.stuck else LONGEST_PAUSE
        self.pause = min(longest, self.pause * (1 if look.waits else 2))
        return Decision.WAIT


class ProcessExit:
    """The exit of this process."""

    def __init__(self) -> None:
        self.backend: Backend | None = None  # the last default group's
        self.limit = 0.0  # its timeout, in seconds
        self._is_registered = False  # also in a forked child, which inherits the registration

    def register(self) -> None:
        """Let Python call ``leave`` and ``on_exception``."""
        if not self._is_registered:
            self._is_registered = True
            shutdown.register(shutdown.Stage.JOB, self.leave)
            self.hook, sys.excepthook = sys.excepthook, self.on_exception

    def leave(self) -> None:
        """Exit with all ranks; an exception of a signal meanwhile aborts the job, like one of the program."""
        try:
            self._leave()
        except BaseException:  # MPI_Finalize would wait for the others, and they for this rank
            sys.excepthook(*sys.exc_info())

    def _leave(self) -> None:
        """End the queues, and wait until every rank exits; abort the job if one waits for this rank."""
        watchdog = RUNNING[0] if RUNNING else None
        if watchdog is None or self.backend is None:
            return
        watchdog.leaving = True
        if is_stuck():
            watchdog.abort(self.backend, "leaving with a call that never ended; the job is aborted")
        failure = None
        for backend in WORLD.backends():
            if backend.queue is not None:
                try:
                    backend.queue.close()
                except CallsDifferError as error:
                    failure = failure or str(error)
        watchdog.has_left = True
        membership = self.backend.membership
        if membership is None or (everyone_leaves := membership.exit_barrier()) is None:
            return
        states, observer = ExitStates(self.limit, watchdog.clock()), Observer(watchdog, self.backend)
        while not wait_until(everyone_leaves, states.pause, longest=LONGEST_NAP):
            look = observer.look(states)
            decision = states.decide(look, watchdog.clock())
            if decision in (Decision.ABORT, Decision.END):
                watchdog.dump()
                if decision is Decision.ABORT:
                    watchdog.abort(self.backend, states.reason)
                if watchdog.announce_abort(states.reason, leaves=True):
                    leave_hydra()  # all others have come to the exit, and end by themselves
                membership.skip_finalize(END_SECONDS)
                return
            if decision is Decision.LEAVE:
                watchdog.job_end.exit_if_known()
                observer.release_others()
                membership.skip_finalize()
                return
        watchdog.job_end.exit_if_known()
        if (failure := failure or difference()) is not None:
            watchdog.abort(self.backend, failure)
        WORLD.end()
        if last_call() is not None and self.backend.faults.interrupts_all():
            for group in WORLD.watched():  # under ULFM the ranks that finalize would wait for this one
                group.revoke("this process ends")
        if (last := last_call()) is not None:
            why = "this process ends without MPI_Finalize, which could crash under it"
            watchdog.say(add_hint(f"a thread is still in {last.name}: {why}", "thread-at-exit"))
        if not membership.all_finalize(last is None):
            leave_hydra()
            membership.skip_finalize(ends_well=True)

    def on_exception(self, *exception: Any) -> None:
        """Write a trace, then call the previous hook for uncaught exceptions."""
        if RUNNING:
            RUNNING[0].dump()
            RUNNING[0].job_end.let_leave()
        run_hook(self.hook, *exception)

    hook = staticmethod(sys.__excepthook__)


class Observer:
    """Observes the other ranks of the job, for a rank that exits."""

    def __init__(self, watchdog: Watchdog, backend: Backend) -> None:
        self.channel, self.liveness, self.me, self.backend = watchdog.channel, watchdog.liveness, watchdog.rank, backend
        self.asked = 0  # the number of ranks asked so far, in turn
        self.sent = time.monotonic()  # the last time when messages of this rank were known to be under way

    def look(self, states: ExitStates) -> Look:
        """Ask the others, including ranks that the world was shrunk by, and return their state."""
        channel, liveness = self.channel, self.liveness
        now, own = time.monotonic(), channel.own.process
        if has_unsent_bytes():
            self.sent = now
        may_arrive = now - self.sent < ARRIVAL_SECONDS
        asked = {rank: channel.endpoints[rank] for rank in self._asked(states)}
        asked |= {number: each for number, each in channel.left_out.items() if each.process not in liveness.left}
        answers = channel.ask(asked, "where", ANSWER_SECONDS, group="", left=own)
        waits = {
            (rank, call["group"], call["number"]): (
                f"rank {rank} waits for it in {report.title(call)} on {call['label']}, {call['where']}"
            )
            for rank, answer in answers.items()
            for call in answer["calls"]
            if rank >= 0 and call["has_asker"] and needs(call, self.me, may_arrive)
        }
        stopped, gone = liveness.stopped(), liveness.gone()
        stuck = [f"{each} is stopped" for each in stopped]
        liveness.left.update(asked[number].process for number, answer in answers.items() if answer["left"])
        silent = [each for number, each in asked.items() if number not in answers and number not in gone]
        # without an answer from other nodes nothing is known: UDP may be blocked between the nodes
        silent = [each for each in silent if (channel.has_answer or channel.sees(each)) and each not in stopped]
        stuck += [f"{each} does not answer" for each in silent]
        return Look(waits, stuck, bool(gone) or self.backend.faults.knows_death(), bool(self._others()))

    def _others(self) -> list[int]:
        """Return the other ranks that have neither ended nor come to the exit, those after this one first."""
        left = self.channel.endpoints.of_processes(self.liveness.left)
        staying = self.channel.endpoints.keys() - self.liveness.gone() - left - {self.me}
        return sorted(staying, key=lambda rank: (rank < self.me, rank))

    def _asked(self, states: ExitStates) -> list[int]:
        """Return the ranks to ask now: some in turn; or all, on the lowest rank after one has ended.

        Without the ended rank the exit barrier may not end. So the lowest rank finds that all exit, and informs them.
        """
        others = self._others()
        if len(others) <= ASKED_AT_ONCE or (states.last.lacks_one and self.liveness.living()[0] == self.me):
            return others
        start = self.asked % len(others)
        self.asked += ASKED_AT_ONCE
        turn = [*others, *others][start : start + ASKED_AT_ONCE]
        return list({*turn, *(rank for rank, _, _ in states.last.waits)})

    def release_others(self) -> None:
        """Inform the other ranks that all exit, if there are too many for each to ask all."""
        living = self.liveness.living()
        if len(living) > ASKED_AT_ONCE + 1 and living[0] == self.me:
            self.channel.ask(living, "all leave", ANSWER_SECONDS)


EXIT = ProcessExit()


def end_collections() -> None:
    """Disable the garbage collector, after a collection of another thread has ended.

    The watchdog's thread runs while Python ends. If it collects a tensor then, torch waits for the GIL in a destructor,
    Python ends the thread there, and the process is aborted ("terminate called without an active exception"): 2 of 256
    processes, with 64 ranks on 2 cores.
    """
    if not RUNNING:
        return
    with LOOKING:  # a reader of frames would enable it again
        gc.disable()
    begun: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        begun.append(phase)

    gc.callbacks.append(note)

    def has_begun() -> bool:
        gc.collect(0)  # it does nothing while another thread collects
        return bool(begun)

    wait_until(has_begun, COLLECTION_SECONDS)
    gc.callbacks.remove(note)


def end_threads() -> None:
    """Refuse further calls, and end the threads of torch's own backends while they can still take the GIL.

    gloo's threads release a call's tensors a moment after the call has returned, and need the GIL for it. If Python has
    begun to end by then, it ends the thread in a destructor, and the process is aborted ("terminate called without an
    active exception"): 1 of 100 processes, with 8 ranks on 2 cores.
    """
    if not RUNNING:  # no group was made here: a forked child's groups and threads are its parent's
        return
    if not hooks.is_ending:  # otherwise ``leave`` has waited
        WORLD.end()
        last_call()  # waits for a call that is about to end
    WORLD.end_threads()


def release_signals() -> None:
    for watchdog in RUNNING:
        watchdog.signals.release()


shutdown.register(shutdown.Stage.THREADS, end_threads)
shutdown.register(shutdown.Stage.COLLECTIONS, end_collections)
shutdown.register(shutdown.Stage.SIGNALS, release_signals)


def last_call() -> CallRecord | None:
    """Return a call of another thread of this process that does not end in time, or None.

    A daemon thread continues while Python ends, until it must wait for the GIL.
    """

    def blocked() -> list[Blocked]:
        return [each for group in WORLD.watched() for each in group.journal.blocked()]

    time.sleep(BEGUN_SECONDS)
    wait_until(lambda: not blocked(), CALL_SECONDS)
    return next((CallRecord(*each.call) for each in blocked()), None)


def difference() -> str | None:
    """Return a difference between the ranks' calls that no call has raised yet; every rank exits.

    While there are daemon threads of the program, this rank may not have made its last call.
    """
    found = None
    if any(each.daemon and not each.name.startswith("hpcdist") for each in threading.enumerate()):
        return None
    for backend in WORLD.backends():
        try:
            backend.leave()
        except CallsDifferError as error:
            found = found or str(error)
        except DistBackendError:  # a rank has died
            pass
    return found


def has_unsent_bytes() -> bool:
    """Tell whether the kernel holds bytes that this process has sent and a socket's other side has not acknowledged."""
    count = bytearray(4)
    descriptors: list[str] = []
    with suppress(OSError):  # there is no /proc, or no descriptor left
        descriptors = os.listdir("/proc/self/fd")
    for each in descriptors:
        with suppress(OSError):  # it was closed meanwhile, or listens
            if os.readlink(f"/proc/self/fd/{each}").startswith("socket:"):
                ioctl(int(each), TIOCOUTQ, count)
                if any(count):
                    return True
    return False


def is_stuck() -> bool:
    """Tell whether a worker thread that was given up is still in its call."""
    queues = [each.queue for each in WORLD.backends() if each.queue is not None and each.queue.broken is not None]
    return not wait_until(lambda: all(queue.running is None for queue in queues), QUEUE_SECONDS)


def needs(call: dict[str, Any], me: int, may_arrive: bool = False) -> bool:
    """Tell whether another rank's call cannot end, now that this rank makes no more calls.

    ``may_arrive`` says whether messages that this rank has sent may still be under way.
    """
    group = WORLD.groups.get(call["group"])
    if call["name"] == MAKING:  # if this rank has made any such group it may have finished that one
        return not any(each.name == MAKING for each in made_on(call["group"]))
    if call["message"]:
        may_come = may_arrive and "recv" in call["name"]
        return call["peer"] == me and not (may_come and any("send" in each.name for each in made_on(call["group"])))
    if call["name"] in REMAKING:
        return False  # an excluded rank may exit while the others are still in the call
    if group is not None:
        return bool(call["number"] > group.journal.sequence)
    # this rank has destroyed it, which was its last call there; it has taken part in all earlier ones
    last = next((each.number for each in reversed(made_on(call["group"])) if not each.is_message), 0)
    return call["name"] != DESTROY and bool(call["number"] >= last)
