"""Collectives through the memory that the ranks of one node share.

Each method repeats the same steps on the window's three slots: put this rank's part, publish the step, wait until the
other ranks of the node have published theirs, read. All take one step a chunk, but for an all_reduce:

- Small ("direct"): every rank puts all of its tensor, waits once and reduces everything itself, always in rank order,
  so that all ranks hold the same bits.
- Large: by chunks, of which each rank owns a slice (`slices`). It puts what others own, reduces its own from
  everybody's parts, puts the result in its segment, and collects the other results. While peers still collect chunk
  c-1, chunk c is being reduced and chunk c+1 already lies in the window.

When may a slot be overwritten? `NodeWindow.free[slot]` is the step that every peer must have published first. A rank
publishes step t + 1 only after the reads of step t, so this is t + 1 in the plain rhythm, t + 2 where a rank puts its
next chunk before it reads. Slots are used in turn, also from one collective to the next, so a rank only ever waits for
steps smaller than the one it is about to publish: no circle of waiting can arise. In a large all_reduce, a rank that
puts chunk c + 3 in the slot of chunk c has waited for all results of chunk c, so all reads of its parts are over. An
owner overwrites its result of chunk c only after all have published chunk c + 3, which they do after collecting
chunk c. For that, slices lie at the same place in every chunk: chunks are of equal size, and the last is cut short at
its end.

Data moves by `memmove` on addresses, which takes 0.3 µs for the call, releases the GIL and knows no dtype; sums are
torch's.
"""

from __future__ import annotations

from ctypes import memmove
from functools import cache, lru_cache, partial
from typing import Any

import torch

from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.node.arithmetic import Fold
from hpcdist.backends.mpi.node.places import Places
from hpcdist.backends.mpi.node.slices import Slices
from hpcdist.backends.mpi.node.window import CHUNK_BYTES, KEPT_SLICES, SLOT_BYTES, SLOTS, NodeWindow
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
        self._fold_of = cache(Fold)
        self._direct_bytes = DIRECT_BYTES // window.size
        self._direct_half_bytes = DIRECT_HALF_BYTES_OF_TWO if window.size == 2 else DIRECT_HALF_BYTES
        self._slices = lru_cache(KEPT_SLICES)(partial(Slices, window))
        self._beginnings = lru_cache(KEPT_SLICES)(window.beginnings)

    def all_reduce(self, send: torch.Tensor, recv: torch.Tensor, op: Any) -> None:
        """Reduce `send` of all ranks into `recv` of all ranks (MPI_Allreduce)."""
        fold = self._fold_of(send.dtype, name_of(op), self.size)
        if fold.dtype is not send.dtype:
            send, recv = send.view(fold.dtype), recv.view(fold.dtype)
        if send.dim() != 1:
            send, recv = send.view(-1), recv.view(-1)
        if send.nbytes <= (self._direct_bytes if fold.wide is None else self._direct_half_bytes):
            self._all_reduce_direct(send, recv, fold)
        else:
            self._all_reduce_by_slices(send, recv, fold)

    def _all_reduce_direct(self, send: torch.Tensor, recv: torch.Tensor, fold: Fold) -> None:
        window, turn = self.window, self.window.turn
        parts = self._beginnings(send.nbytes, fold.dtype)[turn]
        window.wait(window.free[turn])
        memmove(window.addresses[turn][self.rank], send.data_ptr(), send.nbytes)
        step = window.publish()
        window.free[turn] = step + 1
        window.turn = (turn + 1) % SLOTS
        window.wait(step)
        fold.reduce(parts, recv)

    def _all_reduce_by_slices(self, send: torch.Tensor, recv: torch.Tensor, fold: Fold) -> None:
        window, rank, ranks = self.window, self.rank, self.size
        size, item, source, target = send.nbytes, send.itemsize, send.data_ptr(), recv.data_ptr()
        pieces = ranks * -(-size // min(SLOT_BYTES, max(CHUNK_BYTES, size // 4)))
        slices = self._slices(fold, -(-size // pieces))
        share = slices.share
        chunk = ranks * share
        count, first = -(-size // chunk), window.turn

        def begin(c: int) -> int:
            slot = (first + c) % SLOTS
            if c < SLOTS:
                window.wait(window.free[slot])
            for owner in window.peers:
                place = c * chunk + owner * share
                if place < size:
                    slices.put(slot, owner, source + place, min(share, size - place))
            return window.publish()

        def reduce(c: int) -> int:
            place = c * chunk + rank * share
            if place < size:
                # into the caller's own memory, whose lines this core has, and on from there: to write sums to lines
                # that peers have read costs a tenth of the whole
                out = recv[place // item : (place + share) // item]
                slices.reduce((first + c) % SLOTS, send[place // item : (place + share) // item], out)
                memmove(window.addresses[(first + c) % SLOTS][rank] + rank * share, out.data_ptr(), out.nbytes)
            return window.publish()

        def collect(c: int, step: int) -> None:
            window.wait(step)
            for owner in window.peers:
                place = c * chunk + owner * share
                if place < size:
                    result = window.addresses[(first + c) % SLOTS][owner] + owner * share
                    memmove(target + place, result, min(share, size - place))

        step, reduced = begin(0), 0
        for c in range(count):
            following = begin(c + 1) if c + 1 < count else 0
            window.wait(step)
            done = reduce(c)
            if c:
                collect(c - 1, reduced)
            step, reduced = following, done
        collect(count - 1, reduced)
        window.turn = (first + count) % SLOTS
        window.free = [window.publish()] * SLOTS

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy `tensor` of one rank to all (MPI_Bcast)."""
        chunk = min(SLOT_BYTES, max(CHUNK_BYTES // 4, tensor.nbytes // 8))
        self.window.share(root, tensor.data_ptr(), tensor.nbytes, chunk)

    def all_gather_single(self, send: torch.Tensor, recv: torch.Tensor) -> None:
        """Concatenate `send` of all ranks in `recv` of all ranks (MPI_Allgather); `send` may be its own place there."""
        nbytes, source, target = send.nbytes, send.data_ptr(), recv.data_ptr()
        places = [target + r * nbytes for r in range(self.size)]
        if places[self.rank] != source:
            memmove(places[self.rank], source, nbytes)
            places[self.rank] = source  # which is in a core's cache
        self.window.collect(places, [nbytes] * self.size, SLOT_BYTES)

    def reduce_scatter_single(self, send: torch.Tensor | TensorList, recv: torch.Tensor, op: Any) -> None:
        """Reduce block r of all ranks' `send`, a tensor or a list, into `recv` of rank r (MPI_Reduce_scatter_block)."""
        fold = self._fold_of(send.dtype, name_of(op), self.size)
        nbytes, recv = recv.nbytes, recv.view(fold.dtype).view(-1)
        if isinstance(send, TensorList):
            places, own = send.addresses, send.tensors[self.rank]
        else:
            places, own = [send.data_ptr() + r * nbytes for r in range(self.size)], send.view(self.size, -1)[self.rank]
        slices = self._slices(fold, nbytes)
        slices.reduce_scatter(places, [nbytes] * self.size, own.view(-1).view(fold.dtype), recv)

    def close(self) -> None:
        """Leave the window, once or often."""
        self._slices.cache_clear()
        self._beginnings.cache_clear()
        self.window.close()
