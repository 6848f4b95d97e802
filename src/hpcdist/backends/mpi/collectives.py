"""Collectives on tensors over one MPI communicator.

Synchronous calls are MPI's blocking calls on the caller's thread: that is where MPI's latency is. Moving collectives
move bytes, so every dtype works. Which MPI function is called, or whether the call goes through node-shared memory,
is the plan's (``plans``), which depends only on what all ranks know; how this rank's tensors lie in memory decides
about copies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.call_check import CallCheck
from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.datatypes import BYTE, COUNT_MAX, CUTS, PIECE, address, apart, message, shares
from hpcdist.backends.mpi.exchange import Exchange
from hpcdist.backends.mpi.node.call_board import what
from hpcdist.backends.mpi.node.calls import NodeCalls
from hpcdist.backends.mpi.node.thresholds import NEVER, Thresholds
from hpcdist.backends.mpi.plans import Plans
from hpcdist.backends.mpi.reductions import Reduction
from hpcdist.backends.mpi.vectors import VECTORS, Vectors
from hpcdist.core.buffers import TensorList, do_overlap, overlap
from hpcdist.core.call import Call, Run
from hpcdist.core.table import ALL_REDUCE, BARRIER, BROADCAST, EXCHANGES, REDUCE, ROWS, Row, Shape

IN_PLACE = MPI.IN_PLACE
BARRIER_SAID = what(BARRIER.name)


class Collectives:
    """The collectives of one communicator.

    Args:
        communicator: the group's.
        thresholds: the same on all of its ranks.
        is_background: tells whether the call under way runs beside the rank's own computation.
    """

    def __init__(self, communicator: Communicator, thresholds: Thresholds, is_background: Callable[[], bool]) -> None:
        comm = communicator.comm
        self._communicator = communicator
        self._is_background = is_background
        self._comm, self._size = comm, communicator.size
        self._all_reduce = comm.Allreduce
        self._calls = {row: getattr(comm, row.mpi) for row in ROWS.values()}
        self._exchange = Exchange(communicator)
        self._vectors = Vectors(communicator)
        self.plans = Plans(communicator.size, thresholds)
        self.node = NodeCalls(comm, communicator.derived, communicator.poll, is_background)
        self.check: CallCheck | None = None

    def run(self, call: Call) -> None:
        """Run one collective to its end.

        Raises:
            CallsDifferError: another rank makes another call.
            DistBackendError: MPI failed, or a rank has died.
        """
        if self.check is None:
            self.carry_out(call)
        else:
            self.check.run(call, self._said(call))

    def _said(self, call: Call) -> int:
        """Return what the call board has of a call, without root."""
        tensor = call.tensor
        return BARRIER_SAID if tensor is None else self.plans.of(call.row, tensor.dtype, call.op).said

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
                if row.reduces and send.__class__ is TensorList:
                    send = self._vectors.flatten(send)
                    call = call._replace(send=send)
                if plan.shared_from != NEVER and self._is_shared(row, send, recv, plan.shared_from, op):
                    self._share(row, send, send if recv is None else recv, op, root)
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
                    self._comm.Bcast(message(send), root)
        except MPI.Exception as error:
            raise self._communicator.failure(row.name, error) from error
        if self._communicator.is_checked:
            self._communicator.check(row.name)

    def is_shared(self, row: Row, dtype: torch.dtype, op: Any, nbytes: int) -> bool:
        """Tell whether calls of so many bytes go through node-shared memory, as far as is known before the first."""
        return nbytes >= self.plans.of(row, dtype, op).shared_from

    def _is_shared(self, row: Row, send: torch.Tensor, recv: torch.Tensor | None, least: int, op: Any) -> bool:
        """Tell whether hpcdist carries a call out itself, and make what the first one needs."""
        nbytes = send.nbytes if recv is None else max(send.nbytes, recv.nbytes)
        if nbytes < least:
            return False
        if self.node.shared is not None:
            return True
        if not self.plans.nodes:
            self.plans.locate(*self.node.locate())
        elif self.node.connect():
            return True
        else:
            self.plans.give_up_window()
        return self._is_shared(row, send, recv, self.plans.of(row, send.dtype, op).shared_from, op)

    # -- reducing ------------------------------------------------------------------------------------

    def _reduce(self, call: Call, how: Reduction) -> None:
        _, send, recv, *_ = call
        values = reduced = send
        if how.in_memory:
            reduced = recv
        elif recv is not None:
            values = how.before(send)
            is_same = call.row.shape is Shape.SAME
            reduced = values if is_same else torch.empty(recv.shape, dtype=values.dtype, device="cpu")
        else:
            values, reduced = how.before(send), None
        self._reduce_in_memory(call._replace(send=values, recv=reduced), how)
        if recv is not None and (how.averages or not how.in_memory):
            with torch.inference_mode():  # which may write tensors of both modes
                how.after(reduced, recv, self._size)

    def _reduce_in_memory(self, call: Call, how: Reduction) -> None:
        row, send, recv, _, root, counts, *_ = call
        if send.numel() > COUNT_MAX:
            self._reduce_large(call, how)
            return
        function = self._calls[row]
        if send is recv:
            sendbuf: Any = IN_PLACE
        else:
            if recv is not None and counts is None and not row.rooted:
                buffers = apart(send, recv, how.datatype)
                if buffers is not None:  # the short way, for latency
                    function(*buffers, how.op)
                    return
            if recv is not None and overlap(send, recv):
                send = send.clone()
            sendbuf = [address(send.data_ptr(), send.nbytes), how.datatype]
        recvbuf = None if recv is None else [address(recv.data_ptr(), recv.nbytes), how.datatype]
        if row.rooted:
            function(sendbuf, recvbuf, how.op, root)
        elif counts is None:
            function(sendbuf, recvbuf, how.op)
        else:
            function(sendbuf, recvbuf, counts[0], how.op)

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
                send = self._vectors.flatten(send) if do_overlap(send, recv) else send
            elif overlap(send, recv):
                send = send.clone()
            check = self.check
            is_new = check is not None and check.compares_shares
            if ways := self._exchange.run(send, recv, counts, is_new, check is None or check.is_on):
                assert check is not None
                check.differ(ways)
            return
        buffers: Any = apart(send, recv, BYTE)
        if buffers is None:  # of more bytes than MPI counts; MPI_IN_PLACE would be a call that only this rank makes
            given = send.clone() if overlap(send, recv) else send
            buffers = shares(given, send.nbytes), shares(recv, send.nbytes)
        self._calls[row](*buffers)

    # -- calls that come again -------------------------------------------------------------------------

    def prepare(self, call: Call) -> Run:
        """Return what runs a collective on tensors that look like this call's.

        What follows from their looks is settled: the plan, MPI's function, operation and datatype, and how many bytes.
        What is left is where the memory lies, and loops use the same memory again: to describe it to mpi4py takes
        0.15 µs a buffer, to see that it is the same 0.06.
        """
        row, send, recv, op, root, *_ = call
        run: Run | None
        if row.buffers == 0:
            run = self._barrier
        elif self.is_shared(row, send.dtype, op, max(send.nbytes, recv.nbytes)):
            run = self._through_window(row, op, root) if recv is send else None
        elif recv is send:
            run = self._in_place(row, send, op, root)
        elif row in EXCHANGES and not (CUTS or self.check is None or self.check.is_on):
            run = None  # described anew each time, so that MPI writes nothing past a share
        elif row in EXCHANGES and self._size == 2:
            run = self._exchange.between_two(row.name)
        else:
            run = self._between_two(row, send.dtype, op)
        if run is None:
            return lambda send, recv: self.run(Call(row, send, recv, op, root))
        if self._communicator.is_checked:
            run = self._checked(row, run)
        return run if self.check is None else self.check.repeated(call, self._said(call), run)

    def _checked(self, row: Row, run: Run) -> Run:
        def run_and_check(send: torch.Tensor, recv: torch.Tensor) -> None:
            run(send, recv)
            self._communicator.check(row.name)

        return run_and_check

    def _barrier(self, _: Any, __: Any) -> None:
        try:
            self._comm.Barrier()
        except MPI.Exception as error:
            raise self._communicator.failure("barrier", error) from error

    def _in_place(self, row: Row, tensor: torch.Tensor, op: Any, root: int | None) -> Run | None:
        """Return what runs a call whose input is its output; None if it is more than one call of MPI."""
        nbytes = tensor.nbytes
        if nbytes > COUNT_MAX:
            return None
        failure = self._communicator.failure
        call: Callable[..., Any] = self._comm.Bcast
        datatype = BYTE
        last: Any = root  # what MPI takes after the buffer
        if row is ALL_REDUCE:
            how = self.plans.of(row, tensor.dtype, op).reduction
            if how is None or not how.is_direct:
                return None
            call, datatype, last = partial(self._comm.Allreduce, IN_PLACE), how.datatype, how.op
        elif row is not BROADCAST:
            return None
        known: tuple[int, Any] = (-1, None)

        def run(send: torch.Tensor, _: torch.Tensor) -> None:
            nonlocal known
            place, buffer = known
            here = send.data_ptr()
            if here != place:
                buffer = (address(here, nbytes), datatype)
                known = here, buffer
            try:
                call(buffer, last)
            except MPI.Exception as error:
                raise failure(row.name, error) from error

        return run

    def _through_window(self, row: Row, op: Any, root: int | None) -> Run | None:
        """Return what runs a call whose input is its output through node-shared memory."""
        if self.node.shared is None:
            return None
        return lambda send, recv: self._share(row, send, recv, op, root)

    def _share(self, row: Row, send: torch.Tensor, recv: torch.Tensor, op: Any, root: int | None) -> None:
        """Run a collective through node-shared memory."""
        communicator = self._communicator
        communicator.check_in_step(row.name)
        try:
            # memory that is kept between calls is of this mode then, and may be written whatever the caller's is
            with torch.inference_mode():
                self.node.run(row, send, recv, op, root)
        except BaseException as error:
            communicator.left_by = type(error).__name__
            if isinstance(error, MPI.Exception):
                raise communicator.failure(row.name, error) from error
            raise

    def _between_two(self, row: Row, dtype: torch.dtype, op: Any) -> Run | None:
        """Return what runs a call that reads one tensor and writes another; None as for ``_in_place``."""
        if row.rooted:
            return None
        datatype = BYTE
        last: tuple[Any, ...] = ()  # what MPI takes after the buffers
        if row.reduces:
            how = self.plans.of(row, dtype, op).reduction
            if how is None or not how.is_direct:
                return None
            datatype, last = how.datatype, (how.op,)
        call, failure = self._calls[row], self._communicator.failure
        describe = self._exchange.describe if row in EXCHANGES else partial(apart, datatype=datatype)
        known: tuple[int, int, Any] = (-1, -1, None)

        def run(send: torch.Tensor, recv: torch.Tensor) -> None:
            nonlocal known
            first, second, buffers = known
            source, target = send.data_ptr(), recv.data_ptr()
            if source != first or target != second:
                buffers = describe(send, recv)
                known = source, target, buffers
            if buffers is None:
                self.carry_out(Call(row, send, recv, op))
                return
            try:
                call(*buffers, *last)
            except MPI.Exception as error:
                raise failure(row.name, error) from error

        return run

    def close(self) -> None:
        """Leave the node's window; its communicators stay if a call was left midway."""
        self._calls.clear()
        self.node.close(self._communicator.is_revoked() or self._communicator.left_by is not None)
