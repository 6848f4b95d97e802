"""How does a collective run through the memory that the ranks of one node share?

Each method is one rhythm on the window's three slots: put my part, publish the step, wait for the mates' step, read.

- Small all_reduce ("direct"): every rank puts all of its tensor, waits once and reduces everything itself, always in
  rank order, so that all ranks hold the same bits. One synchronisation, P - 1 additions of the whole tensor.
- Large all_reduce ("sliced"): in chunks; rank r owns slice r of a chunk. Each rank puts what others own, reduces its
  own slice from everybody's parts, puts the result where its own slice lies, and collects the other results. While
  mates still collect chunk c-1, chunk c is being reduced and chunk c+1 already lies in the window.
  Several nodes: the slice is reduced in the node, all-reduced across nodes on a communicator with one rank of each
  node (all slices at once, each by its own rank), then collected in the node. Nodes with unequal numbers of ranks
  have as many slices as the smallest node has ranks; further ranks put and collect.
- broadcast, all_gather_single, all_to_all_single, reduce_scatter_single: put, publish, wait, read; one step a chunk.

When may a slot be overwritten? `_free[slot]` is the step that every mate must have published first. A rank publishes
step t + 1 only after the reads of step t, so this is t + 1 in the plain rhythm, t + 2 where a rank puts its next chunk
before it reads. Slots are used in turn, also from one collective to the next, so a rank only ever waits for steps
smaller than the one it is about to publish: no circle of waiting can arise. In the sliced rhythm a rank that puts
chunk c + 3 in the slot of chunk c has waited for all results of chunk c, so all reads of its parts are over; it
overwrites its result of chunk c only after all have published chunk c + 3, which they do after collecting chunk c.
For that, slices lie at the same place in every chunk: chunks are of equal size, and the last is cut short at its end.

Data moves by `memmove` on addresses, which takes 0.3 µs for the call, releases the GIL and knows no dtype; sums are
torch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from hpcdist.backends.mpi.node_across import AcrossNodes
from hpcdist.backends.mpi.node_arithmetic import Fold, Scratch
from hpcdist.backends.mpi.node_slots import NodeSlots
from hpcdist.backends.mpi.node_window import SLOT_BYTES, SLOTS

LINE_BYTES = 64  # slices begin on cache lines, so that no line has two writers
CHUNK_BYTES = 512 << 10  # smallest chunk; a message of four chunks or more takes larger ones
WIDENED_BYTES = 128 << 10  # largest slice that is widened to be summed: twice that, twice, stays in a core's cache
CHUNK_BYTES_OF_TWO = 1 << 20  # largest chunk of two ranks; three and more use the whole slot

_move = ctypes.memmove


class NodeShared(NodeSlots):
    """Runs collectives of one communicator through memory shared on the node.

    The methods are collective: same order, sizes, dtypes and ops on every rank. Tensors are contiguous, of any shape,
    on the CPU and checked by the caller; `send` may be `recv`. A result is visible when the method returns.
    PREMUL_SUM expects the factor already applied.
    """

    def all_reduce(self, send: torch.Tensor, recv: torch.Tensor, op: Any) -> None:
        """Reduce `send` of all ranks into `recv` of all ranks (MPI_Allreduce).

        Args:
            send: this rank's contribution.
            recv: the result, same dtype and length.
            op: a torch.distributed.ReduceOp.

        Raises:
            TypeError: the dtype has no such reduction.
        """
        fold = self._fold(send.dtype, op)
        if fold.dtype is not send.dtype:
            send, recv = send.view(fold.dtype), recv.view(fold.dtype)
        if send.dim() != 1:
            send, recv = send.view(-1), recv.view(-1)
        size = send.nbytes
        if size <= (self._direct_bytes if fold.wide is None else self._direct_half_bytes):
            self._all_reduce_direct(send, recv, fold)
        else:
            self._all_reduce_sliced(send, recv, fold, size)

    def _plan_direct(self, numel: int, dtype: torch.dtype) -> Any:
        size = numel * dtype.itemsize
        return [[part[:size].view(dtype) for part in slot] for slot in self._slots]

    def _all_reduce_direct(self, send: torch.Tensor, recv: torch.Tensor, fold: Fold) -> None:
        window, numel, turn = self.window, send.numel(), self._turn
        parts = self._plan(("direct", numel, fold.dtype), self._plan_direct)[turn]
        window.wait(self._free[turn])
        _move(self._addresses[turn][self.rank], send.data_ptr(), send.nbytes)
        step = window.publish()
        self._free[turn] = step + 1
        self._turn = (turn + 1) % SLOTS
        window.wait(step)
        fold.reduce(parts, recv, self._accumulator(fold, self.size, numel))

    def _plan_sliced(self, numel: int, whole: int, dtype: torch.dtype) -> Any:
        """Say who owns what of a chunk of `numel` elements, where a full chunk has `whole`."""
        rank, owners = self.rank, self._owners
        line = max(1, LINE_BYTES // dtype.itemsize)
        share = -(-whole // (owners * line)) * line
        bounds = [min(numel, r * share) if r < owners else numel for r in range(self.size + 1)]
        begin, end = bounds[rank], bounds[rank + 1]
        slots = []
        for slot in self._slots:
            views = [part[: numel * dtype.itemsize].view(dtype) for part in slot]
            slots.append([views[r][begin:end] for r in self._mates])
        sizes = [(r, bounds[r] * dtype.itemsize, (bounds[r + 1] - bounds[r]) * dtype.itemsize) for r in range(owners)]
        others = [piece for piece in sizes if piece[0] != rank and piece[2]]
        return begin, end, [begin * dtype.itemsize, end * dtype.itemsize], others, slots

    def _chunk_bytes(self, size: int, fold: Fold) -> int:
        # all nodes must cut alike, whatever their number of ranks
        largest = CHUNK_BYTES_OF_TWO if self.world_size == 2 else SLOT_BYTES
        if fold.wide is not None and self.world_size > 2:
            largest = min(largest, self._owners * WIDENED_BYTES)
        count = -(-size // min(largest, max(CHUNK_BYTES, size // 4)))
        return -(-size // (count * LINE_BYTES)) * LINE_BYTES

    def _all_reduce_sliced(self, send: torch.Tensor, recv: torch.Tensor, fold: Fold, size: int) -> None:
        window, rank, addresses = self.window, self.rank, self._addresses
        itemsize, numel = fold.dtype.itemsize, send.numel()
        chunk = self._chunk_bytes(size, fold)
        count = -(-size // chunk)
        stride = chunk // itemsize
        whole = self._plan(("sliced", stride, stride, fold.dtype), self._plan_sliced)
        rest = self._plan(("sliced", numel - (count - 1) * stride, stride, fold.dtype), self._plan_sliced)
        scratch = self._accumulator(fold, self.size, whole[1] - whole[0])
        across = self._across_nodes(fold)
        source, target, first = send.data_ptr(), recv.data_ptr(), self._turn
        begin, end = whole[0], whole[1]

        def own(tensor: torch.Tensor) -> list[torch.Tensor]:
            slices = [tensor[i * stride + begin : i * stride + end] for i in range(count - 1)]
            return [*slices, tensor[(count - 1) * stride + rest[0] : min(numel, (count - 1) * stride + rest[1])]]

        own_parts = own(send)
        own_results = own_parts if send is recv else own(recv)

        def put(c: int) -> int:
            plan = whole if c < count - 1 else rest
            low, high = plan[2]
            base, here = addresses[(first + c) % SLOTS][rank], source + c * chunk
            length = chunk if c < count - 1 else size - c * chunk
            if c < SLOTS:
                window.wait(self._free[(first + c) % SLOTS])
            if low:
                _move(base, here, low)
            if high < length:
                _move(base + high, here + high, length - high)
            return window.publish()

        def collect(c: int, step: int) -> None:
            others = (whole if c < count - 1 else rest)[3]
            slot, there = addresses[(first + c) % SLOTS], target + c * chunk
            window.wait(step)
            for r, offset, length in others:
                _move(there + offset, slot[r] + offset, length)

        step, reduced = put(0), 0
        for c in range(count):
            following = put(c + 1) if c + 1 < count else 0
            window.wait(step)
            plan = whole if c < count - 1 else rest
            (low, high), slot = plan[2], (first + c) % SLOTS
            if low < high:
                # into the caller's own memory, whose lines this core has, and on from there: to write sums to lines
                # that mates have read costs a tenth of the whole
                parts, result = [own_parts[c], *plan[4][slot]], own_results[c]
                if across is None:
                    fold.reduce(parts, result, scratch)
                else:
                    self._reduce_across(fold, across, parts, result, scratch)
                _move(addresses[slot][rank] + low, target + c * chunk + low, high - low)
            done = window.publish()
            if c:
                collect(c - 1, reduced)
            step, reduced = following, done
        collect(count - 1, reduced)
        self._turn = (first + count) % SLOTS
        self._free = [window.publish()] * SLOTS

    def _across_nodes(self, fold: Fold) -> AcrossNodes | None:
        if self._across is None:
            return None
        reducer = self._reducers.get(fold)
        if reducer is None:
            reducer = self._reducers[fold] = AcrossNodes(self._across, fold)
        return reducer

    def _reduce_across(
        self,
        fold: Fold,
        across: AcrossNodes,
        parts: list[torch.Tensor],
        result: torch.Tensor,
        scratch: Scratch | None,
    ) -> None:
        length = result.numel()
        total = result if scratch is None else scratch[0][:length]
        fold.accumulate(parts, total, None if scratch is None else scratch[1][:length])
        across.reduce(total)
        fold.finish(total)
        if scratch is not None:
            result.copy_(total)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy `tensor` of one rank to all (MPI_Bcast); single node.

        Args:
            tensor: read on `root`, written on the others.
            root: a rank of the communicator.
        """
        window, address, size = self.window, tensor.data_ptr(), tensor.nbytes
        chunk = min(SLOT_BYTES, max(CHUNK_BYTES // 4, size // 8))
        for offset in range(0, size, chunk):
            turn, length = self._turn, min(chunk, size - offset)
            if self.rank == root:
                window.wait(self._free[turn])
                _move(self._addresses[turn][root], address + offset, length)
                step = window.publish()
            else:
                step = window.publish()
                window.wait_for(root, step)
                _move(address + offset, self._addresses[turn][root], length)
            self._free[turn] = step + 1
            self._turn = (turn + 1) % SLOTS

    def _exchange(self, block: int, put: Callable[[int, int, int], None], get: Callable[..., None], per: int) -> None:
        """Run put and get over all chunks of a block, each rank one chunk ahead of what it reads."""
        window = self.window
        chunk = min(SLOT_BYTES // per // LINE_BYTES * LINE_BYTES, block)
        count = -(-block // chunk)

        def publish(c: int) -> tuple[int, int, int, int]:
            turn, offset = self._turn, c * chunk
            length = min(chunk, block - offset)
            window.wait(self._free[turn])
            put(turn, offset, length)
            step = window.publish()
            self._free[turn] = step + 2
            self._turn = (turn + 1) % SLOTS
            return step, turn, offset, length

        ahead = publish(0)
        for c in range(count):
            step, turn, offset, length = ahead
            if c + 1 < count:
                ahead = publish(c + 1)
            window.wait(step)
            get(turn, offset, length)
        self._free[turn] = step + 1

    def all_gather_single(self, send: torch.Tensor, recv: torch.Tensor) -> None:
        """Concatenate `send` of all ranks in `recv` of all ranks (MPI_Allgather); single node.

        Args:
            send: this rank's part; it may be its own place in `recv`.
            recv: world size times as long, in rank order.
        """
        addresses, rank, block = self._addresses, self.rank, send.nbytes
        source, target = send.data_ptr(), recv.data_ptr()
        if target + rank * block != source:
            _move(target + rank * block, source, block)

        def put(turn: int, offset: int, length: int) -> None:
            _move(addresses[turn][rank], source + offset, length)

        def get(turn: int, offset: int, length: int) -> None:
            slot = addresses[turn]
            for r in self._mates:
                _move(target + r * block + offset, slot[r], length)

        self._exchange(block, put, get, 1)

    def _put_blocks(self, source: int, block: int) -> Callable[[int, int, int], None]:
        addresses, rank, size = self._addresses, self.rank, self.size

        def put(turn: int, offset: int, length: int) -> None:
            base = addresses[turn][rank]
            if length == block:  # the blocks follow one another here as in the window
                if rank:
                    _move(base, source, rank * block)
                if rank + 1 < size:
                    after = (rank + 1) * block
                    _move(base + after, source + after, (size - rank - 1) * block)
                return
            for r in self._mates:
                _move(base + r * length, source + r * block + offset, length)

        return put

    def all_to_all_single(self, send: torch.Tensor, recv: torch.Tensor) -> None:
        """Send block r of `send` to rank r and receive its block for this rank (MPI_Alltoall); single node.

        Args:
            send: world size blocks of equal length.
            recv: the same shape; block r comes from rank r.
        """
        addresses, rank, block = self._addresses, self.rank, send.nbytes // self.size
        source, target = send.data_ptr(), recv.data_ptr()
        if source != target:
            _move(target + rank * block, source + rank * block, block)

        def get(turn: int, offset: int, length: int) -> None:
            slot = addresses[turn]
            for r in self._mates:
                _move(target + r * block + offset, slot[r] + rank * length, length)

        self._exchange(block, self._put_blocks(source, block), get, self.size)

    def reduce_scatter_single(self, send: torch.Tensor, recv: torch.Tensor, op: Any) -> None:
        """Reduce block r of all ranks' `send` into `recv` of rank r (MPI_Reduce_scatter_block); single node.

        Args:
            send: world size blocks of equal length.
            recv: one block; it may be this rank's own block of `send`.
            op: a torch.distributed.ReduceOp.

        Raises:
            TypeError: the dtype has no such reduction.
        """
        fold = self._fold(send.dtype, op)
        if fold.dtype is not send.dtype:
            send, recv = send.view(fold.dtype), recv.view(fold.dtype)
        send, recv = send.view(-1), recv.view(-1)
        dtype, rank, block = fold.dtype, self.rank, recv.nbytes
        itemsize, numel = dtype.itemsize, recv.numel()
        own = send[rank * numel : (rank + 1) * numel]
        scratch = self._accumulator(fold, self.size, min(numel, SLOT_BYTES // itemsize))

        def get(turn: int, offset: int, length: int) -> None:
            parts = self._plan(("scattered", length, dtype), self._plan_scattered)[turn]
            low, high = offset // itemsize, (offset + length) // itemsize
            fold.reduce([own[low:high], *parts], recv[low:high], scratch)

        self._exchange(block, self._put_blocks(send.data_ptr(), block), get, self.size)

    def _plan_scattered(self, length: int, dtype: torch.dtype) -> Any:
        begin = self.rank * length
        return [[slot[r][begin : begin + length].view(dtype) for r in self._mates] for slot in self._slots]
