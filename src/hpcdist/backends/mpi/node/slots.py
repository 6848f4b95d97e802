"""What a group holds for its collectives through node-shared memory: the window, its nodes, its plans.

Made on the group's first use of shared memory, by all of its ranks together, and given back by `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.node.arithmetic import Fold, Scratch, op_name
from hpcdist.backends.mpi.node.internode import AcrossNodes
from hpcdist.backends.mpi.node.window import SLOT_BYTES, SLOTS, NodeWindow, split_node

DIRECT_BYTES = 1 << 20  # direct all_reduce up to this many bytes over the number of ranks
DIRECT_HALF_BYTES = 1 << 14  # the same for half types, whatever the number of ranks, and of two ranks
DIRECT_HALF_BYTES_OF_TWO = 1 << 17
PLANS = 64


class NodeSlots:
    """Holds a communicator's window on each node, cut into slots, and what is kept between calls.

    Construction and `close` are collective over `comm`.

    Args:
        comm: the group's communicator; it is not kept for traffic, and not freed.
        node_key: ranks with different keys count as ranks on different nodes; None for the real nodes.
        made: takes each communicator as soon as it is made: a call on it may block, and is ended by revoking it.

    Raises:
        RuntimeError: shared memory could not be had on some rank; every rank raises.
    """

    def __init__(self, comm: MPI.Intracomm, node_key: str | None = None, made: list[MPI.Comm] | None = None) -> None:
        made = [] if made is None else made
        node = split_node(comm, node_key, made)
        window, failure = None, ""
        try:
            window = NodeWindow(node)
        except MPI.Exception as error:
            failure = str(error)
        failures = [f for f in comm.allgather(failure) if f]
        if window is None or failures:
            if window is not None:
                window.close()
            raise RuntimeError(f"no shared-memory window on {len(failures)} of {comm.size} ranks: {failures[0]}")
        self.window = window
        self.rank, self.size, self.world_size = window.rank, window.size, comm.size
        self.nodes: int = comm.allreduce(int(window.rank == 0))
        self._owners: int = comm.allreduce(window.size, MPI.MIN)
        self._across: MPI.Intracomm | None = None
        if self.nodes > 1:
            color = window.rank if window.rank < self._owners else MPI.UNDEFINED
            across = comm.Split(color, key=comm.rank)
            self._across = None if across == MPI.COMM_NULL else MPI.Intracomm(across)
            made += [] if self._across is None else [self._across]
        self._slots = [
            [segment[i * SLOT_BYTES : (i + 1) * SLOT_BYTES] for segment in window.segments] for i in range(SLOTS)
        ]
        self._addresses = [[part.data_ptr() for part in slot] for slot in self._slots]
        self._mates = [r for r in range(self.size) if r != self.rank]
        self._free = [0] * SLOTS
        self._turn = 0
        self._folds: dict[Any, Fold] = {}
        self._reducers: dict[Fold, AcrossNodes] = {}
        self._plans: dict[Any, Any] = {}
        self._scratch: dict[torch.dtype, Scratch] = {}
        self._direct_bytes = DIRECT_BYTES // self.size if self.nodes == 1 else -1
        direct_half_bytes = DIRECT_HALF_BYTES_OF_TWO if self.size == 2 else DIRECT_HALF_BYTES
        self._direct_half_bytes = direct_half_bytes if self.nodes == 1 else -1

    @property
    def poll(self) -> Callable[[], None] | None:
        """Called every few milliseconds of waiting; what it raises leaves the collective."""
        return self.window.poll

    @poll.setter
    def poll(self, check: Callable[[], None] | None) -> None:
        self.window.poll = check

    def _fold(self, dtype: torch.dtype, op: Any) -> Fold:
        key = (dtype, op_name(op))
        fold = self._folds.get(key)
        if fold is None:
            fold = self._folds[key] = Fold(dtype, key[1], self.world_size)
        return fold

    def _plan(self, key: Any, make: Callable[..., Any]) -> Any:
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= PLANS:
                self._plans.clear()
            plan = self._plans[key] = make(*key[1:])
        return plan

    def _accumulator(self, fold: Fold, parts: int, numel: int) -> Scratch | None:
        if not fold.needs_scratch(parts) and not (self.nodes > 1 and fold.wide):
            return None
        assert fold.wide is not None
        scratch = self._scratch.get(fold.wide)
        if scratch is None or scratch[0].numel() < numel:
            total, spare = (torch.empty(numel, dtype=fold.wide, device="cpu") for _ in range(2))
            scratch = (total, spare)
            self._scratch[fold.wide] = scratch
        return scratch

    def close(self) -> None:
        """Free the window and the communicators made here; collective over `comm`, once or often."""
        self._plans.clear()
        self._slots = []
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers.clear()
        if self._across is not None:
            across, self._across = self._across, None
            across.Free()
        self.window.close()
