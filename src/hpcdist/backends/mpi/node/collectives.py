"""Collectives through the memory that the ranks of one node share.

Each method repeats the same steps on the window's three slots: put this rank's part, publish the step, wait until the
other ranks of the node have published theirs, read.

- Small all_reduce ("direct"): every rank puts all of its tensor, waits once and reduces everything itself, always in
  rank order, so that all ranks hold the same bits. One synchronisation, P - 1 additions of the whole tensor.
- Large all_reduce ("sliced", in `slices`): each rank reduces its own slice of every chunk.
- broadcast, all_gather_single, reduce_scatter_single: put, publish, wait, read; one step a chunk.

When may a slot be overwritten? `NodeWindow.free[slot]` is the step that every peer must have published first. A rank
publishes step t + 1 only after the reads of step t, so this is t + 1 in the plain rhythm, t + 2 where a rank puts its
next chunk before it reads. Slots are used in turn, also from one collective to the next, so a rank only ever waits for
steps smaller than the one it is about to publish: no circle of waiting can arise.

Data moves by `memmove` on addresses, which takes 0.3 µs for the call, releases the GIL and knows no dtype; sums are
torch's.
"""

from __future__ import annotations

from ctypes import memmove
from typing import Any

import torch

from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.node.arithmetic import STACK_WIDTH, Fold, fold_of
from hpcdist.backends.mpi.node.places import Places
from hpcdist.backends.mpi.node.slices import CHUNK_BYTES, SlicedAllReduce
from hpcdist.backends.mpi.node.window import LINE_BYTES, SLOT_BYTES, SLOTS, NodeWindow
from hpcdist.core.buffers import TensorList
from hpcdist.core.reduction import name_of

DIRECT_BYTES = 1 << 20  # direct all_reduce up to this many bytes over the number of ranks
DIRECT_HALF_BYTES = 1 << 14  # the same for half types, whatever the number of ranks, and of two ranks
DIRECT_HALF_BYTES_OF_TWO = 1 << 17


class NodeShared:
    """Runs collectives of one communicator through memory shared on the node.

    The methods are collective: same order, sizes, dtypes and ops on every rank. Tensors are contiguous, of any shape,
    on the CPU and checked by the caller; `send` may be `recv`. A result is visible when the method returns.
    PREMUL_SUM expects the factor already applied. Construction, as of `NodeWindow`, and `close` are collective too.
    """

    def __init__(self, places: Places, communicator: Communicator) -> None:
        self.window = window = NodeWindow(places, communicator)
        self.rank, self.size = window.rank, window.size
        self._sliced = SlicedAllReduce(window)
        self._direct_bytes = DIRECT_BYTES // window.size
        self._direct_half_bytes = DIRECT_HALF_BYTES_OF_TWO if window.size == 2 else DIRECT_HALF_BYTES

    def all_reduce(self, send: torch.Tensor, recv: torch.Tensor, op: Any) -> None:
        """Reduce `send` of all ranks into `recv` of all ranks (MPI_Allreduce)."""
        fold = fold_of(send.dtype, name_of(op), self.size)
        if fold.dtype is not send.dtype:
            send, recv = send.view(fold.dtype), recv.view(fold.dtype)
        if send.dim() != 1:
            send, recv = send.view(-1), recv.view(-1)
        if send.nbytes <= (self._direct_bytes if fold.wide is None else self._direct_half_bytes):
            self._all_reduce_direct(send, recv, fold)
        else:
            self._sliced.run(send, recv, fold)

    def _plan_direct(self, numel: int, dtype: torch.dtype) -> Any:
        size = numel * dtype.itemsize
        return [[part[:size].view(dtype) for part in slot] for slot in self.window.slots]

    def _all_reduce_direct(self, send: torch.Tensor, recv: torch.Tensor, fold: Fold) -> None:
        window, numel = self.window, send.numel()
        turn = window.turn
        parts = window.plan(("direct", numel, fold.dtype), self._plan_direct)[turn]
        window.wait(window.free[turn])
        memmove(window.addresses[turn][self.rank], send.data_ptr(), send.nbytes)
        step = window.publish()
        window.free[turn] = step + 1
        window.turn = (turn + 1) % SLOTS
        window.wait(step)
        fold.reduce(parts, recv, window.accumulator(fold, self.size, numel))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy `tensor` of one rank to all (MPI_Bcast)."""
        chunk = min(SLOT_BYTES, max(CHUNK_BYTES // 4, tensor.nbytes // 8))
        self.window.share(root, tensor.data_ptr(), tensor.nbytes, chunk)

    def all_gather_single(self, send: torch.Tensor, recv: torch.Tensor) -> None:
        """Concatenate `send` of all ranks in `recv` of all ranks (MPI_Allgather); `send` may be its own place there."""
        addresses, rank, block = self.window.addresses, self.rank, send.nbytes
        source, target = send.data_ptr(), recv.data_ptr()
        if target + rank * block != source:
            memmove(target + rank * block, source, block)

        def put(turn: int, offset: int, length: int) -> None:
            memmove(addresses[turn][rank], source + offset, length)

        def get(turn: int, offset: int, length: int) -> None:
            slot = addresses[turn]
            for r in self.window.peers:
                memmove(target + r * block + offset, slot[r], length)

        self.window.exchange(block, SLOT_BYTES, put, get)

    def reduce_scatter_single(self, send: torch.Tensor | TensorList, recv: torch.Tensor, op: Any) -> None:
        """Reduce block r of all ranks' `send`, a tensor or a list, into `recv` of rank r (MPI_Reduce_scatter_block)."""
        fold = fold_of(send.dtype, name_of(op), self.size)
        recv = recv.view(fold.dtype).view(-1)
        if isinstance(send, TensorList):
            blocks, own = send.addresses, send.tensors[self.rank]
        else:
            blocks = [send.data_ptr() + r * recv.nbytes for r in range(self.size)]
            own = send.view(self.size, -1)[self.rank]
        if self.window.stacks(fold):
            self._reduce_scatter_stacked(blocks, recv, fold)
        else:
            self._reduce_scatter_apart(blocks, own.view(-1).view(fold.dtype), recv, fold)

    def _reduce_scatter_apart(self, blocks: list[int], own: torch.Tensor, recv: torch.Tensor, fold: Fold) -> None:
        window, dtype, rank, block = self.window, fold.dtype, self.rank, recv.nbytes
        itemsize = dtype.itemsize
        scratch = window.accumulator(fold, self.size, min(recv.numel(), SLOT_BYTES // itemsize))

        def put(turn: int, offset: int, length: int) -> None:
            base = window.addresses[turn][rank]
            for r in window.peers:
                memmove(base + r * length, blocks[r] + offset, length)

        def get(turn: int, offset: int, length: int) -> None:
            parts = window.plan(("scattered", length, dtype), self._plan_scattered)[turn]
            low, high = offset // itemsize, (offset + length) // itemsize
            fold.reduce([own[low:high], *parts], recv[low:high], scratch)

        window.exchange(block, SLOT_BYTES // (self.size * LINE_BYTES) * LINE_BYTES, put, get)

    def _plan_scattered(self, length: int, dtype: torch.dtype) -> Any:
        begin, window = self.rank * length, self.window
        return [[slot[r][begin : begin + length].view(dtype) for r in window.peers] for slot in window.slots]

    def _reduce_scatter_stacked(self, blocks: list[int], recv: torch.Tensor, fold: Fold) -> None:
        rank, addresses, block = self.rank, self.window.addresses, recv.nbytes
        target, width = recv.data_ptr(), STACK_WIDTH * fold.dtype.itemsize

        def row(length: int) -> int:
            return -(-length // width) * width

        def put(turn: int, offset: int, length: int) -> None:
            begin = rank * row(length)
            for r, place in enumerate(blocks):
                memmove(addresses[turn][r] + begin, place + offset, length)

        def get(turn: int, offset: int, length: int) -> None:
            total = fold.add_stack(self.window.stack(row(length), fold.dtype)[turn])
            memmove(target + offset, total.data_ptr(), length)

        self.window.exchange(block, SLOT_BYTES // (self.size * width) * width, put, get)

    def close(self) -> None:
        """Leave the window, once or often."""
        self.window.close()
