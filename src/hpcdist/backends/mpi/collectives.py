"""Collectives on tensors over one MPI communicator.

Synchronous calls are MPI's blocking calls on the caller's thread, which have the lowest latency. Moving collectives
move bytes, so every dtype works. The plan (``plans``) chooses MPI's function or node-shared memory; it depends only on
facts that all ranks know. The layout of this rank's tensors in memory decides only about copies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from hpcdist.backends.mpi.bundle import Bundler
from hpcdist.backends.mpi.call_check import CallCheck
from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.datatypes import (
    BYTE,
    COUNT_MAX,
    PIECE,
    address,
    array_on,
    buffer_of_runs,
    memory,
    send_buffer,
)
from hpcdist.backends.mpi.exchange import COPY_MAX, Exchange
from hpcdist.backends.mpi.node.calls import NodeCalls
from hpcdist.backends.mpi.node.thresholds import Thresholds
from hpcdist.backends.mpi.plans import Plan, Plans
from hpcdist.backends.mpi.reductions import READS_IN_PLACE, Bind, Reduction, of_encoded, on_encoded
from hpcdist.backends.mpi.repetition import Prepared, repeat, run_again
from hpcdist.backends.mpi.vectors import FLAT_MAX, VECTORS, KeptMemory, Vectors
from hpcdist.core.buffers import COPIES_KEPT, COPY_KEPT, TensorList, do_overlap, new_memory, overlap
from hpcdist.core.call import Call, Run
from hpcdist.core.call_words import kind_word
from hpcdist.core.reduction import average
from hpcdist.core.table import ALL_REDUCE, BARRIER, EXCHANGES, REDUCE, REDUCE_SCATTER, ROWS, Row, Shape

Divide = Callable[[torch.Tensor], torch.Tensor]
IN_PLACE = MPI.IN_PLACE
HALF = np.dtype(np.uint16)
HALVES = 512  # elements of bfloat16 up to which NumPy fills a float32 copy in 0.2 to 0.6 µs; torch takes 0.8
BARRIER_SAID = kind_word(BARRIER.name)


class Collectives:
    """The collectives of one communicator."""

    def __init__(self, communicator: Communicator, thresholds: Thresholds) -> None:
        comm = communicator.comm
        self._communicator = communicator
        self._comm, self._size = comm, communicator.size
        self._all_reduce = comm.Allreduce
        self._calls = {row: getattr(comm, row.mpi) for row in ROWS.values()}
        self._exchange = Exchange(communicator)
        self._vectors = Vectors(communicator, self._exchange)
        self.plans = Plans(communicator.size, thresholds)
        self.node = NodeCalls(communicator, self.plans)
        self._bundler = Bundler()
        self._encoded = KeptMemory()
        self.check: CallCheck | None = None

    def run(self, call: Call) -> None:
        """Run one collective to its end; CallsDifferError if another rank makes another call."""
        if call.recv is call.send and call.send.__class__ is TensorList:
            listed = call.send

            def run_flat(flat: torch.Tensor) -> None:
                self.run(call._replace(send=flat, recv=flat))

            self._bundler.run(listed.tensors, listed.sizes, listed.dtype, run_flat)
            return
        if self.check is None:
            self.carry_out(call)
            return
        row, send, recv, op, *_ = call
        tensor = recv if send is None else send
        # its word on the call board, without root
        self.check.run(call, BARRIER_SAID if tensor is None else self.plans.of(row, tensor.dtype, op).said)

    def carry_out(self, call: Call) -> None:
        """Run one collective that was checked."""
        row, send, recv, op, root, *_ = call
        try:
            if send is None:
                if row.buffers:
                    self._move(call)
                else:
                    self._comm.Barrier()
            else:
                plan = self.plans.of(row, send.dtype, op)
                nbytes = send.nbytes if recv is None else max(send.nbytes, recv.nbytes)
                is_shared = nbytes >= plan.shared_from and self.node.can_carry(plan, nbytes)
                is_list = row.reduces and send.__class__ is TensorList
                if is_list and not (is_shared and self.node.takes_list(send, recv)):
                    send = self._vectors.flatten(send)
                    call = call._replace(send=send)
                if is_shared:
                    self.node.run(row, send, send if recv is None else recv, op, root)
                elif (how := plan.reduction) is not None:
                    if how.is_direct and send is recv and row is ALL_REDUCE and send.nbytes <= COUNT_MAX:
                        self._all_reduce(  # the shortest way, for latency
                            IN_PLACE, (address(send.data_ptr(), send.nbytes), how.datatype), how.op
                        )
                    else:
                        self._reduce(call, how)
                elif row.buffers == 2:
                    self._move(call)
                else:
                    assert root is not None
                    self._comm.Bcast(send_buffer(send), root)
        except MPI.Exception as error:
            raise self._communicator.failure(row.name, error) from error
        if self._communicator.is_checked:
            self._communicator.check(row.name)

    def is_shared(self, row: Row, dtype: torch.dtype, op: Any, nbytes: int) -> bool:
        """Tell whether calls of this size go through node-shared memory, as far as known before the first call."""
        return nbytes >= self.plans.of(row, dtype, op).shared_from

    # -- reducing ------------------------------------------------------------------------------------

    def _reduce(self, call: Call, how: Reduction) -> None:
        _, send, recv, *_ = call
        if not how.in_memory:
            values = how.before(send, call.op, self._encoded.of)
            reduced = None if recv is None else values
            if recv is not None and call.row.shape is not Shape.SAME:
                reduced = torch.empty(recv.shape, dtype=values.dtype, device="cpu")
            call = call._replace(send=values, recv=reduced)
        self._reduce_in_memory(call, how)
        if recv is not None and (how.averages or not how.in_memory):
            with torch.inference_mode():  # that mode may write both kinds of tensors
                how.after(call.recv, recv, self._size)

    def _reduce_in_memory(self, call: Call, how: Reduction) -> None:
        row, send, recv, _, root, counts, *_ = call
        if send.numel() > COUNT_MAX:
            self._reduce_large(call, how)
            return
        function = self._calls[row]
        if send is recv and not (root and READS_IN_PLACE):
            sendbuf: Any = IN_PLACE
        else:
            if recv is not None and overlap(send, recv):
                send = send.clone()
            sendbuf = [address(send.data_ptr(), send.nbytes), how.datatype]
        recvbuf = None if recv is None else [address(recv.data_ptr(), recv.nbytes), how.datatype]
        if row.rooted:
            function(sendbuf, recvbuf, how.op, root)
        elif row is REDUCE_SCATTER:
            assert counts is not None
            function(sendbuf, recvbuf, counts[0], how.op)
        else:
            function(sendbuf, recvbuf, how.op)

    def _reduce_large(self, call: Call, how: Reduction) -> None:
        """Reduce more elements than MPI's int counts, piece by piece; a reduce_scatter is one reduce to each rank."""
        row, send, recv, _, root, counts, *_ = call
        source = send.reshape(-1)
        target = recv.reshape(-1) if recv is not None else None
        if row.shape is Shape.SAME:
            for start in range(0, source.numel(), PIECE):
                part = source[start : start + PIECE]
                whole = part if send is recv else None if target is None else target[start : start + PIECE]
                self._reduce_in_memory(Call(row, part, whole, root=root), how)
            return
        assert target is not None
        lengths = counts[0] if counts else [target.numel()] * self._size
        for rank, (start, length) in enumerate(zip(accumulate(lengths, initial=0), lengths, strict=False)):
            part = source[start : start + length]
            whole = target if rank == self._communicator.rank else None
            self._reduce_in_memory(Call(REDUCE, part, whole, root=rank), how)

    # -- moving --------------------------------------------------------------------------------------

    def _move(self, call: Call) -> None:
        row, send, recv, _, _, counts, *_ = call
        if row in VECTORS:
            self._vectors.move(call)
            return
        if row in EXCHANGES:
            if isinstance(send, TensorList) and isinstance(recv, TensorList):
                send = self._vectors.flatten(send) if do_overlap(send.places(), recv.places()) else send
            elif overlap(send, recv):
                send = send.clone()
            check = self.check
            is_new = check is not None and check.compares_shares
            if ways := self._exchange.run(send, recv, counts, is_new):
                assert check is not None
                check.differ(ways)
            return
        given = send.clone() if overlap(send, recv) else send  # MPI_IN_PLACE would be another call than the others'
        self._calls[row](buffer_of_runs(given, send.nbytes), buffer_of_runs(recv, send.nbytes))

    # -- calls that come again -------------------------------------------------------------------------

    def prepare(self, call: Call) -> Run:
        """Return a function that runs a collective on buffers like this call's.

        All that follows from their metadata is fixed: the plan, MPI's function, operation and datatype, and the bytes.
        """
        if call.row.reduces and call.send.__class__ is TensorList:
            return self._together(call)
        prepared = self._prepared(call)
        if prepared is None:
            return run_again(call, self.run)
        function, name, tensor = prepared.function, call.row.name, call.tensor

        def run_and_check(*args: Any) -> None:
            function(*args)
            self._communicator.check(name)

        if self._communicator.is_checked:
            prepared = prepared._replace(function=run_and_check)
        said = BARRIER_SAID if tensor is None else self.plans.of(call.row, tensor.dtype, call.op).said
        return repeat(call, said, prepared, self.carry_out, self.check, self._communicator)

    def _together(self, call: Call) -> Run:
        """Return a function that reduces the tensors of a list as one."""
        listed, recv = call.send, call.recv
        flat = torch.empty(listed.shape, dtype=listed.dtype, device="meta")
        run, sizes, dtype = (
            self.prepare(call._replace(send=flat, recv=flat if recv is listed else recv)), listed.sizes, listed.dtype
        )  # fmt: skip
        if recv is listed:

            def run_flat(flat: torch.Tensor) -> None:
                run(flat, flat)

            return lambda tensors, _: self._bundler.run(tensors, sizes, dtype, run_flat)
        flatten = self._vectors.flattener(dtype)
        again, plan = run_again(call, self.run), self.plans.of(call.row, dtype, call.op)
        ranks, total = (self._size, 0) if call.counts is None else (0, listed.nbytes)

        def run_list(tensors: Any, recv: Any) -> None:
            nbytes = total + ranks * recv.nbytes
            if not 0 < nbytes <= FLAT_MAX or nbytes >= plan.shared_from:  # node-shared memory takes a list as it is
                again(tensors, recv)
            else:
                run(flatten(tensors, nbytes), recv)

        return run_list

    def _prepared(self, call: Call) -> Prepared | None:
        """Return how to carry a call out by one function of MPI; None if it needs more."""
        row, send, recv, op, root, counts, *_ = call
        if row.buffers == 0:
            return Prepared(lambda _, __: self._comm.Barrier())
        if recv is send and not row.is_in_place:
            return None
        if row is REDUCE and root and READS_IN_PLACE:
            return None
        if row in VECTORS:
            return self._vectors.prepared(call)
        if row in EXCHANGES:
            return self._exchange.prepared(send, recv, counts)
        plan = self.plans.of(row, send.dtype, op)
        function, how, size = self._calls[row], plan.reduction, self._size
        last = () if root is None else (root,)
        if how is None:
            bind = arguments_on_buffers(BYTE, send.itemsize, last, recv is send)
            return Prepared(function, describe_call(call, bind, size, plan))
        if how.multiplies:
            return None
        last = (how.op, *last)
        if row is REDUCE_SCATTER:
            assert counts is not None
            last = (counts[0], *last)
        largest, encoding, wide, is_same = COUNT_MAX, how.encoding, how.wide or send.dtype, row.shape is Shape.SAME
        if encoding is None:
            bind = arguments_on_buffers(how.datatype, wide.itemsize, last, recv is send if how.in_memory else is_same)
        else:
            bind = arguments_on_buffers(how.datatype, encoding.sent.itemsize, last, is_same)
            bind = of_encoded(encoding, bind, is_same, self._encoded.of)
            function, largest = on_encoded(encoding, function), COPY_MAX
        is_written_by_torch = how.averages or how.wide is not None
        if is_written_by_torch and any(each.is_inference() for each in (send, recv) if each is not None):
            return None  # it may be run again in the other mode
        divide = self._division(wide) if how.averages and recv is not None else None
        if how.wide is not None:
            return self._widened(call, function, bind, divide, wide, plan)
        return Prepared(function, describe_call(call, bind, size, plan, largest), divide)

    def _division(self, dtype: torch.dtype) -> Divide:
        """Return a function that divides a sum by the number of ranks; division by a tensor takes half the time."""
        size = self._size
        if not dtype.is_floating_point:
            return lambda total: average(total, size)
        divisor = torch.tensor(size, dtype=dtype, device="cpu")
        return lambda total: total.div_(divisor)

    def _widened(
        self, call: Call, function: Callable[..., Any], bind: Bind, divide: Divide | None, wide: torch.dtype, plan: Plan
    ) -> Prepared:
        """Return how to reduce a tensor in memory of a wider dtype, which is kept for small ones."""
        row, send, recv, counts = call.row, call.send, call.recv, call.counts
        ranks, is_same = self._size, row.shape is Shape.SAME
        itemsize, largest = send.itemsize, COPY_KEPT // wide.itemsize
        is_half = send.dtype is torch.bfloat16  # whose bits are the upper half of the same float32

        @lru_cache(COPIES_KEPT)
        def memory_of(shape: torch.Size, count: int, received: int) -> tuple[Any, ...]:
            values = new_memory(shape, wide)
            total = None if recv is None else values if is_same else new_memory(torch.Size([received]), wide)
            target, bits = None if total is None else total.data_ptr(), array_on(memory(values), 2 * count, HALF)
            return values, bits, bits[1::2], total, bind(values.data_ptr(), target, count, received)

        def describe(places: tuple[Any, ...]) -> tuple[tuple[Any, ...] | None, int]:
            shape, place, *_ = places
            count = share = received = shape.numel()
            if not is_same:
                received = share = count // ranks if counts is None else sum(counts[1])
            if count > largest or count * itemsize >= plan.shared_from:
                return None, share
            values, bits, halves, total, arguments = memory_of(shape, count, received)
            filling = None
            if is_half and 0 < count <= HALVES:
                filling = bits, halves, array_on(address(place, 2 * count), count, HALF)
            return (values, filling, total, arguments), share

        def round_to(total: torch.Tensor, recv: torch.Tensor) -> None:
            if total.shape != recv.shape:
                total = total.view(recv.shape)
            recv.copy_(total if divide is None else divide(total))

        is_copy = recv is None or (is_same and divide is None)  # without a call, for latency
        return Prepared(function, describe, None if is_copy else round_to, is_copied=True)

    def close(self) -> None:
        """Close the node's window; its communicators stay if a call was left midway."""
        self._calls.clear()
        self._bundler.close()
        self.node.close(self._communicator.is_revoked() or self._communicator.left_by is not None)


def arguments_on_buffers(datatype: MPI.Datatype, itemsize: int, last: tuple[Any, ...], in_place: bool) -> Bind:
    """Return a function that makes the arguments of MPI's function; ``last`` are the final ones."""
    is_alone = datatype is BYTE and in_place  # MPI_Bcast has one buffer

    def bind(place: int, target: int | None, sent: int, received: int) -> tuple[Any, ...]:
        buffer = address(place, sent * itemsize), datatype
        if is_alone:
            return (buffer, *last)
        if target is None:
            return (buffer, None, *last)
        if in_place:
            return (IN_PLACE, buffer, *last)
        return (buffer, (address(target, received * itemsize), datatype), *last)

    return bind


def describe_call(
    call: Call, bind: Bind, ranks: int, plan: Plan, largest: int = COUNT_MAX
) -> Callable[[Any], tuple[tuple[Any, ...] | None, int]]:
    """Return a function that makes MPI's arguments from the addresses of a call's tensors (``repetition.Prepared``).

    The call is on one tensor or two of one dtype, of up to ``largest`` bytes.
    """
    row, send, recv, op, _, counts, *_ = call
    itemsize, shape = send.itemsize, row.shape
    parts = 2 if op is None and send.dtype.is_complex else 1  # of an element, as the call board counts them
    if recv is send or recv is None:

        def describe_one(places: tuple[int, int]) -> tuple[tuple[Any, ...] | None, int]:
            count, place = places
            nbytes = count * itemsize
            if nbytes >= plan.shared_from or nbytes > largest:
                return None, count * parts
            return bind(place, None if recv is None else place, count, count), count * parts

        return describe_one

    def describe(places: tuple[int, int, int]) -> tuple[tuple[Any, ...] | None, int]:
        count, one, other = places
        sent = received = count
        if shape is Shape.GATHER:
            received *= ranks
        elif shape is Shape.SCATTER:
            count = received = sent // ranks
        elif counts is not None:
            received = sum(counts[1])
        nbytes, to = sent * itemsize, received * itemsize
        is_general = max(nbytes, to) >= plan.shared_from or max(nbytes, to) > largest
        if is_general or (one < other + to and other < one + nbytes):
            return None, count * parts
        return bind(one, other, sent, received), count * parts

    return describe
