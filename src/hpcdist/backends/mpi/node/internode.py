"""All-reduce of one slice across nodes: each node has reduced its own, and they are combined piece by piece.

A piece is divided among the nodes: each sends the others their shares of it, adds up the shares that it gets in the
order of the nodes, and sends the sum back. This moves 2 S (N - 1) / N bytes of S a node, the least that there can be,
in two steps, in the tensors' own dtype. Half types are added in float32: a share is rounded once as a node's sum (not
at all if the node has one rank), and the result once, where a ring would round at each of its N - 1 steps.

Many nodes would have many small shares, so `MPI_Allreduce` takes over beyond `thresholds.MOST_NODES` (`MPISlices`).
Half types then go through an op of our own, which rounds at each of MPI's steps; so do MIN and MAX of floats, because
MPI leaves NaN undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.datatypes import DATATYPES
from hpcdist.backends.mpi.node.arithmetic import WIDER, Fold, Scratch
from hpcdist.backends.mpi.node.messages import Arrivals, Messages
from hpcdist.backends.mpi.process import ulfm
from hpcdist.backends.mpi.reductions import mpi_op
from hpcdist.core.buffers import as_bytes

MESSAGE_BYTES = 256 << 10
AHEAD = 4  # pieces that another node may be ahead of this one
SHARE, SUM = 0, 1  # tags
LINE_BYTES = 64


def cut(length: int, parts: int, line: int) -> list[int]:
    """Return the bounds of a length divided in parts that begin on cache lines."""
    part = -(-length // (parts * line)) * line
    return [min(length, i * part) for i in range(parts + 1)]


class Slices:
    """An all-reduce of one slice over the nodes, under way.

    Args:
        messages: of the call.
        ranks: who has this slice on each node, as ranks of the communicator of the messages.
        here: index of this rank's node.
        values: the slice, contiguous; its sum over this node goes in, and the result comes out.
        fold: combines the nodes' sums.
    """

    def __init__(self, messages: Messages, ranks: Sequence[int], here: int, values: torch.Tensor, fold: Fold) -> None:
        nodes, itemsize, length = len(ranks), values.itemsize, values.numel()
        line = max(1, LINE_BYTES // itemsize)
        self._messages, self._ranks, self._here, self._values, self._fold = messages, ranks, here, values, fold
        count = max(1, -(-values.nbytes // (nodes * MESSAGE_BYTES)))
        piece = -(-length // (count * line)) * line
        self._pieces = [(start, min(length, start + piece)) for start in range(0, length, piece)]
        self._shares = [[low + bound for bound in cut(high - low, nodes, line)] for low, high in self._pieces]
        # the nearest node first, another one for each node, so that nobody gets everything at once
        self._others = [(here + k) % nodes for k in range(1, nodes)]
        largest = cut(piece, nodes, line)[1]
        rows = min(AHEAD, len(self._pieces))
        self._inbox = torch.empty(rows, nodes, largest, dtype=values.dtype, device="cpu")
        self._scratch: Scratch | None = None
        if fold.needs_scratch(nodes):
            assert fold.wide is not None
            total, spare = (torch.empty(largest, dtype=fold.wide, device="cpu") for _ in range(2))
            self._scratch = total, spare
        self._reduced = self._folded = self._whole = 0  # pieces that the node has reduced; added up; complete
        self._sent: list[int] = [0] * nodes  # shares that have left for each node, all before them too
        self._early: list[set[int]] = [set() for _ in ranks]
        base, item = values.data_ptr(), itemsize
        self._incoming, self._sums = {}, {}
        for node in self._others:
            shares = [
                (self._inbox[k % rows, node].data_ptr(), (cuts[here + 1] - cuts[here]) * item)
                for k, cuts in enumerate(self._shares)
            ]
            sums = [(base + cuts[node] * item, (cuts[node + 1] - cuts[node]) * item) for cuts in self._shares]
            self._incoming[node] = Arrivals(messages, ranks[node], SHARE, shares, self._advance)
            self._sums[node] = Arrivals(messages, ranks[node], SUM, sums, self._complete)
        for incoming in self._incoming.values():
            incoming.allow(rows)

    def _address(self, piece: int, node: int) -> tuple[int, int]:
        cuts, item = self._shares[piece], self._values.itemsize
        return self._values.data_ptr() + cuts[node] * item, (cuts[node + 1] - cuts[node]) * item

    def ready(self, length: int) -> None:
        """Send what is due of the first elements, whose sum over this node is there."""
        while self._reduced < len(self._pieces) and self._pieces[self._reduced][1] <= length:
            piece = self._reduced
            self._reduced += 1
            for node in self._others:
                place, nbytes = self._address(piece, node)
                then = partial(self._expect, piece, node)
                if nbytes:
                    self._messages.send(self._ranks[node], SHARE, place, nbytes, then)
                else:
                    then()
            self._advance()

    def _expect(self, piece: int, node: int) -> None:
        """Take the sum of a share where it was sent from, which is free now."""
        early = self._early[node]
        early.add(piece)
        while self._sent[node] in early:
            early.remove(self._sent[node])
            self._sent[node] += 1
        self._sums[node].allow(self._sent[node])

    def _advance(self) -> None:
        """Add up the pieces whose shares are all here, and send the sums."""
        while self._folded < self._reduced and all(each.done > self._folded for each in self._incoming.values()):
            piece = self._folded
            self._folded += 1
            place, nbytes = self._address(piece, self._here)
            if nbytes:
                cuts = self._shares[piece]
                own = self._values[cuts[self._here] : cuts[self._here + 1]]
                inbox = self._inbox[piece % len(self._inbox)]
                parts = [own, *(inbox[node, : own.numel()] for node in self._others)]
                self._fold.reduce(parts, own, self._scratch)
                for node in self._others:
                    self._messages.send(self._ranks[node], SUM, place, nbytes)
            for incoming in self._incoming.values():
                incoming.allow(self._folded + len(self._inbox))
        self._complete()

    def _complete(self) -> None:
        self._whole = min(self._folded, *(each.done for each in self._sums.values()))

    def wait(self, length: int) -> None:
        """Wait until the first elements are those of the result."""
        whole = sum(low < length for low, _ in self._pieces)
        self._messages.wait(lambda: self._whole >= whole)


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
        if fold.dtype in DATATYPES and fold.dtype not in WIDER and not is_ordered:
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
