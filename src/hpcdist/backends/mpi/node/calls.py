"""Node-shared memory of one group: its window, made by the first call that uses it, and the calls through it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.node.collectives import NodeShared
from hpcdist.backends.mpi.node.thresholds import node_key
from hpcdist.core.buffers import overlap
from hpcdist.core.table import ALL_GATHER_SINGLE, ALL_REDUCE, BROADCAST, REDUCE_SCATTER_SINGLE, Row

# the collectives that node-shared memory knows, and how each takes its arguments
SHARED_CALLS: dict[Row, Callable[[NodeShared, torch.Tensor, torch.Tensor, Any, Any], None]] = {
    ALL_REDUCE: lambda shared, send, recv, op, _: shared.all_reduce(send, recv, op),
    BROADCAST: lambda shared, send, _, __, root: shared.broadcast(send, root),
    ALL_GATHER_SINGLE: lambda shared, send, recv, _, __: shared.all_gather_single(send, recv),
    REDUCE_SCATTER_SINGLE: lambda shared, send, recv, op, _: shared.reduce_scatter_single(send, recv, op),
}


class NodeCalls:
    """The calls of one communicator through node-shared memory.

    Args:
        comm: the group's communicator.
        derived: takes the communicators made here, so that they can be revoked with the group's.
        poll: called every few milliseconds of waiting; what it raises ends the wait.
        is_background: tells whether the call under way runs beside the rank's own computation.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        derived: list[MPI.Comm],
        poll: Callable[[], None],
        is_background: Callable[[], bool],
    ) -> None:
        self._comm = comm
        self._derived = derived
        self._poll = poll
        self._is_background = is_background
        self.shared: NodeShared | None = None

    def connect(self) -> int:
        """Make the window; every rank calls, and all return the number of nodes, 0 if a node cannot share memory."""
        try:
            self.shared = NodeShared(self._comm, node_key(), self._derived)
        except RuntimeError as error:
            warnings.warn(f"{error}; MPI's own collectives are used instead", stacklevel=2)
            return 0
        self.shared.poll = self._poll
        return self.shared.nodes

    def run(self, row: Row, send: torch.Tensor, recv: torch.Tensor, op: Any, root: int | None) -> None:
        """Run one collective through the window; every rank calls.

        A tensor that overlaps its output on this rank is copied: the others are on their way to the window.
        """
        shared = self.shared
        assert shared is not None
        if send is not recv and overlap(send, recv):
            own = recv.data_ptr() + self._comm.Get_rank() * send.nbytes
            if row is not ALL_GATHER_SINGLE or send.data_ptr() != own:
                send = send.clone()
        shared.window.is_background = self._is_background()
        SHARED_CALLS[row](shared, send, recv, op, root)

    def close(self, is_revoked: bool) -> None:
        """Free the window; every rank of the communicator calls it.

        After a revocation the window is left to the end of the process: freeing it would wait for the dead.
        """
        shared, self.shared = self.shared, None
        if shared is not None and not is_revoked:
            shared.close()
