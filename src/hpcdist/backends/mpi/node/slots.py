"""Slots of a node's window: what a group holds for collectives through node-shared memory, and the rhythm of a call.

Made on the group's first use of shared memory, by all of its ranks together, and given back by `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.node.arithmetic import STACK_WIDTH, Fold, Scratch
from hpcdist.backends.mpi.node.places import Places
from hpcdist.backends.mpi.node.window import SLOT_BYTES, SLOTS, NodeWindow

PLANS = 64

Step = Callable[[int, int, int], None]


class NodeSlots:
    """Holds a communicator's window on each node, cut into slots, and what is kept between calls.

    Construction is collective over the group's communicator, and every rank raises RuntimeError if one cannot have
    shared memory. What ``communicator.poll`` raises, which is called every few milliseconds of waiting, leaves a call.
    """

    def __init__(self, places: Places, communicator: Communicator) -> None:
        comm = places.comm
        window, failure = None, ""
        try:
            window = NodeWindow(places.node, communicator)
        except OSError as error:
            failure = str(error)
        failures = [f for f in comm.allgather(failure) if f]
        if window is None or failures:
            if window is not None:
                window.close()
            raise RuntimeError(f"no shared-memory window on {len(failures)} of {comm.size} ranks: {failures[0]}")
        self.window = window
        self.rank, self.size = window.rank, window.size
        self.slots = [  # the bytes of each, by number and by node rank
            [segment[i * SLOT_BYTES : (i + 1) * SLOT_BYTES] for segment in window.segments] for i in range(SLOTS)
        ]
        self.addresses = [[part.data_ptr() for part in slot] for slot in self.slots]
        self.peers = [r for r in range(self.size) if r != self.rank]
        self.free = [0] * SLOTS  # of each slot, the step that every peer must have published before it is written to
        self.turn = 0  # the slot that is next
        self._plans: dict[Any, Any] = {}
        self._scratch: dict[torch.dtype | None, Scratch] = {}

    def plan(self, key: Any, make: Callable[..., Any]) -> Any:
        """Return what ``make`` says of all of a key but its first entry, which tells kinds of plans apart; kept."""
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= PLANS:
                self._plans.clear()
            plan = self._plans[key] = make(*key[1:])
        return plan

    def exchange(self, block: int, chunk: int, put: Step, get: Step) -> None:
        """Run put and get over all chunks of a block, each rank one chunk ahead of what it reads.

        The lengths of block and chunks in bytes are the same on all ranks of the node. ``put`` takes a slot's number,
        where in the block a chunk begins, and its length, and writes to this rank's slot; ``get`` takes the same, and
        reads the others'.
        """
        window = self.window
        count = -(-block // chunk)

        def publish(c: int) -> tuple[int, int, int, int]:
            turn, offset = self.turn, c * chunk
            length = min(chunk, block - offset)
            window.wait(self.free[turn])
            put(turn, offset, length)
            step = window.publish()
            self.free[turn] = step + 2
            self.turn = (turn + 1) % SLOTS
            return step, turn, offset, length

        ahead = publish(0)
        for c in range(count):
            step, turn, offset, length = ahead
            if c + 1 < count:
                ahead = publish(c + 1)
            window.wait(step)
            get(turn, offset, length)
        self.free[turn] = step + 1

    def stacks(self, fold: Fold) -> bool:
        """Tell whether each rank puts its part of a slice in the segment of the rank that reduces it (`slices`)."""
        rows = SLOT_BYTES // (STACK_WIDTH * fold.dtype.itemsize)
        return fold.adds_stacks and 2 < self.size <= rows

    def stack(self, share: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return this rank's part of each slot as a stack of one row a rank, of `share` bytes each."""
        stacks: list[torch.Tensor] = self.plan(("stacked", share, dtype), self._plan_stacked)
        return stacks

    def _plan_stacked(self, share: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [slot[self.rank][: self.size * share].view(dtype).view(self.size, -1) for slot in self.slots]

    def accumulator(self, fold: Fold, parts: int, numel: int) -> Scratch | None:
        """Return memory to reduce so many slices of so many elements in, where the fold needs it."""
        if not fold.needs_scratch(parts):
            return None
        scratch = self._scratch.get(fold.wide)
        if scratch is None or scratch[0].numel() < numel:
            scratch = self._scratch[fold.wide] = fold.scratch(numel)
        return scratch

    def close(self) -> None:
        """Leave the window, once or often."""
        self._plans.clear()
        self.slots = []
        self.window.close()
