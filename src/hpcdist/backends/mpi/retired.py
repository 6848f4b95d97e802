"""Communicators of destroyed groups: each is freed once all of its ranks have destroyed their group.

MPI gives a new communicator the context of one that was freed. If a rank freed one while another may still send on it,
such a message would meet the new one, whose receive takes it; Open MPI, which numbers messages, also holds back the
first message that is sent on the new one. So a rank that destroys a group enters a barrier that it does not wait for,
and frees the communicator after that has ended, when it destroys another group.
"""

from __future__ import annotations

from collections import deque

from mpi4py import MPI

PROBES = 10  # one may not see all that has come; each takes 0.2 µs
RETIRED: deque[tuple[MPI.Request, MPI.Intracomm]] = deque()


def retire(comm: MPI.Intracomm) -> None:
    """Free a communicator as soon as all of its ranks have called this, and those retired before if they have."""
    for _ in range(len(RETIRED)):
        request, earlier = RETIRED.popleft()
        if not free(request, earlier):
            RETIRED.append((request, earlier))
    try:
        RETIRED.append((comm.Ibarrier(), comm))
    except MPI.Exception:  # it is revoked
        comm.Free()


def free(request: MPI.Request, comm: MPI.Intracomm) -> bool:
    """Free a communicator if all of its ranks have retired it; tell whether nothing is left to do.

    One with messages that nobody has received stays: its context would be given to the next one with them.
    """
    try:
        if not request.Test():
            return False
        has_messages = any(comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG) for _ in range(PROBES))
    except MPI.Exception:  # a rank has died
        return True
    if not has_messages:
        comm.Free()
    return True
