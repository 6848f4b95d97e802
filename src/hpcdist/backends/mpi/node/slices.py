"""Slices of a chunk in the window: each rank reduces its own, from the parts of all ranks of the node.

The parts lie in one of two ways:

- Apart: each rank puts its part of every slice in its own segment, and an owner reads it there.
- Stacked: each rank puts its part of slice r in the segment of rank r, whose parts then lie one after another, so that
  one kernel of torch adds them all (`Fold.add_stack`). For the sums of half types, which cost more to widen and round
  than to move: three quarters of the time on four ranks. Other sums lose 5 to 8 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove

import torch

from hpcdist.backends.mpi.node.arithmetic import STACK_WIDTH, Fold
from hpcdist.backends.mpi.node.window import LINE_BYTES, SLOT_BYTES, NodeWindow


class Slices:
    """Slices of limited size, one for each rank, as far as a slot has room: ``share`` is the room for each, in bytes.

    Slice r begins r shares behind the begin of a slot, as does its owner's result.
    """

    def __init__(self, window: NodeWindow, fold: Fold, nbytes: int) -> None:
        self._window, self._fold = window, fold
        rank, ranks, dtype = window.rank, window.size, fold.dtype
        row = STACK_WIDTH * dtype.itemsize
        self._are_stacked = fold.adds_stacks and 2 < ranks <= SLOT_BYTES // row
        unit = row if self._are_stacked else LINE_BYTES
        self.share = share = min(-(-nbytes // unit), SLOT_BYTES // (ranks * unit)) * unit
        if self._are_stacked:  # this rank's stack in each slot, with one row for each rank
            self._stacks = [slot[rank][: ranks * share].view(dtype).view(ranks, -1) for slot in window.slots]
        else:
            self._parts = [
                [slot[r][rank * share : (rank + 1) * share].view(dtype) for r in window.peers] for slot in window.slots
            ]

    def put(self, turn: int, owner: int, place: int, nbytes: int) -> None:
        """Put this rank's part of a slice in a slot."""
        segment, index = (owner, self._window.rank) if self._are_stacked else (self._window.rank, owner)
        memmove(self._window.addresses[turn][segment] + index * self.share, place, nbytes)

    def reduce(self, turn: int, own: torch.Tensor, out: torch.Tensor) -> None:
        """Reduce this rank's slice, given its own part of it; ``out`` may be that."""
        if self._are_stacked:
            self.put(turn, self._window.rank, own.data_ptr(), own.nbytes)
            total = self._fold.add_stack(self._stacks[turn])
            memmove(out.data_ptr(), total.data_ptr(), out.nbytes)
            return
        parts = self._parts[turn]
        if own.nbytes < self.share:
            parts = [part[: own.numel()] for part in parts]
        self._fold.reduce([own, *parts], out)

    def reduce_scatter(self, places: Sequence[int], sizes: Sequence[int], own: torch.Tensor, out: torch.Tensor) -> None:
        """Reduce one part for each rank, of a size that is the same on all ranks; this rank gets its own in ``out``.

        The parts of this rank's tensor are given by address and bytes; ``own`` is the one for itself.
        """

        def put(turn: int, offset: int, length: int) -> None:
            for peer in self._window.peers:
                if offset < sizes[peer]:
                    self.put(turn, peer, places[peer] + offset, min(length, sizes[peer] - offset))

        def get(turn: int, offset: int, length: int) -> None:
            if offset < own.nbytes:
                low, high = offset // own.itemsize, (offset + length) // own.itemsize
                self.reduce(turn, own[low:high], out[low:high])

        self._window.exchange(max(sizes), self.share, put, get)
