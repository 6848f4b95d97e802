"""Which calls of a group go through node-shared memory, and what happens where there is none?

A call below its collective's `floors` entry is decided by that one comparison in the backend. Others look up their own
crossover, which is computed once for a collective, dtype and op. The window is made by the first call that uses it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from mpi4py import MPI
from torch.distributed import ReduceOp

from hpcdist.backends.mpi import crossover, fault_tolerance
from hpcdist.backends.mpi.shared_memory import NodeShared
from hpcdist.core.buffers import overlap
from hpcdist.core.reduction import check, name_of
from hpcdist.core.table import (
    ALL_GATHER_SINGLE,
    ALL_REDUCE,
    BROADCAST,
    REDUCE_SCATTER_SINGLE,
    Row,
)

RedOpType = ReduceOp.RedOpType

# the collectives that node-shared memory knows, and how each takes its arguments
SHARED_CALLS: dict[Row, Callable[[NodeShared, torch.Tensor, torch.Tensor, Any, Any], None]] = {
    ALL_REDUCE: lambda shared, send, recv, op, _: shared.all_reduce(send, recv, op),
    BROADCAST: lambda shared, send, _, __, root: shared.broadcast(send, root),
    ALL_GATHER_SINGLE: lambda shared, send, recv, _, __: shared.all_gather_single(send, recv),
    REDUCE_SCATTER_SINGLE: lambda shared, send, recv, op, _: shared.reduce_scatter_single(send, recv, op),
}


@cache
def floors(size: int, library: str, setting: str) -> dict[Row, int]:
    """Return the floors of a communicator's size, which are the same for all of that size and setting."""
    return {row: crossover.floor_bytes(row, size, library) for row in SHARED_CALLS}


class Sharing:
    """Sends large collectives of one communicator through node-shared memory.

    Args:
        comm: the group's communicator.
        poll: called every few milliseconds of waiting; what it raises ends the wait.
        is_background: tells whether the call under way is an asynchronous one.
    """

    def __init__(self, comm: MPI.Intracomm, poll: Callable[[], None], is_background: Callable[[], bool]) -> None:
        self.comm = comm
        self.size: int = comm.Get_size()
        # row -> bytes sent below which it never uses shared memory, whatever the dtype; rows not here never do
        self.floors = floors(self.size, MPI.get_vendor()[0], crossover.setting()).copy()
        self.shared: NodeShared | None = None
        self.communicators: list[MPI.Intracomm] = []  # those that the window blocks on, so that they can be revoked
        self._poll = poll
        self._is_background = is_background
        self._switches: dict[tuple[str, torch.dtype, int], crossover.Switches] = {}

    def run(self, row: Row, send: torch.Tensor, recv: torch.Tensor, op: Any, root: int | None) -> bool:
        """Run one collective through node-shared memory where it is faster, and tell whether it was."""
        if op is not None and op.__class__ is not RedOpType:
            return False
        key = (row.name, send.dtype, id(op))
        switches = self._switches.get(key)
        if switches is None:
            switches = self._switches[key] = self._find_switches(row, send.dtype, op)
        if not crossover.is_shared(max(send.nbytes, recv.nbytes), switches):
            return False
        shared = self.shared
        if shared is None:
            try:
                shared = self.shared = NodeShared(self.comm, crossover.node_key(), self.communicators)
            except RuntimeError as error:
                self.floors.clear()
                warnings.warn(f"{error}; MPI's own collectives are used instead", stacklevel=2)
                return False
            shared.poll = self._poll
        if shared.nodes > 1 and (row.name not in crossover.ACROSS_NODES or shared.nodes == self.size):
            self._switches[key] = ()
            return False
        if send is not recv and overlap(send, recv):
            own = recv.data_ptr() + self.comm.Get_rank() * send.nbytes
            if row is not ALL_GATHER_SINGLE or send.data_ptr() != own:
                send = send.clone()  # the others are on their way to the window, so this rank goes there too
        shared.window.is_background = self._is_background()
        SHARED_CALLS[row](shared, send, recv, op, root)
        return True

    def is_chosen(self, row: Row, dtype: torch.dtype, op: Any, nbytes: int) -> bool:
        """Tell whether calls of so many bytes, which have been made before, go through shared memory."""
        return crossover.is_shared(nbytes, self._switches.get((row.name, dtype, id(op)), ()))

    def _find_switches(self, row: Row, dtype: torch.dtype, op: Any) -> crossover.Switches:
        name = None
        if op is not None:
            check(row, dtype, op)
            name = name_of(op)
        return crossover.switches(row.name, dtype, name, self.size, MPI.get_vendor()[0])

    def close(self) -> None:
        """Free the window; every rank of the communicator calls it.

        After a revocation the window is left to the end of the process: freeing it would wait for the dead.
        """
        shared, self.shared = self.shared, None
        if shared is not None and not (fault_tolerance.is_tolerant() and self.comm.Is_revoked()):
            shared.close()
