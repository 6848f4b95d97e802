"""Places of a group's ranks: which of them share a node, and so its memory."""

from __future__ import annotations

import os
from typing import NamedTuple

from mpi4py import MPI

from hpcdist.core.ranks import ranks_by_value
from hpcdist.launch.environment import NODE_KEY


class Places(NamedTuple):
    """The nodes of a group's ranks; the same on all ranks, except for this rank's own values."""

    comm: MPI.Intracomm  # the group's
    node: MPI.Intracomm  # of this rank's node, in the group's order
    ranks: list[list[int]]  # the group's by node; nodes in the order of their first ranks
    here: int  # the index of this rank's node

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.ranks)

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each node; 0 if nodes have different numbers."""
        counts = set(map(len, self.ranks))
        return counts.pop() if len(counts) == 1 else 0

    @property
    def is_flat(self) -> bool:
        """Whether each of several nodes has only one of the ranks, so that no ranks share memory."""
        return 1 < self.nodes == self.comm.Get_size()


def locate(comm: MPI.Intracomm, made: list[MPI.Comm], node_key: str | None = None) -> Places:
    """Exchange which ranks share a node; every rank of the communicator calls.

    ``made`` is called with each new communicator at once: a call on it may block, and is ended by revoking it. Ranks
    with different keys, by default those of ``HPCDIST_NODE_KEY``, count as ranks on different nodes.
    """
    key = os.environ.get(NODE_KEY) if node_key is None else node_key
    node = shared = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank))
    made.append(shared)
    keys = shared.allgather(key)
    if len(set(keys)) > 1:
        node = MPI.Intracomm(shared.Split(keys.index(key), key=comm.rank))
        made.append(node)
        shared.Free()
    # not by mpi4py's ``allreduce`` of objects, which holds the GIL until all ranks have duplicated the communicator:
    # two threads that do this for two groups would wait for each other
    firsts: list[int] = comm.allgather(min(node.allgather(comm.rank)))
    by_node = ranks_by_value(firsts)
    here = list(by_node).index(firsts[comm.rank])
    return Places(comm, node, list(by_node.values()), here)
