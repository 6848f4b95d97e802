"""End of an aborted job: every process of it exits, also if the launcher cannot end them.

MPI_Abort relies on the launcher, which may be unreachable (a lost link) or may not end all ranks (Open MPI 5.0.11 under
ULFM). So the rank that aborts sends all others a message first. Each then kills the stopped processes of its node,
which could not exit by themselves, and exits after a while. A rank whose launcher has ended exits as well.

A rank that exits while others wait for it ends with its own status, which is the job's if the others end in a way that
does not replace it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from hpcdist.core.backend import Backend
from hpcdist.core.waiting import wait_until
from hpcdist.core.world import WORLD
from hpcdist.launch import environment
from hpcdist.launch.pmi import ABORT_STATUS, leave_hydra
from hpcdist.watch.liveness import Liveness

LAUNCHER_SECONDS = 4.0  # seconds that the launcher has to end this process after an abort; a blocked MPI_Abort takes 3
ORPHAN_SECONDS = 2.0  # seconds that a rank may live after its launcher
END_SECONDS = 15.0  # seconds for a process that ends with its own status; Python and torch take 0.2
STOPPED_SECONDS = 5.0  # seconds that a meeting waits for a stopped process
UNKNOWN_SECONDS = 10.0  # seconds until MPI counts an ended process as dead


class JobEnd:
    """Whether and when this process must exit."""

    def __init__(self, liveness: Liveness, say: Callable[[str], None]) -> None:
        self._liveness, self._say = liveness, say
        launch = environment.detect()
        self._launcher = os.getppid() if launch is not None and launch.starts_mpi else 0
        self._exits: tuple[float, str] | None = None  # the time when this process exits, and the reason
        self._hides_status = False  # whether its status must not become the job's

    @property
    def is_known(self) -> bool:
        return self._exits is not None

    def note(self, reason: str, leaves: bool = False) -> None:
        """Record that the job is aborted, or a rank ``leaves`` it; this process has some seconds to be ended."""
        if self._exits is None:
            self._exits = time.monotonic() + (END_SECONDS if leaves else LAUNCHER_SECONDS), reason
            self._hides_status = leaves
            self._liveness.kill_stopped()

    def note_message(self, reason: str, leaves: bool) -> None:
        self.note(reason, leaves)
        if leaves and leave_hydra():  # then it does not end this process
            self._exits = time.monotonic(), ""

    def look(self, now: float) -> None:
        if self._exits is None and self._launcher and os.getppid() != self._launcher:
            self._exits = now + ORPHAN_SECONDS, f"the launcher (process {self._launcher}) has ended"
        if self._exits is None or now < self._exits[0]:
            return
        if self._exits[1]:
            self._say(f"{self._exits[1]}, and this process exits")
        self._exit()

    def exit_if_known(self) -> None:
        """Exit if the job is aborted: the processes for which this rank waits at its exit are killed."""
        if self.is_known:
            self._exit()

    def let_leave(self) -> bool:
        """Wait for the processes that end with their own status, and return whether this one must abort the job.

        Under ULFM mpirun returns the last status with which a process exits itself, after an abort too: 0 at times.
        """
        default = WORLD.default
        if not self._hides_status or default is None or not default.backends:
            return False
        if not default.any_backend().faults.interrupts_all():
            return False
        leaving = [each for each in self._liveness.channel.endpoints.values() if each.process in self._liveness.left]
        wait_until(lambda: all(map(self._liveness.has_ended, leaving)), END_SECONDS)
        return True

    def _exit(self) -> None:
        with suppress(Exception):  # it is None, closed or broken
            sys.stdout.flush()
        if self.let_leave() and WORLD.default is not None:
            WORLD.default.any_backend().end_job(ABORT_STATUS)
        os._exit(ABORT_STATUS)


class Meeting:
    """One wait of an elastic job's process for all others that live.

    It cannot leave MPI_Comm_shrink or MPI_Comm_agree. So the cause of a wait is removed: a stopped process of this node
    is killed, and MPI continues without it. The job is aborted for a process that has ended and that MPI does not count
    as dead (``os._exit`` with a status, under Open MPI), for one that has exited the program, and for one that is late
    by more than the timeout.
    """

    def __init__(self, backend: Backend, limit: float, since: float, lost: int) -> None:
        self.backend, self._limit, self._since = backend, limit, since  # of all of them
        self._lost = lost  # the number of processes lost since the start

    def find_reason(self, liveness: Liveness, now: float) -> str:
        """Kill stopped processes after a while, and return why the job must be aborted, or an empty text."""
        seconds, others = now - self._since, liveness.channel.others().values()
        if seconds >= STOPPED_SECONDS:
            liveness.kill_stopped()
        if any(each.process in liveness.left for each in others):
            return "a rank has left the program while others wait for it in a meeting; the job is aborted"
        if seconds >= UNKNOWN_SECONDS:
            gone = [each for each in others if liveness.has_ended(each)]
            if len(gone) > self._lost + len(self.backend.faults.failed()):
                which = ", ".join(map(str, gone))
                return f"a process has ended that MPI does not count as dead (of {which}); the job is aborted"
        if seconds >= self._limit:
            return (
                f"not all processes of the job have come to its meeting after {seconds:.0f} s, and it is aborted; "
                "expected the same numbers in steps() on all ranks, stop() in the same step, and steps that end within "
                "the timeout"
            )
        return ""
