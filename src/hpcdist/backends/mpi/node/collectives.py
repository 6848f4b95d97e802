"""Collectives of a group through the memory of its nodes: shared memory in each, the site's own MPI between them.

On one node each method repeats the same steps on the window's three slots: put this rank's part, publish the step, wait
until the other ranks of the node have published theirs, read. All take one step for each chunk, except all_reduce:

- Small ("direct"): every rank puts all of its tensor, waits once and reduces everything itself, always in rank order,
  so that all ranks hold the same bits.
- Large: by chunks, of which each rank owns a slice (`slices`). It puts what others own, reduces its own from
  everybody's parts, puts the result in its segment, and collects the other results. While peers still collect chunk
  c-1, chunk c is being reduced and chunk c+1 already lies in the window.

When a slot may be overwritten: `NodeWindow.free[slot]` is the step that every peer must have published first. A rank
publishes step t + 1 only after the reads of step t, so this is t + 1 in the plain rhythm, t + 2 where a rank puts its
next chunk before it reads. Slots are used in turn, also from one collective to the next, so a rank only waits for
steps smaller than the one that it is about to publish: there can be no cycle of waits. In a large all_reduce, a rank
that puts chunk c + 3 in the slot of chunk c has waited for all results of chunk c, so all reads of its parts are over.
An owner overwrites its result of chunk c only after all have published chunk c + 3, which they do after collecting
chunk c. For that, slices lie at the same place in every chunk: chunks are of equal size, and the last is cut short at
its end.

Data moves by `memmove` on addresses, which takes 0.3 µs for the call, releases the GIL and knows no dtype; sums are
torch's.

If there are several nodes, each has equally many of the ranks. Those with the same local index have a communicator
across the nodes, and one slice of the data, so that what crosses the network is the least that there can be:

- all_reduce: a node's ranks reduce a slice each, MPI_Allreduce combines it across nodes, all ranks collect all slices.
- reduce_scatter: each rank reduces the blocks of the ranks with its local index, gets those of all nodes for itself by
  MPI_Alltoall, and reduces them. (Open MPI's MPI_Reduce_scatter_block sends twice as much on two nodes.)
- all_gather: MPI_Allgatherv gathers the blocks of the ranks with one local index, and a node's ranks exchange them.
- broadcast: the root's node shares the tensor, MPI_Bcast takes a slice each to the other nodes, whose ranks collect it.

Reductions without a type and op in MPI use MPI_Alltoallv: each rank gets its share of every node's slice and reduces
them in the order of the nodes, and MPI_Allgatherv collects the results. These are half types, which are so sent in
their own bytes, added in float32 and rounded once (an MPI_Op would round at each of MPI's steps, and MPICH reduces by
ops of a user in log2 N steps of the whole); MIN and MAX of floats, because MPI leaves NaN undefined; and the narrow
integers of ``reductions.wide``. On nodes of one rank, which share no memory, only these reductions are done here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from ctypes import memmove
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.datatypes import BYTE, DATATYPES, memory, run
from hpcdist.backends.mpi.node.arithmetic import Fold
from hpcdist.backends.mpi.node.places import Places
from hpcdist.backends.mpi.node.slices import Slices
from hpcdist.backends.mpi.node.window import (
    CHUNK_BYTES,
    KEPT_SLICES,
    LINE_BYTES,
    POLL_SECONDS,
    SLOT_BYTES,
    SLOTS,
    NodeWindow,
)
from hpcdist.backends.mpi.process import ulfm
from hpcdist.backends.mpi.reductions import mpi_op, wide
from hpcdist.core.buffers import TensorList
from hpcdist.core.reduction import name_of

DIRECT_BYTES = 1 << 20  # bytes, times the number of ranks, up to which an all_reduce is direct
DIRECT_HALF_BYTES = 1 << 14  # the same for half types, whatever the number of ranks, and of two ranks
DIRECT_HALF_BYTES_OF_TWO = 1 << 17
PIECE_BYTES = 4 << 20  # bytes of a slice that go through all steps between nodes at a time


def native_op(fold: Fold) -> tuple[MPI.Datatype, MPI.Op] | None:
    """Return MPI's type and op for a fold; None if MPI has none."""
    is_ordered = fold.op in ("MIN", "MAX") and fold.dtype.is_floating_point
    if fold.dtype not in DATATYPES or is_ordered or wide(fold.dtype, fold.op) is not None:
        return None
    return DATATYPES[fold.dtype], mpi_op(fold.dtype, fold.op)


def places_of(parts: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Return the address and the bytes of each part."""
    return [part.data_ptr() for part in parts], [part.nbytes for part in parts]


class NodeShared:
    """Runs collectives of one communicator through memory shared on its nodes.

    The methods are collective: same order, sizes, dtypes and ops on every rank. Tensors are contiguous, of any shape,
    on the CPU and checked by the caller; `send` may be `recv`. A result is visible when the method returns.
    PREMUL_SUM expects the factor already applied. Construction, as of `NodeWindow`, and `close` are collective too.
    """

    def __init__(self, places: Places, communicator: Communicator) -> None:
        self.places, self._poll = places, communicator.poll
        self.window: NodeWindow = None if places.is_flat else NodeWindow(places, communicator)  # type: ignore[assignment]
        self._rank, self._ranks = places.comm.Get_rank(), places.comm.Get_size()
        node = places.ranks[places.here]
        self._local, self._size = node.index(self._rank), len(node)
        self._across: MPI.Intracomm | None = None  # of the ranks with the same local index; None on one node
        if places.nodes > 1:
            self._across = MPI.Intracomm(places.comm.Split(self._local, key=places.here))
            communicator.derived.append(self._across)  # so that it is revoked with it
        self._direct_bytes = DIRECT_BYTES // self._size
        self._direct_half_bytes = DIRECT_HALF_BYTES_OF_TWO if self._size == 2 else DIRECT_HALF_BYTES
        self._kept: dict[str, torch.Tensor] = {}
        self._fold_of = cache(Fold)
        self._slices = lru_cache(KEPT_SLICES)(Slices)
        self._beginnings = lru_cache(KEPT_SLICES)(NodeWindow.beginnings)

    # -- what all calls share ------------------------------------------------------------------------

    def _call(self, name: str, *arguments: Any) -> None:
        """Call MPI across the nodes.

        Under ULFM by the nonblocking function: Open MPI 5.0.11 does not end a blocking one by revocation if a rank of
        it is stopped (all_reduce of 4 MiB on 2 nodes of 2 ranks).
        """
        if not ulfm.is_tolerant():
            getattr(self._across, name)(*arguments)
            return
        request, polled = getattr(self._across, f"I{name.lower()}")(*arguments), float("-inf")
        try:
            while True:  # without naps, like MPI's own waits: MPI moves data inside its calls
                if (now := time.monotonic()) - polled > POLL_SECONDS:
                    polled = now
                    self._poll()
                if request.Test():
                    return
                os.sched_yield()
        except BaseException:
            ulfm.UNFINISHED.append((request, arguments))
            raise

    def _memory(self, use: str, rows: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory that is kept between calls: the system clears new pages more slowly than MPI fills them."""
        nbytes = rows * numel * dtype.itemsize
        kept = self._kept.get(use)
        if kept is None or kept.numel() < nbytes:
            kept = self._kept[use] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return kept[:nbytes].view(dtype).view(rows, numel)

    def _fold_by_level(self, whole: Fold) -> tuple[Fold, Fold]:
        """Return the fold within a node, and the one that combines the nodes' results.

        An average is divided at the end, except for half types, which are rounded in between: their sum may exceed the
        largest float16.
        """
        undivided = self._fold_of(whole.dtype, whole.op, 0)
        is_divided_before = whole.wide is not None and self.window is not None
        return (whole, undivided) if is_divided_before else (undivided, whole)

    def _divide(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Divide a tensor among the ranks of a node."""
        line = max(1, LINE_BYTES // flat.itemsize)
        share = -(-flat.numel() // (self._size * line)) * line
        return [flat[i * share : (i + 1) * share] for i in range(self._size)]

    def _reduce(self, fold: Fold, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Reduce a part of the node's tensors for each of its ranks; `out` gets this rank's, and may be its part."""
        if self.window is None:
            fold.reduce(parts, out)
        else:
            slices = self._slices(self.window, fold, min(parts[0].nbytes, CHUNK_BYTES))
            slices.reduce_scatter(*places_of(parts), parts[self._local], out)

    # -- reductions ----------------------------------------------------------------------------------

    def all_reduce(self, send: torch.Tensor, recv: torch.Tensor, op: Any) -> None:
        """Reduce `send` of all ranks into `recv` of all ranks (MPI_Allreduce)."""
        fold = self._fold_of(send.dtype, name_of(op), self._ranks)
        if fold.dtype is not send.dtype:
            send, recv = send.view(fold.dtype), recv.view(fold.dtype)
        if send.dim() != 1:
            send, recv = send.view(-1), recv.view(-1)
        if self._across is not None:
            self._all_reduce_between(send, recv, *self._fold_by_level(fold))
        elif send.nbytes <= (self._direct_bytes if fold.wide is None else self._direct_half_bytes):
            self._all_reduce_direct(send, recv, fold)
        else:
            self._all_reduce_by_slices(send, recv, fold)

    def _all_reduce_direct(self, send: torch.Tensor, recv: torch.Tensor, fold: Fold) -> None:
        window, turn = self.window, self.window.turn
        parts = self._beginnings(window, send.nbytes, fold.dtype)[turn]
        window.wait(window.free[turn])
        memmove(window.addresses[turn][self._local], send.data_ptr(), send.nbytes)
        step = window.publish()
        window.free[turn] = step + 1
        window.turn = (turn + 1) % SLOTS
        window.wait(step)
        fold.reduce(parts, recv)

    def _all_reduce_by_slices(self, send: torch.Tensor, recv: torch.Tensor, fold: Fold) -> None:
        window, rank, ranks = self.window, self._local, self._size
        size, item, source, target = send.nbytes, send.itemsize, send.data_ptr(), recv.data_ptr()
        pieces = ranks * -(-size // min(SLOT_BYTES, max(CHUNK_BYTES, size // 4)))
        slices = self._slices(window, fold, -(-size // pieces))
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
                # into the caller's own memory, whose cache lines this core has, and copied on: to write sums to lines
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

    def _all_reduce_between(self, send: torch.Tensor, recv: torch.Tensor, inner: Fold, outer: Fold) -> None:
        step = PIECE_BYTES // send.itemsize * self._size
        for low in range(0, send.numel(), step):
            source, target = send[low : low + step], recv[low : low + step]
            if self.window is None:
                self._combine(source, target, outer)
                continue
            parts = self._divide(target)
            own = parts[self._local]
            self._reduce(inner, self._divide(source), own)
            if own.numel():
                self._combine(own, own, outer)
            self.window.collect(*places_of(parts), CHUNK_BYTES)

    def _combine(self, source: torch.Tensor, target: torch.Tensor, fold: Fold) -> None:
        """Reduce `source` of all nodes into `target`, which may be the same memory."""
        known = native_op(fold)
        if known is not None:
            if source is not target:
                target.copy_(source)
            self._call("Allreduce", MPI.IN_PLACE, [memory(target), known[0]], known[1])
            fold.finish(target)
            return
        nodes, here, item, numel = self.places.nodes, self.places.here, source.itemsize, source.numel()
        line = max(1, LINE_BYTES // item)
        share = -(-numel // (nodes * line)) * line
        bounds = [min(numel, node * share) for node in range(nodes + 1)]
        starts = [low * item for low in bounds[:-1]]
        lengths = [(high - low) * item for low, high in pairwise(bounds)]
        own = target[bounds[here] : bounds[here + 1]]
        inbox = self._memory("inbox", nodes, own.numel(), own.dtype)
        arriving = [[own.nbytes] * nodes, [node * own.nbytes for node in range(nodes)]]
        self._call("Alltoallv", [memory(source), lengths, starts, BYTE], [memory(inbox), *arriving, BYTE])
        fold.reduce(list(inbox), own)
        self._call("Allgatherv", MPI.IN_PLACE, [memory(target), lengths, starts, BYTE])

    def reduce_scatter_single(self, send: torch.Tensor | TensorList, recv: torch.Tensor, op: Any) -> None:
        """Reduce block r of all ranks' `send` into `recv` of rank r (MPI_Reduce_scatter_block).

        On one node `send` may be a list.
        """
        fold = self._fold_of(send.dtype, name_of(op), self._ranks)
        nbytes, recv = recv.nbytes, recv.view(fold.dtype).view(-1)
        if self._across is not None:
            assert isinstance(send, torch.Tensor)
            self._reduce_scatter_between(send, recv, *self._fold_by_level(fold))
            return
        if isinstance(send, TensorList):
            places, own = send.addresses, send.tensors[self._rank]
        else:
            places, own = (
                [send.data_ptr() + r * nbytes for r in range(self._size)],
                send.view(self._size, -1)[self._rank],
            )
        slices = self._slices(self.window, fold, nbytes)
        slices.reduce_scatter(places, [nbytes] * self._size, own.view(-1).view(fold.dtype), recv)

    def _reduce_scatter_between(self, send: torch.Tensor, recv: torch.Tensor, inner: Fold, outer: Fold) -> None:
        blocks = send.view(inner.dtype).view(self._ranks, -1)
        nodes = self.places.nodes
        step = max(LINE_BYTES, PIECE_BYTES // nodes) // recv.itemsize
        for low in range(0, recv.numel(), step):
            out = recv[low : low + step]
            stage = self._memory("stage", nodes, out.numel(), out.dtype)
            for ranks, row in zip(self.places.ranks, stage, strict=True):
                self._reduce(inner, [blocks[rank][low : low + step] for rank in ranks], row)
            inbox = self._memory("inbox", nodes, out.numel(), out.dtype)
            self._call("Alltoall", [memory(stage), BYTE], [memory(inbox), BYTE])
            outer.reduce(list(inbox), out)

    # -- moves ---------------------------------------------------------------------------------------

    def all_gather_single(self, send: torch.Tensor, recv: torch.Tensor) -> None:
        """Concatenate `send` of all ranks in `recv` of all ranks (MPI_Allgather); `send` may be its own place there."""
        nbytes, source, target = send.nbytes, send.data_ptr(), recv.data_ptr()
        places = [target + r * nbytes for r in range(self._ranks)]
        if places[self._rank] != source:
            memmove(places[self._rank], source, nbytes)
            places[self._rank] = source  # it is in this core's cache
        if self._across is not None:
            peers = [ranks[self._local] for ranks in self.places.ranks]
            count, unit = run(nbytes)
            whole = unit.Create_contiguous(count).Commit()
            self._call("Allgatherv", MPI.IN_PLACE, [memory(recv), [1] * len(peers), peers, whole])
            whole.Free()
        chunk = SLOT_BYTES if self._across is None else CHUNK_BYTES
        for ranks in self.places.ranks:
            self.window.collect([places[rank] for rank in ranks], [nbytes] * self._size, chunk)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy `tensor` of one rank to all (MPI_Bcast)."""
        chunk = min(SLOT_BYTES, max(CHUNK_BYTES // 4, tensor.nbytes // 8))
        if self._across is None:
            self.window.share(root, tensor.data_ptr(), tensor.nbytes, chunk)
            return
        window, ranks, here = self.window, self.places.ranks, self.places.here
        first = next(node for node, each in enumerate(ranks) if root in each)
        flat, step = tensor.view(-1).view(torch.uint8), PIECE_BYTES * self._size
        for low in range(0, flat.numel(), step):
            target = flat[low : low + step]
            parts = self._divide(target)
            if here == first:
                window.share(ranks[here].index(root), target.data_ptr(), target.nbytes, CHUNK_BYTES)
            if (own := parts[self._local]).numel():
                self._call("Bcast", [memory(own), BYTE], first)
            if here != first:
                window.collect(*places_of(parts), CHUNK_BYTES)

    def close(self) -> None:
        """Close the window, and free the communicators made here; may be called again."""
        self._slices.cache_clear()
        self._beginnings.cache_clear()
        if self._across:
            self._across.Free()
        if self.window is not None:
            self.window.close()
        elif self.places.node:
            self.places.node.Free()
