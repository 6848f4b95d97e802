"""Communicators of destroyed groups: each is freed once all of its ranks have destroyed their group.

MPI gives a new communicator the context of one that was freed. If a rank freed one while another may still send on it,
such a message would meet the new one, whose receive takes it; Open MPI, which numbers messages, also holds back the
first message that is sent on the new one. So a rank that destroys a group enters a barrier that it does not wait for,
and frees the communicator after that has ended, when it destroys another group. Memory that MPI may still read or write
for a message under way is kept until then.
"""

from __future__ import annotations

from collections import deque

from mpi4py import MPI

from hpcdist.core.supervised import Unfinished

PROBES = 10  # one may not see all that has come; each takes 0.2 µs
RETIRED: deque[tuple[Unfinished, MPI.Intracomm | None, MPI.Request]] = deque()


def retire(comm: MPI.Intracomm, unfinished: Unfinished) -> None:
    """Free a communicator as soon as all of its ranks have called this and its messages have ended.

    Those that were retired before are freed now, if they can be.
    """
    for _ in range(len(RETIRED)):
        earlier = RETIRED.popleft()
        if not free(*earlier):
            RETIRED.append(earlier)
    try:
        RETIRED.append((unfinished, comm, comm.Ibarrier()))
    except MPI.Exception:  # it is revoked
        comm.Free()
        keep(unfinished)


def keep(unfinished: Unfinished) -> None:
    """Keep the memory of the messages under way of a communicator that is not freed, until they have ended."""
    if unfinished:
        RETIRED.append((unfinished, None, MPI.REQUEST_NULL))


def free(unfinished: Unfinished, comm: MPI.Intracomm | None, request: MPI.Request) -> bool:
    """Free a communicator if nothing comes on it any more; tell whether nothing is left to do.

    One with messages that nobody has received stays: its context would be given to the next one with them.
    """
    for work in list(unfinished):
        work.is_completed()  # which lets go of it
    if unfinished:
        return False
    if comm is None:
        return True
    try:
        if not request.Test():
            return False
        has_messages = any(comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG) for _ in range(PROBES))
    except MPI.Exception:  # a rank has died
        return True
    if not has_messages:
        comm.Free()
    return True
