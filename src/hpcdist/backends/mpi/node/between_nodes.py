"""Collectives of a group on several nodes: shared memory within each node, the site's own MPI between them.

Every node has equally many of the ranks. Those with the same local index have a communicator across the nodes, and one
slice of the data, so that what crosses the network is the least that there can be:

- all_reduce: a node's ranks reduce a slice each, MPI_Allreduce combines it across nodes, all ranks collect all slices.
- reduce_scatter: each rank reduces the blocks of the ranks with its local index, gets those of all nodes for itself by
  MPI_Alltoall, and reduces them. (Open MPI's MPI_Reduce_scatter_block sends twice as much on two nodes.)
- all_gather: MPI_Allgatherv gathers the blocks of the ranks with one local index, and a node's ranks exchange them.
- broadcast: the root's node shares the tensor, MPI_Bcast takes a slice each to the other nodes, whose ranks collect it.

What MPI has no type and op for goes by MPI_Alltoallv: each rank gets its share of every node's slice and reduces them
in the order of the nodes, and MPI_Allgatherv collects the results. These are half types, which so travel in their own
bytes, are added in float32 and rounded once (an MPI_Op would round at each of MPI's steps, and MPICH reduces by ops of
a user in log2 N steps of the whole); MIN and MAX of floats, because MPI leaves NaN undefined; and the narrow integers
of ``reductions.wide``. On nodes of one rank, which share no memory, that is all that is done here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from ctypes import memmove
from functools import cache, lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.datatypes import BYTE, DATATYPES, memory, run
from hpcdist.backends.mpi.node.arithmetic import Fold
from hpcdist.backends.mpi.node.places import Places
from hpcdist.backends.mpi.node.slices import Slices
from hpcdist.backends.mpi.node.window import CHUNK_BYTES, KEPT_SLICES, LINE_BYTES, POLL_SECONDS, NodeWindow
from hpcdist.backends.mpi.process import ulfm
from hpcdist.backends.mpi.reductions import mpi_op, wide
from hpcdist.core.reduction import name_of

PIECE_BYTES = 4 << 20  # of a slice that are carried through all steps at a time


def native(fold: Fold) -> tuple[MPI.Datatype, MPI.Op] | None:
    """Return MPI's type and op that combine what a fold does; None if it has none."""
    is_ordered = fold.op in ("MIN", "MAX") and fold.dtype.is_floating_point
    if fold.dtype not in DATATYPES or is_ordered or wide(fold.dtype, fold.op) is not None:
        return None
    return DATATYPES[fold.dtype], mpi_op(fold.dtype, fold.op)


def where(parts: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Return where each part lies, and its bytes."""
    return [part.data_ptr() for part in parts], [part.nbytes for part in parts]


class BetweenNodes:
    """Runs collectives of one communicator whose ranks are on several nodes, on each equally many.

    The methods are those of `NodeShared`, and ask the same of the caller. Construction is collective over the
    communicator, and raises as that of `NodeWindow`. Nodes of one rank have reductions only.
    """

    def __init__(self, places: Places, communicator: Communicator) -> None:
        self._places, self._poll = places, communicator.poll
        self._window = None if places.is_flat else NodeWindow(places, communicator)
        self._rank, self._ranks = places.comm.Get_rank(), places.comm.Get_size()
        node = places.ranks[places.here]
        self._local, self._size = node.index(self._rank), len(node)
        self._across = MPI.Intracomm(places.comm.Split(self._local, key=places.here))
        communicator.derived.append(self._across)  # to be revoked with it
        self._kept: dict[str, torch.Tensor] = {}
        self._fold_of = cache(Fold)
        self._slices = lru_cache(KEPT_SLICES)(partial(Slices, self._window))  # type: ignore[arg-type]  # asked if there is one

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
            while True:  # without naps, as MPI waits: it moves data inside its calls
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
        """Return memory that is kept from call to call: the system takes longer to clear new pages than MPI to fill."""
        nbytes = rows * numel * dtype.itemsize
        kept = self._kept.get(use)
        if kept is None or kept.numel() < nbytes:
            kept = self._kept[use] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return kept[:nbytes].view(dtype).view(rows, numel)

    def _folds(self, dtype: torch.dtype, op: str) -> tuple[Fold, Fold]:
        """Return how to reduce in the node, and how to combine the nodes' results.

        An average is divided at the end, but for half types, which are rounded in between: there the sum may be beyond
        the largest float16.
        """
        whole, undivided = self._fold_of(dtype, op, self._ranks), self._fold_of(dtype, op, 0)
        is_divided_before = whole.wide is not None and self._window is not None
        return (whole, undivided) if is_divided_before else (undivided, whole)

    def _divide(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Divide a tensor among the ranks of a node."""
        line = max(1, LINE_BYTES // flat.itemsize)
        share = -(-flat.numel() // (self._size * line)) * line
        return [flat[i * share : (i + 1) * share] for i in range(self._size)]

    def _reduce(self, fold: Fold, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Reduce a part of the node's tensors for each of its ranks; `out` gets this rank's, and may be its part."""
        if self._window is None:
            fold.reduce(parts, out)
        else:
            slices = self._slices(fold, min(parts[0].nbytes, CHUNK_BYTES))
            slices.reduce_scatter(*where(parts), parts[self._local], out)

    # -- reductions ----------------------------------------------------------------------------------

    def all_reduce(self, send: torch.Tensor, recv: torch.Tensor, op: Any) -> None:
        """Reduce `send` of all ranks into `recv` of all ranks (MPI_Allreduce)."""
        inner, outer = self._folds(send.dtype, name_of(op))
        send, recv = send.view(inner.dtype).view(-1), recv.view(inner.dtype).view(-1)
        step = PIECE_BYTES // send.itemsize * self._size
        for low in range(0, send.numel(), step):
            source, target = send[low : low + step], recv[low : low + step]
            if self._window is None:
                self._combine(source, target, outer)
                continue
            parts = self._divide(target)
            own = parts[self._local]
            self._reduce(inner, self._divide(source), own)
            if own.numel():
                self._combine(own, own, outer)
            self._window.collect(*where(parts), CHUNK_BYTES)

    def _combine(self, source: torch.Tensor, target: torch.Tensor, fold: Fold) -> None:
        """Reduce `source` of all nodes into `target`, which may be the same memory."""
        known = native(fold)
        if known is not None:
            if source is not target:
                target.copy_(source)
            self._call("Allreduce", MPI.IN_PLACE, [memory(target), known[0]], known[1])
            fold.finish(target)
            return
        nodes, here, item, numel = self._places.nodes, self._places.here, source.itemsize, source.numel()
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

    def reduce_scatter_single(self, send: torch.Tensor, recv: torch.Tensor, op: Any) -> None:
        """Reduce block r of all ranks' `send` into `recv` of rank r (MPI_Reduce_scatter_block)."""
        inner, outer = self._folds(send.dtype, name_of(op))
        blocks, recv = send.view(inner.dtype).view(self._ranks, -1), recv.view(inner.dtype).view(-1)
        nodes = self._places.nodes
        step = max(LINE_BYTES, PIECE_BYTES // nodes) // recv.itemsize
        for low in range(0, recv.numel(), step):
            out = recv[low : low + step]
            stage = self._memory("stage", nodes, out.numel(), out.dtype)
            for ranks, row in zip(self._places.ranks, stage, strict=True):
                self._reduce(inner, [blocks[rank][low : low + step] for rank in ranks], row)
            inbox = self._memory("inbox", nodes, out.numel(), out.dtype)
            self._call("Alltoall", [memory(stage), BYTE], [memory(inbox), BYTE])
            outer.reduce(list(inbox), out)

    # -- moves ---------------------------------------------------------------------------------------

    def all_gather_single(self, send: torch.Tensor, recv: torch.Tensor) -> None:
        """Concatenate `send` of all ranks in `recv` of all ranks (MPI_Allgather)."""
        window, blocks = self._window, recv.view(self._ranks, -1).unbind()
        assert window is not None
        if (own := blocks[self._rank].data_ptr()) != send.data_ptr():
            memmove(own, send.data_ptr(), send.nbytes)
        peers = [ranks[self._local] for ranks in self._places.ranks]
        count, unit = run(send.nbytes)
        whole = unit.Create_contiguous(count).Commit()
        self._call("Allgatherv", MPI.IN_PLACE, [memory(recv), [1] * len(peers), peers, whole])
        whole.Free()
        for ranks in self._places.ranks:
            window.collect(*where([blocks[rank] for rank in ranks]), CHUNK_BYTES)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy `tensor` of one rank to all (MPI_Bcast)."""
        window, ranks, here = self._window, self._places.ranks, self._places.here
        assert window is not None
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
                window.collect(*where(parts), CHUNK_BYTES)

    def close(self) -> None:
        """Leave the window, and free the communicators made here, once or often."""
        if self._across == MPI.COMM_NULL:
            return
        self._across.Free()
        self._slices.cache_clear()
        if self._window is not None:
            self._window.close()
        else:
            self._places.node.Free()
