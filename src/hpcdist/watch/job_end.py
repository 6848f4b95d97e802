"""End of an aborted job: every process of it exits, also if the launcher cannot end them.

MPI_Abort relies on the launcher, which may be out of reach (a lost link) or leave ranks behind (Open MPI 5.0.11 under
ULFM). So the rank that aborts sends all others a message first. Each then kills the processes of its node that are
stopped, which could not exit by themselves, and exits after a while. A rank whose launcher has ended exits as well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from hpcdist.launch import environment
from hpcdist.watch.liveness import Liveness

LAUNCHER_SECONDS = 4.0  # how long the launcher has to end this process after an abort; a stuck MPI_Abort takes 3
ORPHAN_SECONDS = 2.0  # how long a rank may live on after its launcher
END_SECONDS = 15.0  # how long a process may take that ends with its own status; Python and torch take 0.2
ABORT_STATUS = 1


class JobEnd:
    """Whether this process is to exit, and when."""

    def __init__(self, liveness: Liveness, say: Callable[[str], None]) -> None:
        self._liveness, self._say = liveness, say
        launch = environment.detect()
        self._launcher = os.getppid() if launch is not None and launch.starts_mpi else 0
        self._exits: tuple[float, str] | None = None  # when this process exits, and why

    @property
    def is_known(self) -> bool:
        """Whether this process knows that the job is to end."""
        return self._exits is not None

    def note(self, reason: str, seconds: float = LAUNCHER_SECONDS) -> None:
        """Take note that the job is aborted, and that the launcher has some seconds to end this process."""
        if self._exits is None:
            self._exits = time.monotonic() + seconds, reason
            self._liveness.kill_stopped()

    def look(self, now: float) -> None:
        """Exit if it is time to."""
        if self._exits is None and self._launcher and os.getppid() != self._launcher:
            self._exits = now + ORPHAN_SECONDS, f"the launcher (process {self._launcher}) has ended"
        if self._exits is not None and now >= self._exits[0]:
            self._say(f"{self._exits[1]}, and this process exits")
            os._exit(ABORT_STATUS)
