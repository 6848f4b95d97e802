"""Large all_reduce on a node: who owns which slice, where the parts lie, and who waits for what.

The tensor is reduced in chunks; rank r owns slice r of a chunk. Each rank puts what others own, reduces its own slice
from everybody's parts, puts the result in its segment, and collects the other results. While peers still collect chunk
c-1, chunk c is being reduced and chunk c+1 already lies in the window. The parts lie in one of two ways:

- Apart: each rank puts its part of every slice in its own segment, and an owner reads it there.
- Stacked: each rank puts its part of slice r in the segment of rank r, whose parts then lie one after another, so that
  one kernel of torch adds them all (`Fold.add_stack`). For the sums of half types, which cost more to widen and round
  than to move: three quarters of the time on four ranks. Other sums lose 5 to 8 %.

When may a slot be overwritten? A rank that puts chunk c + 3 in the slot of chunk c has waited for all results of chunk
c, so all reads of its parts are over. An owner overwrites its result of chunk c only after all have published chunk
c + 3, which they do after collecting chunk c. For that, slices lie at the same place in every chunk: chunks are of
equal size, and the last is cut short at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import memmove
from typing import Any

import torch

from hpcdist.backends.mpi.node.arithmetic import STACK_WIDTH, Fold
from hpcdist.backends.mpi.node.window import LINE_BYTES, SLOT_BYTES, SLOTS, NodeWindow

CHUNK_BYTES = 512 << 10  # smallest chunk; a message of four chunks or more takes larger ones
WIDENED_BYTES = 128 << 10  # largest slice that is widened to be summed: twice that, twice, stays in a core's cache

Step = Callable[[int, int], None]  # takes the chunk's number and its slot
Chunks = tuple[int, Step, Step, Step]  # how many chunks there are, and how one is put, reduced and collected


class SlicedAllReduce:
    """Runs large all_reduces of one communicator through memory shared on the node."""

    def __init__(self, window: NodeWindow) -> None:
        self._window = window
        self._rank, self._size = window.rank, window.size

    def run(self, send: torch.Tensor, recv: torch.Tensor, fold: Fold) -> None:
        """Reduce the flat `send` of all ranks into `recv` of all ranks."""
        window = self._window
        free, first = window.free, window.turn
        lay_out = self._stacked if window.stacks(fold) else self._apart
        count, put, reduce, collect = lay_out(send, recv, fold, send.nbytes)

        def begin(c: int) -> int:
            slot = (first + c) % SLOTS
            if c < SLOTS:
                window.wait(free[slot])
            put(c, slot)
            return window.publish()

        def end(c: int, step: int) -> None:
            window.wait(step)
            collect(c, (first + c) % SLOTS)

        step, reduced = begin(0), 0
        for c in range(count):
            following = begin(c + 1) if c + 1 < count else 0
            window.wait(step)
            reduce(c, (first + c) % SLOTS)
            done = window.publish()
            if c:
                end(c - 1, reduced)
            step, reduced = following, done
        end(count - 1, reduced)
        window.turn = (first + count) % SLOTS
        window.free = [window.publish()] * SLOTS

    # -- parts apart ---------------------------------------------------------------------------------

    def _plan_apart(self, numel: int, whole: int, dtype: torch.dtype) -> Any:
        """Say who owns what of a chunk of `numel` elements, where a full chunk has `whole`."""
        rank, owners = self._rank, self._size
        line = max(1, LINE_BYTES // dtype.itemsize)
        share = -(-whole // (owners * line)) * line
        bounds = [min(numel, r * share) for r in range(owners + 1)]
        begin, end = bounds[rank], bounds[rank + 1]
        slots = []
        for slot in self._window.slots:
            views = [part[: numel * dtype.itemsize].view(dtype) for part in slot]
            slots.append([views[r][begin:end] for r in self._window.peers])
        sizes = [(r, bounds[r] * dtype.itemsize, (bounds[r + 1] - bounds[r]) * dtype.itemsize) for r in range(owners)]
        others = [piece for piece in sizes if piece[0] != rank and piece[2]]
        return begin, end, [begin * dtype.itemsize, end * dtype.itemsize], others, slots

    def _chunk_bytes(self, size: int, fold: Fold) -> int:
        largest = SLOT_BYTES
        if fold.wide is not None and self._size > 2:
            largest = min(largest, self._size * WIDENED_BYTES)
        count = -(-size // min(largest, max(CHUNK_BYTES, size // 4)))
        return -(-size // (count * LINE_BYTES)) * LINE_BYTES

    def _apart(self, send: torch.Tensor, recv: torch.Tensor, fold: Fold, size: int) -> Chunks:
        window, rank, numel = self._window, self._rank, send.numel()
        addresses = window.addresses
        chunk = self._chunk_bytes(size, fold)
        count = -(-size // chunk)
        stride = chunk // fold.dtype.itemsize
        whole = window.plan(("apart", stride, stride, fold.dtype), self._plan_apart)
        rest = window.plan(("apart", numel - (count - 1) * stride, stride, fold.dtype), self._plan_apart)
        scratch = window.accumulator(fold, self._size, whole[1] - whole[0])
        source, target = send.data_ptr(), recv.data_ptr()
        begin, end = whole[0], whole[1]

        def own(tensor: torch.Tensor) -> list[torch.Tensor]:
            slices = [tensor[i * stride + begin : i * stride + end] for i in range(count - 1)]
            return [*slices, tensor[(count - 1) * stride + rest[0] : min(numel, (count - 1) * stride + rest[1])]]

        own_parts = own(send)
        own_results = own_parts if send is recv else own(recv)

        def put(c: int, slot: int) -> None:
            low, high = (whole if c < count - 1 else rest)[2]
            base, here = addresses[slot][rank], source + c * chunk
            length = chunk if c < count - 1 else size - c * chunk
            if low:
                memmove(base, here, low)
            if high < length:
                memmove(base + high, here + high, length - high)

        def reduce(c: int, slot: int) -> None:
            plan = whole if c < count - 1 else rest
            low, high = plan[2]
            if low < high:
                # into the caller's own memory, whose lines this core has, and on from there: to write sums to lines
                # that peers have read costs a tenth of the whole
                parts, result = [own_parts[c], *plan[4][slot]], own_results[c]
                fold.reduce(parts, result, scratch)
                memmove(addresses[slot][rank] + low, target + c * chunk + low, high - low)

        def collect(c: int, slot: int) -> None:
            there = target + c * chunk
            for r, offset, length in (whole if c < count - 1 else rest)[3]:
                memmove(there + offset, addresses[slot][r] + offset, length)

        return count, put, reduce, collect

    # -- parts stacked -------------------------------------------------------------------------------

    def _stacked(self, send: torch.Tensor, recv: torch.Tensor, fold: Fold, size: int) -> Chunks:
        window, rank, ranks = self._window, self._rank, self._size
        peers, addresses = window.peers, window.addresses
        width = STACK_WIDTH * fold.dtype.itemsize
        largest = SLOT_BYTES // (ranks * width) * ranks * width
        count = -(-size // min(largest, max(CHUNK_BYTES, size // 4)))
        share = -(-size // (count * ranks * width)) * width  # the rows of a stack are full to the end of the slice
        chunk = ranks * share
        stacks = window.stack(share, fold.dtype)
        source, target = send.data_ptr(), recv.data_ptr()

        def put(c: int, slot: int) -> None:
            for owner in peers:
                begin = c * chunk + owner * share
                if begin < size:
                    memmove(addresses[slot][owner] + rank * share, source + begin, min(share, size - begin))

        def reduce(c: int, slot: int) -> None:
            begin = c * chunk + rank * share
            if begin < size:
                row, length = addresses[slot][rank] + rank * share, min(share, size - begin)
                memmove(row, source + begin, length)
                total = fold.add_stack(stacks[slot])
                memmove(target + begin, total.data_ptr(), length)
                memmove(row, total.data_ptr(), length)

        def collect(c: int, slot: int) -> None:
            for owner in peers:
                begin = c * chunk + owner * share
                if begin < size:
                    memmove(target + begin, addresses[slot][owner] + owner * share, min(share, size - begin))

        return -(-size // chunk), put, reduce, collect
