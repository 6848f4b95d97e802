"""Network between nodes of one rank: its kind, which decides who carries out their large collectives.

hpcdist's own collectives send the fewest bytes and keep every cable busy, but take more of the processors' time than
MPI's. If cables of 1 Gbit/s set the pace, they take half of MPI's time; if the processors do, up to 2.5 times of it
(docs/explanation/performance.md). So before its first large collective a group whose nodes have no card for RDMA sends
2 to 6 MiB around a ring. A process measures once, and its other groups take over what it knows, because groups that
reduce the same values should get the same bits.
"""

from __future__ import annotations

import time
from array import array

from mpi4py import MPI

from hpcdist.backends.mpi.datatypes import BYTE
from hpcdist.backends.mpi.node.messages import SHORT, TAG
from hpcdist.backends.mpi.node.places import Places
from hpcdist.backends.mpi.node.thresholds import MOST_NODES, Network
from hpcdist.backends.mpi.process import ulfm

# Bytes a second. 4 virtual hosts on 2 cores reach 500 to 1,100 MB/s if nothing limits them, 330 beside other work
FAST = 300e6
MESSAGES = 37  # of a trial: 2 MiB, so that the burst that a shaper lets pass (256 KiB) hardly counts
TRIALS = 3  # the best one counts: other work on the processors can only make a trial slower
KNOWN: list[Network] = []  # what this process has found, once
NOBODY_KNOWS = max(Network) + 1  # the slowest kind that a rank knows holds


def between(places: Places, made: list[MPI.Comm]) -> Network:
    """Return the kind of network between a group's nodes, the same on all ranks; every rank calls.

    Args:
        places: where the group's ranks are.
        made: takes the communicator on which this may block, so that it can be revoked.
    """
    if not places.is_flat or not 1 < places.nodes <= MOST_NODES:
        return Network.UNKNOWN
    if places.has_rdma:
        return Network.RDMA
    known = KNOWN[0] if KNOWN else NOBODY_KNOWS
    if ulfm.is_tolerant():  # which revokes hpcdist's own collectives at once, a large blocking one of MPI not always
        known = Network.SLOW
    agreed = array("i", [known])
    places.comm.Allreduce(MPI.IN_PLACE, agreed, MPI.MIN)
    if agreed[0] == NOBODY_KNOWS:
        agreed[0] = Network.FAST if speed(places.comm, made) >= FAST else Network.SLOW
    KNOWN[:] = [Network(agreed[0])]
    return KNOWN[0]


def speed(comm: MPI.Intracomm, made: list[MPI.Comm]) -> float:
    """Return the bytes that each rank sends in a second while all send to the next one; every rank calls.

    The ranks get the same figure, that of the slowest of them in the best trial.
    """
    comm = MPI.Intracomm(comm.Dup())
    made.append(comm)
    following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent, received = bytearray(SHORT.message), bytearray(SHORT.message)

    def seconds(messages: int) -> float:
        begun = time.perf_counter()
        for _ in range(messages):
            comm.Sendrecv((sent, BYTE), following, TAG, (received, BYTE), before, TAG)
        slowest = array("d", [time.perf_counter() - begun])
        comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
        return slowest[0]

    seconds(1)  # which connects the ranks
    nbytes, best = MESSAGES * SHORT.message, 0.0
    for _ in range(TRIALS):
        best = max(best, nbytes / seconds(MESSAGES))
        if best >= FAST:
            break
    made.remove(comm)
    comm.Free()
    return best
