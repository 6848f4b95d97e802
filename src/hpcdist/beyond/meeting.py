"""Bound of a meeting: the processes of an elastic job wait in MPI for all that live, and not all of them may come.

Nothing takes a process out of MPI_Comm_shrink or MPI_Comm_agree. So what keeps them from ending is ended: a process of
this node that is stopped is killed, whereupon MPI goes on without it. The job is aborted for a process that has ended
and that MPI does not count as dead (``os._exit`` with a status, under Open MPI), for one that has left the program, and
for one that is late by more than the timeout.
"""

from __future__ import annotations

import time

from hpcdist.core.backend import Backend
from hpcdist.watch.watchdog import Watchdog

STOPPED_SECONDS = 5.0  # how long a stopped process is waited for
UNKNOWN_SECONDS = 10.0  # how long MPI may take to count a process as dead that has ended


class Bound:
    """One wait for all living processes of the job, which begins now; the watchdog calls it each second.

    Args:
        watchdog: this process's.
        backend: the communicator of all of them.
        limit: the seconds that they have to come.
    """

    def __init__(self, watchdog: Watchdog, backend: Backend, limit: float) -> None:
        self._watchdog, self._backend, self._limit = watchdog, backend, limit
        self._began = time.monotonic()

    def __call__(self) -> None:
        """Kill what is stopped if it is time to, and abort the job if the wait cannot end."""
        liveness, seconds = self._watchdog.liveness, time.monotonic() - self._began
        if seconds >= STOPPED_SECONDS:
            liveness.kill_stopped()
        gone = liveness.ended_ranks()
        if any(each.process in liveness.left for each in liveness.channel.everyone()):
            reason = "a rank has left the program while others wait for it in a meeting; the job is aborted"
        elif seconds >= UNKNOWN_SECONDS and len(gone) > len(self._backend.failed()):
            reason = f"a process has ended that MPI does not count as dead (one of ranks {gone}); the job is aborted"
        elif seconds >= self._limit:
            reason = f"not all processes of the job have come to its meeting after {seconds:.0f} s; it is aborted"
        else:
            return
        self._watchdog.abort(self._backend, reason)
