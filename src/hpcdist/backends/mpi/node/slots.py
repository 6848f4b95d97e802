"""Slots of a node's window: what a group holds for collectives through node-shared memory, and the rhythm of a call.

Made on the group's first use of shared memory, by all of its ranks together, and given back by `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.node.arithmetic import Fold, Scratch
from hpcdist.backends.mpi.node.places import Places
from hpcdist.backends.mpi.node.window import SLOT_BYTES, SLOTS, NodeWindow

DIRECT_BYTES = 1 << 20  # direct all_reduce up to this many bytes over the number of ranks
DIRECT_HALF_BYTES = 1 << 14  # the same for half types, whatever the number of ranks, and of two ranks
DIRECT_HALF_BYTES_OF_TWO = 1 << 17
PLANS = 64

Step = Callable[[int, int, int], None]


class NodeSlots:
    """Holds a communicator's window on each node, cut into slots, and what is kept between calls.

    Construction and `close` are collective over the group's communicator.

    Args:
        places: where the group's ranks are; the window takes over the communicator of the node.
        poll: called every few milliseconds of waiting; what it raises leaves the collective.
        is_background: tells whether the call under way runs beside the rank's own computation.

    Raises:
        RuntimeError: shared memory could not be had on some rank; every rank raises.
    """

    def __init__(self, places: Places, poll: Callable[[], None], is_background: Callable[[], bool]) -> None:
        comm = places.comm
        window, failure = None, ""
        try:
            window = NodeWindow(places.node, poll, is_background)
        except MPI.Exception as error:
            failure = str(error)
        failures = [f for f in comm.allgather(failure) if f]
        if window is None or failures:
            if window is not None:
                window.close()
            raise RuntimeError(f"no shared-memory window on {len(failures)} of {comm.size} ranks: {failures[0]}")
        self.window = window
        self.rank, self.size, self.world_size = window.rank, window.size, comm.size
        self.slots = [
            [segment[i * SLOT_BYTES : (i + 1) * SLOT_BYTES] for segment in window.segments] for i in range(SLOTS)
        ]
        self.addresses = [[part.data_ptr() for part in slot] for slot in self.slots]
        self._mates = [r for r in range(self.size) if r != self.rank]
        self._free = [0] * SLOTS
        self._turn = 0
        self._plans: dict[Any, Any] = {}
        self._scratch: dict[torch.dtype | None, Scratch] = {}
        self._direct_bytes = DIRECT_BYTES // self.size
        self._direct_half_bytes = DIRECT_HALF_BYTES_OF_TWO if self.size == 2 else DIRECT_HALF_BYTES

    def _plan(self, key: Any, make: Callable[..., Any]) -> Any:
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= PLANS:
                self._plans.clear()
            plan = self._plans[key] = make(*key[1:])
        return plan

    def exchange(self, block: int, chunk: int, put: Step, get: Step) -> None:
        """Run put and get over all chunks of a block, each rank one chunk ahead of what it reads.

        Args:
            block: its length in bytes, the same on all ranks of the node.
            chunk: the length of its chunks, likewise.
            put: takes a slot's number, where in the block a chunk begins, and its length; writes to this rank's slot.
            get: takes the same; reads the others'.
        """
        window = self.window
        count = -(-block // chunk)

        def publish(c: int) -> tuple[int, int, int, int]:
            turn, offset = self._turn, c * chunk
            length = min(chunk, block - offset)
            window.wait(self._free[turn])
            put(turn, offset, length)
            step = window.publish()
            self._free[turn] = step + 2
            self._turn = (turn + 1) % SLOTS
            return step, turn, offset, length

        ahead = publish(0)
        for c in range(count):
            step, turn, offset, length = ahead
            if c + 1 < count:
                ahead = publish(c + 1)
            window.wait(step)
            get(turn, offset, length)
        self._free[turn] = step + 1

    def accumulator(self, fold: Fold, parts: int, numel: int) -> Scratch | None:
        """Return memory to reduce so many slices of so many elements in, where the fold needs it."""
        if not fold.needs_scratch(parts):
            return None
        scratch = self._scratch.get(fold.wide)
        if scratch is None or scratch[0].numel() < numel:
            scratch = self._scratch[fold.wide] = fold.scratch(numel)
        return scratch

    def close(self) -> None:
        """Free the window; collective over the node, once or often."""
        self._plans.clear()
        self.slots = []
        self.window.close()
