"""How does MPI carry a process group?

Synchronous calls are MPI's blocking calls on the caller's thread: that is where MPI's latency is. Moving
collectives move bytes, so every dtype works; reducing ones are planned once per dtype and op
(``reductions``) and the plan is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from mpi4py import MPI
from torch.distributed import ReduceOp

from hpcdist.backends.mpi import fault_tolerance, large, repeated, runtime, threads
from hpcdist.backends.mpi.bundle import Bundler
from hpcdist.backends.mpi.crossover import NEVER
from hpcdist.backends.mpi.datatypes import BYTE, COUNT_MAX, address, apart, memory, message, shares, starts
from hpcdist.backends.mpi.exchange import exchange
from hpcdist.backends.mpi.messages import MessagingBackend
from hpcdist.backends.mpi.reductions import Reduction, plan
from hpcdist.backends.mpi.sharing import Sharing
from hpcdist.core.backend import Backend, Bootstrap, Counts
from hpcdist.core.buffers import overlap
from hpcdist.core.errors import DistBackendError
from hpcdist.core.table import ALL_REDUCE, EXCHANGES, ROWS, Row, Shape
from hpcdist.core.work import Queue

IN_PLACE = MPI.IN_PLACE
RedOpType = ReduceOp.RedOpType


class MPIBackend(MessagingBackend):
    """An MPI communicator that belongs to one process group."""

    name: ClassVar[str] = "mpi"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.has_threads = bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)  # else it makes progress inside calls only
        self._calls = {row: getattr(comm, row.mpi) for row in ROWS.values()}
        self._all_reduce = comm.Allreduce
        self._plans: dict[tuple[torch.dtype, int], Reduction] = {}
        self._direct: tuple[Any, ...] = (None, None)  # the last all_reduce by MPI alone: op, dtype, MPI's op and type
        self.unfinished = deque()
        self.sharing = Sharing(comm, self._notice, self._is_background)
        self._floors = self.sharing.floors  # one comparison keeps small messages out of shared memory
        self._bundler: Bundler | None = None
        fault_tolerance.check_results(self)

    @classmethod
    def connect(cls, bootstrap: Bootstrap) -> MPIBackend:
        """Duplicate the user's communicator, or the world (MPI 7.4.2)."""
        given = bootstrap.comm if bootstrap.comm is not None else runtime.world(bootstrap.timeout)
        comm = runtime.duplicate(given, bootstrap.timeout)
        fault_tolerance.is_tolerant()  # found out now, while no call is stuck
        return cls(comm)

    # -- collectives ---------------------------------------------------------------------------------

    def run(
        self,
        row: Row,
        send: torch.Tensor | None,
        recv: torch.Tensor | None,
        op: Any,
        root: int | None,
        counts: Counts | None,
    ) -> None:
        """Run one collective, by MPI's blocking call or, where that is faster, through node-shared memory."""
        try:
            nbytes = 0 if send is None else send.nbytes
            if (
                nbytes >= self._floors.get(row, NEVER)
                and send is not None
                and self.sharing.run(row, send, recv if recv is not None else send, op, root)
            ):
                return
            if row is ALL_REDUCE and send is recv and nbytes <= COUNT_MAX:  # the shortest way, for latency
                assert send is not None
                direct = self._direct
                if direct[0] is op and direct[1] is send.dtype:
                    self._all_reduce(IN_PLACE, (address(send.data_ptr(), nbytes), direct[3]), direct[2])
                    return
            if row.reduces:
                self._reduce(row, send, recv, op, root, counts)
            elif row.buffers == 2:
                self._move(row, send, recv, root, counts)
            elif row.buffers == 1:
                assert send is not None
                assert root is not None
                self.comm.Bcast(message(send), root)
            else:
                self.comm.Barrier()
        except MPI.Exception as error:
            raise self._failure(row.name, error) from error

    def _notice(self) -> None:
        """Raise where the communicator has been revoked or interrupted, from within a wait on shared memory."""
        if self.interruption is not None:
            fault_tolerance.revoke(self)  # what follows is decided by whether it is revoked, on all ranks alike
            raise DistBackendError(self.interruption)
        self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)

    def _is_background(self) -> bool:
        return self.queue is not None and self.queue.running is not None

    def _failure(self, call: str, error: MPI.Exception) -> DistBackendError:
        return fault_tolerance.failure(self, call, error)

    def worker(self) -> Queue:
        """Begin the thread that carries out asynchronous calls, beside others of this rank."""
        threads.warn_once(MPI.get_vendor()[0])
        return super().worker()

    def repeated(
        self, row: Row, send: torch.Tensor, recv: torch.Tensor, op: Any, root: int | None
    ) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """Return what runs a collective again: MPI's call alone, where that is all there is to do."""
        if self.sharing.is_chosen(row, send.dtype, op, max(send.nbytes, recv.nbytes)):
            run = repeated.through_window(self, row, op, root) if recv is send else None
        elif recv is send:
            run = repeated.in_place(self, row, send, op, root)
        else:
            run = repeated.between_two(self, row, send.dtype, op)
        return run or super().repeated(row, send, recv, op, root)

    def bundle(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return small tensors as one, copied by MPI."""
        if self._bundler is None:
            self._bundler = Bundler()
        return self._bundler.bundle(tensors, sizes)

    def planned(self, row: Row, dtype: torch.dtype, op: Any) -> Reduction:
        """Return how a dtype is reduced by an op, and keep it."""
        return self._plans.get((dtype, id(op))) or self._plan(row, dtype, op)

    def _plan(self, row: Row, dtype: torch.dtype, op: Any) -> Reduction:
        made = plan(row, dtype, op)
        # only the members of RedOpType live for ever; the address of any other object may be used again
        if op.__class__ is RedOpType and op is getattr(RedOpType, op.name):
            self._plans[dtype, id(op)] = made
        return made

    def _reduce(
        self,
        row: Row,
        send: torch.Tensor | None,
        recv: torch.Tensor | None,
        op: Any,
        root: int | None,
        counts: Counts | None,
    ) -> None:
        assert send is not None
        how = self.planned(row, send.dtype, op)
        if how.in_memory:
            if how.is_direct and op.__class__ is RedOpType:
                self._direct = (op, send.dtype, how.op, how.datatype)
            self._reduce_in_memory(row, send, recv, how, root, counts)
            if how.averages and recv is not None:
                how.after(recv, recv, self.size)
            return
        values = how.before(send)
        if row.shape is Shape.SAME:
            self._reduce_in_memory(row, values, values if recv is not None else None, how, root, counts)
            if recv is not None:
                how.after(values, recv, self.size)
            return
        assert recv is not None
        reduced = torch.empty(recv.shape, dtype=values.dtype, device="cpu")
        self._reduce_in_memory(row, values, reduced, how, root, counts)
        how.after(reduced, recv, self.size)

    def _reduce_in_memory(
        self,
        row: Row,
        send: torch.Tensor,
        recv: torch.Tensor | None,
        how: Reduction,
        root: int | None,
        counts: Counts | None,
    ) -> None:
        elements = send.numel()
        if elements > COUNT_MAX:
            large.reduce(self, row, send, recv, how, root, counts)
            return
        call = self._calls[row]
        if send is recv:
            sendbuf: Any = IN_PLACE
        else:
            if recv is not None and counts is None and not row.rooted:
                buffers = apart(send, recv, how.datatype)
                if buffers is not None:  # the short way, for latency
                    call(*buffers, how.op)
                    return
            if recv is not None and row.shape is not Shape.SAME and overlap(send, recv):
                send = send.clone()
            sendbuf = [address(send.data_ptr(), send.nbytes), how.datatype]
        recvbuf: Any = None
        if recv is not None:
            recvbuf = [address(recv.data_ptr(), recv.nbytes), how.datatype]
        if row.rooted:
            call(sendbuf, recvbuf, how.op, root)
        elif counts is None:
            call(sendbuf, recvbuf, how.op)
        else:
            call(sendbuf, recvbuf, counts[0], how.op)

    def _move(
        self,
        row: Row,
        send: torch.Tensor | None,
        recv: torch.Tensor | None,
        root: int | None,
        counts: Counts | None,
    ) -> None:
        if row in EXCHANGES:
            assert send is not None
            assert recv is not None
            exchange(self.comm, send.clone() if overlap(send, recv) else send, recv, counts)
            return
        call = self._calls[row]
        if counts is None and send is not None and recv is not None:
            buffers = apart(send, recv, BYTE)
            if buffers is not None:  # the short way, for latency
                if row.rooted:
                    call(*buffers, root)
                else:
                    call(*buffers)
                return
        if send is not None and recv is not None and overlap(send, recv):
            send = send.clone()  # MPI_IN_PLACE would be a call of another kind, made by this rank only
        if counts is not None:
            assert send is not None
            assert recv is not None
            self._gather_counted(send, recv, counts)
            return
        # MPI counts are per rank, on the side that has a share for each rank too
        if send is not None:
            share = send.nbytes if row.shape is Shape.GATHER else send.nbytes // self.size
        else:
            assert recv is not None
            share = recv.nbytes // self.size if row.shape is Shape.GATHER else recv.nbytes
        sendbuf = None if send is None else shares(send, share)
        recvbuf = None if recv is None else shares(recv, share)
        if row.rooted:
            call(sendbuf, recvbuf, root)
        else:
            call(sendbuf, recvbuf)

    def _gather_counted(self, send: torch.Tensor, recv: torch.Tensor, counts: Counts) -> None:
        if recv.nbytes > COUNT_MAX:  # the same on all ranks
            exchange(self.comm, send, recv, counts)
            return
        received = [count * send.itemsize for count in counts[1]]
        self.comm.Allgatherv([memory(send), send.nbytes, BYTE], [memory(recv), received, starts(received), BYTE])

    def on(self, device_type: str) -> Backend:
        """Return what carries a device type's tensors: CUDA's directly or through host memory (``staging``)."""
        if device_type == "cpu":
            return self
        from hpcdist.backends.mpi.staging import StagedBackend

        staged = StagedBackend(self)
        staged.has_threads = self.has_threads
        return staged

    # -- when something goes wrong -------------------------------------------------------------------

    def interrupt(self, reason: str) -> bool:
        """Cancel a blocked receive, or revoke the communicator (ULFM); False where this MPI can do neither."""
        return fault_tolerance.interrupt(self, reason)

    def foretell(self, reason: str) -> None:
        """Raise with this reason when the communicator is revoked (ULFM)."""
        if self.interrupts_all():
            self.interruption = reason

    def interrupts_all(self) -> bool:
        """Tell whether an interrupted collective raises on all ranks: by MPI_Comm_revoke."""
        return fault_tolerance.is_tolerant()

    def failed(self) -> list[int]:
        """Return the ranks that MPI knows to have died (ULFM's MPI_Comm_get_failed)."""
        return fault_tolerance.failed(self.comm)

    def shrink(self, excluded: Sequence[int], name: str, aborts: bool) -> MPIBackend:
        """Make a communicator without some ranks, dead ones where this MPI can."""
        return self._own(fault_tolerance.shrink(self, excluded, name, aborts))

    def knows_death(self) -> bool:
        """Ask MPI for the dead of its world (ULFM)."""
        return bool(fault_tolerance.failed(MPI.COMM_WORLD))

    def farewell(self) -> Callable[[], bool] | None:
        """Begin to leave the job."""
        return runtime.farewell()

    def abandon(self) -> None:
        """Leave without MPI_Finalize, which would wait for the rank that has ended."""
        runtime.abandon()

    def abort(self, status: int) -> None:
        """End the job."""
        runtime.abort(status)

    # -- groups --------------------------------------------------------------------------------------

    def split(self, subgroups: Sequence[Sequence[int]], names: Sequence[str], timeout: timedelta) -> MPIBackend | None:
        """Make all subgroups by one MPI_Comm_split (MPI 7.4.2); the color is the subgroup's index."""
        self.settle()
        color, key = MPI.UNDEFINED, 0
        for index, ranks in enumerate(subgroups):
            if self.rank in ranks:
                color, key = index, list(ranks).index(self.rank)
        with self._translating("new_group"):
            comm = self.comm.Split(color, key)
        if comm == MPI.COMM_NULL:
            return None
        return self._own(comm)

    def create_group(self, ranks: Sequence[int], name: str, timeout: timedelta) -> MPIBackend:
        """Make a communicator by MPI_Comm_create_group, which only its members call (MPI 7.4.2)."""
        self.settle()
        whole = self.comm.Get_group()
        members = whole.Incl(list(ranks))
        try:
            return self._own(self.comm.Create_group(members, runtime.group_tag(name)))
        finally:
            members.Free()
            whole.Free()

    def _own(self, comm: Any) -> MPIBackend:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        return type(self)(comm)

    def close(self) -> None:
        """Free the communicator (MPI 7.4.3)."""
        super().close()
        if self.comm != MPI.COMM_NULL and not MPI.Is_finalized():
            self._calls.clear()
            self.sharing.close()
            if self._bundler is not None:
                self._bundler.close()
            self.comm.Free()
