"""Collectives of a group on several nodes, in two levels: shared memory on each node, messages between them.

Each rank of a node exchanges its slice of the data with the ranks in its place on the other nodes, so that what crosses
the network is the least that there can be:

- all_reduce: the node's ranks reduce a slice each, reduce it across nodes (`internode`), and collect all slices.
- reduce_scatter: a node reduces the blocks of all ranks, and sends each to its rank, which adds up those of all nodes.
- all_gather: each rank sends its block to one rank of each other node in turn, which hands it to its mates.
- broadcast: the root's mates pass a slice each along a chain of nodes, chunk by chunk; or, on a few nodes that a fast
  network joins, the root sends long chunks down a binomial tree.

Local rank r of a node of p ranks has to do with the ranks of other nodes whose local rank modulo p is r: nodes may have
unequal numbers of ranks. The levels overlap: while chunks move in the node, messages make progress, also where a rank
waits for its mates. All sizes that decide about messages are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import memmove
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.node.arithmetic import Fold, Scratch, fold_of
from hpcdist.backends.mpi.node.internode import MPISlices, Reducer, Slices
from hpcdist.backends.mpi.node.messages import LONG, SHORT, Arrivals, Inbox, Messages, Pipeline, Spans, Turns
from hpcdist.backends.mpi.node.places import Places
from hpcdist.backends.mpi.node.slots import NodeSlots
from hpcdist.backends.mpi.node.thresholds import FEW_NODES, LEAST_SHARE, MOST_NODES, MOST_OF_FEW, Network
from hpcdist.backends.mpi.node.window import LINE_BYTES, SLOT_BYTES
from hpcdist.core.reduction import name_of

CHUNK_BYTES = 256 << 10  # in the window, and of a message that waits for no turn
AHEAD = 4  # chunks that another node may be ahead of this one


class TwoLevel:
    """Runs collectives of one communicator whose ranks are on several nodes.

    The methods are those of `NodeShared`, and ask the same of the caller. Construction is collective over the
    communicator.

    Args:
        places: where the ranks are; its communicator of the node is taken over.
        made: takes each communicator as soon as it is made.
        poll: called every few milliseconds of waiting; what it raises leaves the collective.
        is_background: tells whether the call under way runs beside the rank's own computation.
        network: between nodes of one rank.

    Raises:
        RuntimeError: shared memory could not be had on some rank; every rank raises.
    """

    def __init__(
        self,
        places: Places,
        made: list[MPI.Comm],
        poll: Callable[[], None],
        is_background: Callable[[], bool],
        network: Network = Network.UNKNOWN,
    ) -> None:
        comm = places.comm
        self.rank = comm.Get_rank()
        self._places, self._poll, self._is_background = places, poll, is_background
        self._is_fast = places.is_flat and network is Network.FAST and places.nodes <= MOST_OF_FEW
        self._slots = None if places.is_flat else NodeSlots(places, poll, is_background)
        self._comm = MPI.Intracomm(comm.Dup())
        made.append(self._comm)
        ranks = places.ranks
        self._local, self._size = ranks[places.here].index(self.rank), len(ranks[places.here])
        self._mates = [r for r in range(self._size) if r != self._local]
        self._owners = min(map(len, ranks))
        self._across: MPI.Intracomm | None = None
        if places.nodes > FEW_NODES:
            color = self._local if self._local < self._owners else MPI.UNDEFINED
            across = comm.Split(color, key=comm.rank)
            self._across = None if across == MPI.COMM_NULL else MPI.Intracomm(across)
            made += [] if self._across is None else [self._across]
        self._reducers: dict[Fold, Reducer] = {}
        self._inbox = Inbox()

    # -- what all calls share ------------------------------------------------------------------------

    @contextmanager
    def _messages(self, *memory: Any) -> Iterator[Messages]:
        """Return the messages of one call, which have ended when the block does."""
        messages = Messages(self._comm, self._poll, self._is_background())
        window = None if self._slots is None else self._slots.window
        if window is not None:
            window.progress = messages.progress
        try:
            yield messages
            messages.finish()
        except BaseException:
            messages.abandon(memory)
            self._inbox = Inbox()
            raise
        finally:
            if window is not None:
                window.progress = window.node.Iprobe

    def _levels(self, dtype: torch.dtype, op: str) -> tuple[Fold, Fold]:
        """Return how to reduce in the node, and how to combine the nodes' results.

        Half types are rounded in between, so an average is divided before: the sum may be beyond the largest float16.
        """
        ranks = self._places.comm.Get_size()
        fold = fold_of(dtype, op, ranks)
        is_divided_before = fold.wide is not None and fold.divisor and self._slots is not None
        return fold, fold_of(dtype, "SUM", ranks) if is_divided_before else fold

    def _reduce_in_node(
        self, fold: Fold, parts: list[torch.Tensor], out: torch.Tensor, scratch: Scratch | None
    ) -> None:
        if self._slots is not None and fold.wide is not None:
            fold.reduce(parts, out, scratch)
        else:
            fold.accumulate(parts, out, None)  # divided once all nodes have been added

    def _exchange(self, block: int, chunk: int, put: Callable[..., None], get: Callable[..., None]) -> None:
        """Run put and get over all chunks of a block, through the window if the node has several ranks."""
        if self._slots is not None:
            self._slots.exchange(block, chunk, put, get)
            return
        for offset in range(0, block, chunk):
            put(0, offset, min(chunk, block - offset))
            get(0, offset, min(chunk, block - offset))

    def _address(self, turn: int, local: int) -> int:
        assert self._slots is not None
        return self._slots.addresses[turn][local]

    def _part(self, turn: int, local: int, begin: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return some bytes of a mate's slot as elements."""
        assert self._slots is not None
        return self._slots.slots[turn][local][begin : begin + length].view(dtype)

    def _scratch(self, fold: Fold, parts: int, numel: int) -> Scratch | None:
        return None if self._slots is None else self._slots.accumulator(fold, parts, numel)

    def _source(self, node: int) -> int:
        """Return the rank of another node that has to do with this one."""
        ranks = self._places.ranks[node]
        return ranks[self._local % len(ranks)]

    def _wards(self, node: int) -> list[int]:
        """Return the ranks of a node that this one has to do with."""
        return self._places.ranks[node][self._local :: self._size]

    def _other_nodes(self) -> list[int]:
        """Return the other nodes, the next one first, so that not all send to the same."""
        nodes, here = self._places.nodes, self._places.here
        return [(here + k) % nodes for k in range(1, nodes)]

    def _pipeline(self, block: int) -> Pipeline:
        """Return how to send blocks of so many bytes; the same on all ranks."""
        return LONG if self._is_fast and block >= LONG.message else SHORT

    def _chunk(self, block: int, pieces: int) -> int:
        """Return the bytes of a chunk if a slot takes so many of them; the same on all ranks."""
        if self._pipeline(block) is LONG:
            return LONG.message
        return min(block, CHUNK_BYTES, SLOT_BYTES // pieces // LINE_BYTES * LINE_BYTES)

    def _chunk_of_turn(self, block: int) -> tuple[Pipeline, int]:
        """Return how to send blocks of so many bytes in turns, and the bytes of a chunk; the same on all ranks."""
        pipeline, chunk = self._pipeline(block), self._chunk(block, self._places.comm.Get_size())
        return pipeline, min(chunk, pipeline.turn) if self._places.is_flat else chunk

    # -- all_reduce ----------------------------------------------------------------------------------

    def all_reduce(self, send: torch.Tensor, recv: torch.Tensor, op: Any) -> None:
        """Reduce `send` of all ranks into `recv` of all ranks (MPI_Allreduce)."""
        inner, outer = self._levels(send.dtype, name_of(op))
        send, recv = send.view(inner.dtype).view(-1), recv.view(inner.dtype).view(-1)
        share = -(-send.nbytes // (self._owners * LINE_BYTES)) * LINE_BYTES  # of a slice; owner r has slice r
        with self._messages(send, recv) as messages:
            slices = self._reduce_slices(messages, send, recv, share, inner, outer)
            self._collect_slices(recv, share, None if slices is None else slices.wait)

    def _bounds(self, share: int, owner: int, total: int) -> tuple[int, int]:
        """Return where in a tensor an owner's slice is, in bytes."""
        return (min(total, owner * share), min(total, (owner + 1) * share)) if owner < self._owners else (total, total)

    def _reduce_slices(
        self, messages: Messages, send: torch.Tensor, recv: torch.Tensor, share: int, inner: Fold, outer: Fold
    ) -> Slices | MPISlices | None:
        """Reduce slices in the node, each chunk of this rank's on its way to the other nodes at once."""
        total, item, local = send.nbytes, send.itemsize, self._local
        begin, end = self._bounds(share, local, total)
        own_send, own = send[begin // item : end // item], recv[begin // item : end // item]
        slices = self._slices(messages, own, outer) if local < self._owners and own.numel() else None
        if self._slots is None:
            if send is not recv:
                memmove(recv.data_ptr(), send.data_ptr(), total)
            if slices is not None:
                slices.ready(own.numel())
            return slices
        scratch = self._scratch(inner, self._size, min(own.numel(), CHUNK_BYTES * 2 // item))
        chunk = min(share, CHUNK_BYTES * 2, SLOT_BYTES // self._owners // LINE_BYTES * LINE_BYTES)
        source = send.data_ptr()

        def put(turn: int, offset: int, length: int) -> None:
            there = self._address(turn, local)
            for owner in range(self._owners):
                low, high = self._bounds(share, owner, total)
                size = min(length, high - low - offset)
                if owner != local and size > 0:
                    memmove(there + owner * chunk, source + low + offset, size)

        def get(turn: int, offset: int, length: int) -> None:
            size = min(length, end - begin - offset)
            if slices is None or size <= 0:
                return
            low, high = offset // item, (offset + size) // item
            parts = [self._part(turn, mate, local * chunk, size, own.dtype) for mate in self._mates]
            self._reduce_in_node(inner, [own_send[low:high], *parts], own[low:high], scratch)
            slices.ready(high)
            messages.progress()

        self._exchange(share, chunk, put, get)
        return slices

    def _slices(self, messages: Messages, own: torch.Tensor, fold: Fold) -> Slices | MPISlices:
        nodes = self._places.nodes
        if self._across is None or (nodes <= MOST_NODES and own.nbytes >= nodes * LEAST_SHARE):
            ranks = [each[self._local] for each in self._places.ranks]
            pipeline = self._pipeline(own.nbytes // nodes)
            return Slices(messages, pipeline, self._inbox, ranks, self._places.here, own, fold)
        reducer = self._reducers.get(fold)
        if reducer is None:
            reducer = self._reducers[fold] = Reducer(self._across, fold)
        return MPISlices(messages, own, reducer)

    def _collect_slices(self, recv: torch.Tensor, share: int, wait: Callable[[int], None] | None) -> None:
        """Hand this rank's slice to its mates, and take theirs.

        Args:
            recv: the whole tensor; this rank's slice of it is complete up to where `wait` has returned.
            share: bytes of a slice.
            wait: waits until that many elements of this rank's slice are complete; None if it has no slice.
        """
        total, item, local, target = recv.nbytes, recv.itemsize, self._local, recv.data_ptr()
        begin, end = self._bounds(share, local, total)
        if self._slots is None:
            if wait is not None:
                wait((end - begin) // item)
            return

        def put(turn: int, offset: int, length: int) -> None:
            size = min(length, end - begin - offset)
            if wait is not None and size > 0:
                wait((offset + size) // item)
                memmove(self._address(turn, local), target + begin + offset, size)

        def get(turn: int, offset: int, length: int) -> None:
            for owner in self._mates:
                low, high = self._bounds(share, owner, total)
                size = min(length, high - low - offset)
                if size > 0:
                    memmove(target + low + offset, self._address(turn, owner), size)

        self._exchange(share, min(share, CHUNK_BYTES * 2, SLOT_BYTES), put, get)

    # -- reduce_scatter ------------------------------------------------------------------------------

    def reduce_scatter_single(self, send: torch.Tensor, recv: torch.Tensor, op: Any) -> None:
        """Reduce block r of all ranks' `send` into `recv` of rank r (MPI_Reduce_scatter_block)."""
        inner, outer = self._levels(send.dtype, name_of(op))
        send, recv = send.view(inner.dtype).view(-1), recv.view(inner.dtype).view(-1)
        block, item, ranks = recv.nbytes, recv.itemsize, self._places.comm.Get_size()
        pipeline, chunk = self._chunk_of_turn(block)
        others = self._other_nodes()
        away = [rank for node in others for rank in self._wards(node)]
        mine = [*away, *self._wards(self._places.here)]  # blocks that this rank reduces: those of others, and its own
        foreign = [rank for rank in range(ranks) if rank not in set(mine)]
        source, numel, width = send.data_ptr(), recv.numel(), chunk // item
        count, rows = -(-block // chunk), min(pipeline.early, -(-block // chunk))
        inbox = self._inbox.take(rows, len(others), width, recv.dtype)
        is_sent_as_it_is = not self._mates and inner is outer
        stages = torch.empty(rows, 0 if is_sent_as_it_is else len(away), width, dtype=recv.dtype, device="cpu")
        scratch = self._scratch(inner, self._size, width)
        outer_scratch = outer.scratch(width) if outer.needs_scratch(len(others) + 1) else None
        reduced = folded = 0

        def sends(turn: int) -> Spans | None:
            index, distance = divmod(turn, len(others))
            if index >= reduced:
                return None
            low, size = index * chunk, min(chunk, block - index * chunk)
            wards = self._wards(others[distance])
            if is_sent_as_it_is:
                return [(rank, source + rank * block + low, size) for rank in wards]
            return [(rank, stages[index % rows, away.index(rank)].data_ptr(), size) for rank in wards]

        def receives(turn: int) -> Spans | None:
            index, distance = divmod(turn, len(others))
            if index >= folded + rows:
                return None
            place = inbox[index % rows, -1 - distance]
            return [(self._source(others[-1 - distance]), place.data_ptr(), min(chunk, block - index * chunk))]

        def add() -> None:
            nonlocal folded
            while folded < reduced and turns.done >= (folded + 1) * len(others):
                own = recv[folded * width : (folded + 1) * width]
                parts = [own, *(inbox[folded % rows, i, : own.numel()] for i in range(len(others)))]
                outer.reduce(parts, own, outer_scratch)
                folded += 1

        def put(turn: int, offset: int, length: int) -> None:
            if self._mates:
                there = self._address(turn, self._local)
                for rank in foreign:
                    memmove(there + rank * chunk, source + rank * block + offset, length)

        def get(turn: int, offset: int, length: int) -> None:
            nonlocal reduced
            low, high = offset // item, (offset + length) // item
            if not is_sent_as_it_is:
                messages.wait(lambda: turns.left >= (reduced - rows + 1) * len(others))  # its stages are free
            for rank in [self.rank] if is_sent_as_it_is else mine:
                part = send[rank * numel + low : rank * numel + high]
                parts = [part, *(self._part(turn, mate, rank * chunk, length, part.dtype) for mate in self._mates)]
                out = recv[low:high] if rank == self.rank else stages[reduced % rows, away.index(rank), : high - low]
                self._reduce_in_node(inner, parts, out, scratch)
            reduced += 1
            turns.advance()
            messages.progress()

        with self._messages(send, recv, inbox, stages) as messages:
            turns = Turns(messages, pipeline, count * len(others), sends, receives, add)
            turns.advance()
            self._exchange(block, chunk, put, get)
            messages.wait(lambda: folded == count)

    # -- all_gather ----------------------------------------------------------------------------------

    def all_gather_single(self, send: torch.Tensor, recv: torch.Tensor) -> None:
        """Concatenate `send` of all ranks in `recv` of all ranks (MPI_Allgather)."""
        block, source, target = send.nbytes, send.data_ptr(), recv.data_ptr()
        pipeline, chunk = self._chunk_of_turn(block)
        own = target + self.rank * block
        if own != source:
            memmove(own, source, block)
        spans = [(offset, min(chunk, block - offset)) for offset in range(0, block, chunk)]
        others = self._other_nodes()
        here = self._places.ranks[self._places.here]
        held = [
            [here[local], *(rank for node in others for rank in self._places.ranks[node][local :: self._size])]
            for local in range(self._size)
        ]  # blocks by the local rank that gets them from elsewhere, or has them

        with self._messages(send, recv) as messages:

            def sends(turn: int) -> Spans:
                index, distance = divmod(turn, len(others))
                low, size = spans[index]
                return [(self._source(others[distance]), source + low, size)]

            def receives(turn: int) -> Spans:
                index, distance = divmod(turn, len(others))
                low, size = spans[index]
                return [(rank, target + rank * block + low, size) for rank in self._wards(others[-1 - distance])]

            turns = Turns(messages, pipeline, len(spans) * len(others), sends, receives)
            turns.advance()

            def put(turn: int, offset: int, length: int) -> None:
                messages.wait(lambda: turns.done >= (offset // chunk + 1) * len(others))
                if self._mates:
                    there = self._address(turn, self._local)
                    for place, rank in enumerate(held[self._local]):
                        memmove(there + place * chunk, target + rank * block + offset, length)

            def get(turn: int, offset: int, length: int) -> None:
                for mate in self._mates:
                    there = self._address(turn, mate)
                    for place, rank in enumerate(held[mate]):
                        memmove(target + rank * block + offset, there + place * chunk, length)

            self._exchange(block, chunk, put, get)

    # -- broadcast -----------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy `tensor` of one rank to all (MPI_Bcast)."""
        size, target, ranks, here = tensor.nbytes, tensor.data_ptr(), self._places.ranks, self._places.here
        first = next(node for node, those in enumerate(ranks) if root in those)
        before, following = self._neighbors(first)
        share = -(-size // (self._owners * LINE_BYTES)) * LINE_BYTES
        chunk = self._chunk(share, self._owners)
        if self._places.is_flat:  # each chunk is one message
            chunk = min(chunk, self._pipeline(share).message)
        begin, end = self._bounds(share, self._local, size)
        after = [ranks[node][self._local] for node in following] if begin < end else []
        spans = [(low, min(chunk, end - low)) for low in range(begin, end, chunk)]

        with self._messages(tensor) as messages:

            def pass_on(index: int) -> None:
                for rank in after if index < len(spans) else []:
                    messages.send(rank, target + spans[index][0], spans[index][1])

            if here == first:
                self._broadcast_in_node(tensor, ranks[here].index(root), share, chunk, pass_on, messages)
                return
            incoming: Arrivals

            def arrived() -> None:
                pass_on(incoming.done - 1)
                incoming.allow(incoming.done + AHEAD)

            senders = ranks[before]
            places = [(target + low, length) for low, length in spans]
            incoming = Arrivals(messages, senders[self._local % len(senders)], places, arrived)
            incoming.allow(AHEAD)

            def wait(nbytes: int) -> None:
                messages.wait(lambda: incoming.done * chunk >= nbytes or incoming.done == len(spans))

            self._collect_slices(tensor.view(-1).view(torch.uint8), share, wait if spans else None)

    def _neighbors(self, first: int) -> tuple[int, list[int]]:
        """Return the node that a broadcast from the first node comes from, and those that it goes on to."""
        nodes, here = self._places.nodes, self._places.here
        distance = (here - first) % nodes
        if not self._is_fast:
            return here - 1, [(here + 1) % nodes] if distance + 1 < nodes else []
        lowest = distance & -distance if distance else 1 << (nodes - 1).bit_length()
        steps = [1 << bit for bit in reversed(range(lowest.bit_length() - 1))]
        return (here - lowest) % nodes, [(here + step) % nodes for step in steps if distance + step < nodes]

    def _broadcast_in_node(
        self,
        tensor: torch.Tensor,
        root: int,
        share: int,
        chunk: int,
        pass_on: Callable[[int], None],
        messages: Messages,
    ) -> None:
        """Copy the root's tensor to its mates, chunk by chunk of all slices; each passes on its own."""
        size, target = tensor.nbytes, tensor.data_ptr()

        def pieces(offset: int, length: int) -> Iterator[tuple[int, int, int]]:
            for owner in range(self._owners):
                low, high = self._bounds(share, owner, size)
                if (piece := min(length, high - low - offset)) > 0:
                    yield owner * chunk, low + offset, piece

        def put(turn: int, offset: int, length: int) -> None:
            if self._local == root:
                pass_on(offset // chunk)
                if self._mates:
                    for there, here, piece in pieces(offset, length):
                        memmove(self._address(turn, root) + there, target + here, piece)

        def get(turn: int, offset: int, length: int) -> None:
            if self._local != root:
                for there, here, piece in pieces(offset, length):
                    memmove(target + here, self._address(turn, root) + there, piece)
                pass_on(offset // chunk)
            messages.progress()

        self._exchange(share, chunk, put, get)

    def close(self) -> None:
        """Leave the window, and free the communicators made here, once or often."""
        if self._comm == MPI.COMM_NULL:
            return
        for reducer in self._reducers.values():
            reducer.close()
        if self._across is not None:
            self._across.Free()
        self._comm.Free()
        if self._slots is not None:
            self._slots.close()
        else:
            self._places.node.Free()
