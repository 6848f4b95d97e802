"""All-reduce of one slice across nodes: each node has reduced its own, and they are combined piece by piece.

A piece is divided among the nodes: each sends the others their shares of it, one after another (`messages.Turns`), adds
up the shares that it gets in the order of the nodes, and sends the sum back. This moves 2 S (N - 1) / N bytes of S a
node, the least that there can be, in two steps, in the tensors' own dtype. Half types are added in float32: a share is
rounded once as a node's sum (not at all if the node has one rank), and the result once, where a ring would round at
each of its N - 1 steps; it takes as long as a ring.

On more than `thresholds.FEW_NODES`, `MPI_Allreduce` combines a slice whose shares would be small (`MPISlices`).
Half types then go through an op of our own, which rounds at each of MPI's steps; so do MIN and MAX of floats, because
MPI leaves NaN undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.datatypes import DATATYPES
from hpcdist.backends.mpi.node.arithmetic import Fold
from hpcdist.backends.mpi.node.messages import Inbox, Messages, Pipeline, Spans, Turns
from hpcdist.backends.mpi.node.window import LINE_BYTES
from hpcdist.backends.mpi.process import ulfm
from hpcdist.backends.mpi.reductions import mpi_op, wide
from hpcdist.core.buffers import as_bytes

FOLD_BYTES = 256 << 10  # of a share that are added up at a time: those of four nodes stay in a core's second cache


class Slices:
    """An all-reduce of one slice over the nodes, under way.

    The shares of the first pieces have the first turns, then sums of one piece and shares of another alternate, so that
    a sum is there when its turn comes.

    Args:
        messages: of the call.
        pipeline: of the call.
        inbox: memory for the shares that arrive.
        ranks: who has this slice on each node, as ranks of the communicator of the messages.
        here: index of this rank's node.
        values: the slice, contiguous; its sum over this node goes in, and the result comes out.
        fold: combines the nodes' sums.
    """

    def __init__(
        self,
        messages: Messages,
        pipeline: Pipeline,
        inbox: Inbox,
        ranks: Sequence[int],
        here: int,
        values: torch.Tensor,
        fold: Fold,
    ) -> None:
        nodes, length, line = len(ranks), values.numel(), max(1, LINE_BYTES // values.itemsize)
        self._messages, self._ranks, self._here, self._values, self._fold = messages, ranks, here, values, fold
        self._pieces = max(1, -(-values.nbytes // (nodes * pipeline.turn)))
        self._share = -(-length // (self._pieces * nodes * line)) * line  # elements
        self._early = min(pipeline.early, self._pieces)
        self._inbox = inbox.take(self._early, nodes - 1, self._share, values.dtype)
        self._block = FOLD_BYTES // values.itemsize
        self._scratch = fold.scratch(min(self._share, self._block)) if fold.needs_scratch(nodes) else None
        self._reduced = self._folded = 0  # elements that the node has reduced; pieces added up
        self._turns = Turns(messages, pipeline, 2 * self._pieces * (nodes - 1), self._sends, self._receives, self._add)
        self._turns.advance()

    def _turn(self, turn: int) -> tuple[int, bool, int]:
        """Return whose turn it is: the piece, whether sums go round, how many nodes ahead the receiver is."""
        block, distance = divmod(turn, len(self._ranks) - 1)
        alternating, at_end = block - self._early, block >= 2 * self._pieces - self._early
        if block < self._early or (alternating % 2 and not at_end):
            return min(block, self._early + alternating // 2), False, distance + 1
        return block - self._pieces if at_end else alternating // 2, True, distance + 1

    def _end_of(self, piece: int, is_sum: bool) -> int:
        """Return the number of turns until all shares of a piece have been sent, or its sums."""
        first = self._early + 2 * piece
        block = min(first, self._pieces + piece) if is_sum else max(piece, first - 2 * self._early + 1)
        return (block + 1) * (len(self._ranks) - 1)

    def _part(self, piece: int, node: int) -> torch.Tensor:
        begin = (piece * len(self._ranks) + node) * self._share
        return self._values[begin : begin + self._share]

    def _sends(self, turn: int) -> Spans | None:
        piece, is_sum, distance = self._turn(turn)
        node = (self._here + distance) % len(self._ranks)
        if self._folded <= piece if is_sum else self._reduced < self._bound(piece):
            return None
        part = self._part(piece, self._here if is_sum else node)
        return [(self._ranks[node], part.data_ptr(), part.nbytes)]

    def _receives(self, turn: int) -> Spans | None:
        piece, is_sum, distance = self._turn(turn)
        node = (self._here - distance) % len(self._ranks)
        if self._turns.left < self._end_of(piece, False) if is_sum else self._folded <= piece - self._early:
            return None
        part = self._part(piece, node if is_sum else self._here)
        place = part if is_sum else self._inbox[piece % self._early, -distance]
        return [(self._ranks[node], place.data_ptr(), part.nbytes)]

    def _bound(self, piece: int) -> int:
        return min(self._values.numel(), (piece + 1) * len(self._ranks) * self._share)

    def ready(self, length: int) -> None:
        """Send what is due of the first elements, whose sum over this node is there."""
        self._reduced = length
        self._turns.advance()

    def _add(self) -> None:
        """Add up the pieces whose shares are all here."""
        while (
            self._folded < self._pieces
            and self._reduced >= self._bound(self._folded)
            and self._turns.done >= self._end_of(self._folded, False)
        ):
            own = self._part(self._folded, self._here)
            inbox = self._inbox[self._folded % self._early, :, : own.numel()]
            for low in range(0, own.numel(), self._block):
                parts = [part[low : low + self._block] for part in (own, *inbox)]
                self._fold.reduce(parts, parts[0], self._scratch)
            self._folded += 1

    def wait(self, length: int) -> None:
        """Wait until the first elements are those of the result."""
        end = self._end_of(-(-length // (len(self._ranks) * self._share)) - 1, True)
        self._messages.wait(lambda: self._turns.done >= end)


class MPISlices:
    """The same by MPI_Allreduce, for many nodes.

    Args:
        messages: of the call.
        values: as for `Slices`.
        reducer: combines the nodes' sums.
    """

    def __init__(self, messages: Messages, values: torch.Tensor, reducer: Reducer) -> None:
        self._messages, self._values, self._reducer = messages, values, reducer
        self._done = 0

    def ready(self, length: int) -> None:
        """Send nothing yet."""

    def wait(self, length: int) -> None:
        """Reduce the first elements, as far as they have not been."""
        part = self._values[self._done : length]
        if part.numel():
            self._done = length
            self._reducer.reduce(part, self._messages)


class Reducer:
    """MPI's datatype and op for a fold across nodes.

    Args:
        comm: one rank of each node; this object does not own it.
        fold: combines the nodes' sums.
    """

    def __init__(self, comm: MPI.Intracomm, fold: Fold) -> None:
        self._comm, self._fold = comm, fold
        self._owned: tuple[MPI.Op, MPI.Datatype] | None = None
        is_ordered = fold.op in ("MIN", "MAX") and fold.dtype.is_floating_point
        if fold.dtype in DATATYPES and not is_ordered and wide(fold.dtype, fold.op) is None:
            self._op = mpi_op(fold.dtype, fold.op)
            self._type = DATATYPES[fold.dtype]
        else:
            self._type = MPI.BYTE.Create_contiguous(fold.dtype.itemsize).Commit()
            self._op = MPI.Op.Create(self._combine, commute=True)
            self._owned = (self._op, self._type)

    def _combine(self, incoming: Any, inout: Any, _: MPI.Datatype) -> None:
        a = torch.frombuffer(incoming, dtype=self._fold.dtype)
        b = torch.frombuffer(inout, dtype=self._fold.dtype)
        self._fold.combine(a, b, out=b)

    def reduce(self, values: torch.Tensor, messages: Messages) -> None:
        """Reduce a contiguous slice in place; every rank of the communicator calls with the same length.

        Under ULFM it is `MPI_Iallreduce` and a loop of tests: Open MPI 5.0.11 does not end a blocking one by revocation
        if a rank of it is stopped (4 MiB on 2 nodes of 2 ranks).
        """
        described = [as_bytes(values).numpy(), values.numel(), self._type]
        if ulfm.is_tolerant():
            messages.follow(self._comm.Iallreduce(MPI.IN_PLACE, described, self._op))
            messages.finish()
        else:
            self._comm.Allreduce(MPI.IN_PLACE, described, self._op)
        self._fold.finish(values)

    def close(self) -> None:
        """Free the op and type that MPI did not bring along."""
        if self._owned is not None:
            op, datatype = self._owned
            self._owned = None
            op.Free()
            datatype.Free()
