"""Communicators of destroyed groups: each is freed only when many others have been destroyed after it.

MPI gives a new communicator the context of one that was freed. If a rank freed one at once, while another may still
send on it, a receive on the new one would match such a message; Open MPI, which numbers messages, would also hold back
the first message that is sent on the new one. Memory that MPI may still read or write for a message under way is kept
until the message has ended.

A non-blocking barrier (MPI_Ibarrier) would tell when all ranks have destroyed their group. But if a rank never does,
it is still pending in MPI_Finalize, which need not allow that.
"""

from __future__ import annotations

from collections import deque

from mpi4py import MPI

from hpcdist.core.work import Unfinished

KEPT = 64  # communicators; MPICH has 2,048 in all
PROBES = 10  # one may not see all messages that have come; each takes 0.2 µs
RETIRED: deque[tuple[Unfinished, MPI.Intracomm | None]] = deque()


def retire(comm: MPI.Intracomm, unfinished: Unfinished) -> None:
    """Free a communicator later, when its messages have ended; now free those that were retired long before."""
    RETIRED.append((unfinished, comm))
    for _ in range(len(RETIRED) - KEPT):
        earlier = RETIRED.popleft()
        if not free(*earlier):
            RETIRED.append(earlier)


def keep(unfinished: Unfinished) -> None:
    """Keep the memory of the messages under way of a communicator that is not freed, until they have ended."""
    if unfinished:
        RETIRED.append((unfinished, None))


def free(unfinished: Unfinished, comm: MPI.Intracomm | None) -> bool:
    """Free a communicator if none of its messages is under way; tell whether it needs no further attempt.

    One with unreceived messages stays: otherwise the next communicator would get its context and them.
    """
    for work in list(unfinished):
        work.is_completed()  # which releases it
    if unfinished:
        return False
    if comm is not None:
        try:
            has_messages = any(comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG) for _ in range(PROBES))
        except MPI.Exception:  # it is revoked, or a rank has died
            has_messages = False
        if not has_messages:
            comm.Free()
    return True
