"""Bound of a meeting: the processes of an elastic job wait in MPI for all that live, and not all of them may come.

Nothing takes a process out of MPI_Comm_shrink or MPI_Comm_agree. So what keeps them from ending is ended: a process of
this node that is stopped is killed, whereupon MPI goes on without it. The job is aborted for a process that has ended
and that MPI does not count as dead (``os._exit`` with a status, under Open MPI), for one that has left the program, and
for one that is late by more than the timeout.
"""

from __future__ import annotations

from hpcdist.core.backend import Backend
from hpcdist.watch.liveness import Liveness

STOPPED_SECONDS = 5.0  # how long a stopped process is waited for
UNKNOWN_SECONDS = 10.0  # how long MPI may take to count a process as dead that has ended


class Meeting:
    """One wait for all living processes of the job, which share a communicator.

    It is one of so many processes fewer (``lost``) than the job was started with.
    """

    def __init__(self, liveness: Liveness, backend: Backend, limit: float, since: float, lost: int) -> None:
        self.liveness, self.backend, self.limit, self.since, self.lost = liveness, backend, limit, since, lost

    def look(self, now: float) -> str:
        """Kill what is stopped if it is time to, and return why the job is to be aborted, or nothing."""
        seconds = now - self.since
        if seconds >= STOPPED_SECONDS:
            self.liveness.kill_stopped()
        if any(each.process in self.liveness.left for each in self.liveness.channel.everyone()):
            return "a rank has left the program while others wait for it in a meeting; the job is aborted"
        if seconds >= UNKNOWN_SECONDS:
            gone = [each for each in self.liveness.channel.everyone() if self.liveness.has_ended(each)]
            if len(gone) > self.lost + len(self.backend.faults.failed()):
                which = ", ".join(f"process {each.pid} on {each.host}" for each in gone)
                return f"a process has ended that MPI does not count as dead (of {which}); the job is aborted"
        if seconds >= self.limit:
            return f"not all processes of the job have come to its meeting after {seconds:.0f} s; it is aborted"
        return ""
