"""Adapter for torch's own c10d backends, which then carry our groups.

gloo, and backends of ``Backend.register_backend``, have c10d's methods on lists and options. Values that they
cannot reduce are gathered and combined here in rank order, so that every dtype and op works, with the same
result on all ranks.
"""

from __future__ import annotations

import secrets
import threading
import warnings
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any, ClassVar

import torch
import torch.distributed as c10d
from torch.distributed.distributed_c10d import PrefixStore

from hpcdist.core import hooks, reduction
from hpcdist.core.agreement import check_subgroup
from hpcdist.core.backend import Backend, Bootstrap
from hpcdist.core.buffers import as_bytes, copy_into, overlap
from hpcdist.core.call import Call
from hpcdist.core.call_log import OwnCallLog
from hpcdist.core.errors import DistBackendError, end_all
from hpcdist.core.objects import TensorObjects
from hpcdist.core.self_messages import SelfMessages
from hpcdist.core.table import ALL_GATHER_SINGLE, ALL_REDUCE, ROWS, Row, Shape, scale
from hpcdist.core.work import Unfinished, Work
from hpcdist.launch import environment
from hpcdist.torch_bridge import private_names
from hpcdist_stores.keep_alive import release

NATIVE_OPS = (reduction.SUM, reduction.PRODUCT, reduction.MIN, reduction.MAX)
WAITED = "gloo/transport"  # texts of gloo's errors after a timeout, or a broken connection


def described(error: RuntimeError, record: tuple[Any, ...] | None = None) -> str:
    """Return the library's error of a call, this thread's or a record's; after a wait also the others' positions."""
    where = hooks.explain(record) if WAITED in str(error) else ""
    return f"{error}; {where}" if where else str(error)


class C10dWork(Work):
    """The Work of a c10d backend's message, as one of ours."""

    def __init__(
        self,
        unfinished: Unfinished,
        inner: Any,
        tensor: torch.Tensor,
        result: list[torch.Tensor],
        finish: Callable[[], None] | None,
        limit: float | None,
    ) -> None:
        super().__init__(result)
        self._unfinished = unfinished
        self._inner = inner
        self._buffer: torch.Tensor | None = tensor
        self._when_done = finish
        self._limit = limit  # its limit in seconds, if that is not the library's own
        self._turn = allocate_lock()  # held by the thread that concludes it
        unfinished.hold(self)

    def _finish(self, error: BaseException | None = None) -> None:
        super()._finish(error)
        self._unfinished.pop(self, None)

    def _block(self, seconds: float | None) -> bool:
        if not self._turn.acquire(timeout=-1 if seconds is None else seconds):
            return False
        try:
            return self._done or self._conclude(seconds)
        finally:
            self._turn.release()

    def _conclude(self, seconds: float | None) -> bool:
        limit = self._limit if seconds is None else seconds
        try:
            self._inner.wait(timedelta(seconds=limit)) if limit is not None else self._inner.wait()
        except RuntimeError as error:
            if seconds is not None and not self._inner.is_completed():
                return False
            failure = DistBackendError(f"operation failed: {described(error, self._call)}")
            failure.__cause__ = error
            self._finish(failure)
            return True
        if self._when_done is not None:
            self._when_done()
        self._buffer = self._when_done = None
        self._finish()
        return True

    def _poll(self) -> None:
        if self._inner.is_completed():
            self._block(None)

    def _pursue(self) -> None:
        threading.Thread(target=self._block, args=(None,), name="hpcdist-message", daemon=True).start()

    def source_rank(self) -> int:
        """Return the sender of a receive."""
        return private_names.sender(self._inner)


class C10dBackend(Backend):
    """A group of one of torch's own c10d backends."""

    name: ClassVar[str] = "foreign"
    ends_waits: ClassVar[bool] = True
    compares_subgroups: ClassVar[bool] = True  # whether ``split`` detects that ranks give different lists
    compares_calls: ClassVar[bool] = False  # by the watchdog
    native_dtypes = frozenset({torch.float64, torch.float32, torch.int64, torch.int32, torch.int8, torch.uint8})

    message_limit: float | None = None  # the limit of messages, in seconds, if it was set after the group was made
    _limit: float | None = None  # the limit of the call that runs, in seconds

    creator: ClassVar[Any]  # makes a group's inner backend from its Bootstrap

    def __init__(self, bootstrap: Bootstrap) -> None:
        self.inner = type(self).creator(bootstrap)
        self.rank = bootstrap.rank
        self.size = bootstrap.size
        self._store = bootstrap.store
        self._mailbox = SelfMessages(self.rank)
        self.unfinished = Unfinished()
        self.objects = TensorObjects(self, self.carry_out)
        if self.compares_calls and self.size > 1:
            assert self._store is not None
            if self.rank == 0:
                self._store.set("calls", secrets.token_hex(8))
            if environment.is_on(environment.CHECK_CALLS):  # each rank for itself: one without a log is not asked
                self.calls = OwnCallLog(self._store.get("calls").decode(), self.rank, self.size, waits=self.ends_waits)

    @classmethod
    def connect(cls, bootstrap: Bootstrap) -> C10dBackend:
        """Connect the ranks by the bootstrap's store."""
        return cls(bootstrap)

    # -- collectives ---------------------------------------------------------------------------------

    def run(self, call: Call) -> None:
        """Run one collective to its end."""
        self.record(call)
        try:
            self.carry_out(call)
        except DistBackendError:
            if self.calls is not None:
                self.calls.compare_failed()
            raise

    def carry_out(self, call: Call) -> None:
        """Run one collective to its end; the other ranks' calls are not compared with it."""
        row, self._limit = call.row, call.limit
        carry_out = self._reduce if row.reduces else self._move
        held = self.inner  # kept: if ``abort`` on another thread had the last reference, it would wait for this call
        try:
            carry_out(call)
        except RuntimeError as error:
            raise DistBackendError(
                f"{row.name} on rank {self.rank} of {self.size} failed: {described(error)}"
            ) from error
        finally:
            del held

    def _reduce(self, call: Call) -> None:
        recv = call.recv
        if call.row is ALL_REDUCE and recv.is_contiguous() and self._is_native(recv.dtype, call.op):
            if recv is not call.send:
                copy_into(call.send, recv)
            self._all_reduce_native(as_bytes(recv).view(recv.dtype), call.op)  # a copy takes half as long as gloo
            return
        values = self._all_reduced(call.send.reshape(-1), call.op)
        if recv is None:
            return
        if call.row.shape is not Shape.SAME:
            shares = call.counts[0] if call.counts else [recv.numel()] * self.size
            start = sum(shares[: self.rank])
            values = values[start : start + recv.numel()]
        copy_into(values.view(recv.shape), recv)

    def _all_reduced(self, send: torch.Tensor, op: Any) -> torch.Tensor:
        """Return the reduced values, in new memory."""
        averages, values = op == reduction.AVG, reduction.terms(send, op)
        if averages or op == reduction.PREMUL_SUM:
            op = reduction.SUM
        if self._is_native(values.dtype, op):
            self._all_reduce_native(values, op)
        else:
            gathered = torch.empty((self.size, values.numel()), dtype=values.dtype, device=values.device)
            self._move(Call(ALL_GATHER_SINGLE, values, gathered))
            values = reduction.fold(list(gathered), op)
        return reduction.average(values, self.size) if averages else values

    @classmethod
    def _is_native(cls, dtype: torch.dtype, op: Any) -> bool:
        return dtype in cls.native_dtypes and any(op == known for known in NATIVE_OPS)

    def _all_reduce_native(self, values: torch.Tensor, op: Any) -> None:
        self.inner.allreduce([values], self._options(c10d.AllreduceOptions, reduceOp=op)).wait()

    def _options(self, kind: Callable[[], Any], **fields: Any) -> Any:
        """Return c10d's options of a call, with its own limit if it has one."""
        options = kind()
        if self._limit is not None:
            fields["timeout"] = timedelta(seconds=self._limit)
        for name, value in fields.items():
            setattr(options, name, value)
        return options

    def _move(self, call: Call) -> None:
        row, send, recv, _, root, counts, *_ = call
        itemsize = next((tensor.itemsize for tensor in (send, recv) if tensor is not None), 1)
        if send is not None and recv is not None and row.buffers == 2 and overlap(send, recv):
            send = send.clone()
        sent = as_bytes(send) if send is not None else None
        received = as_bytes(recv) if recv is not None else None
        shares = counts and scale(counts, itemsize)
        MOVES[row](self, sent, received, root, shares)

    # -- point to point ------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        """Send and wait."""
        self.isend(tensor, dst, tag).wait()

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> int:
        """Receive and wait."""
        work = self.irecv(tensor, src, tag, None)
        work.wait()
        return work.source_rank() if src is None else src

    def isend(self, tensor: torch.Tensor, dst: int, tag: int, finish: Callable[[], None] | None = None) -> Work:
        """Begin to send."""
        if dst == self.rank:
            return self._mailbox.send(tensor, tag, finish)
        inner = self.inner.send([as_bytes(tensor)], dst, tag)
        return C10dWork(self.unfinished, inner, tensor, [], finish, self.message_limit)

    def irecv(self, tensor: torch.Tensor, src: int | None, tag: int, finish: Callable[[], None] | None) -> Work:
        """Begin to receive."""
        if src == self.rank or (src is None and (self.size == 1 or self._mailbox.holds(tag))):
            return self._mailbox.receive(tensor, tag, finish)
        data = [as_bytes(tensor)]
        inner = self.inner.recv_anysource(data, tag) if src is None else self.inner.recv(data, src, tag)
        return C10dWork(self.unfinished, inner, tensor, [tensor], finish, self.message_limit)

    # -- groups --------------------------------------------------------------------------------------

    def split(self, subgroups: Sequence[Sequence[int]], names: Sequence[str], timeout: timedelta) -> C10dBackend | None:
        """Make this rank's subgroup over a part of the store of its own."""
        index = next((i for i, ranks in enumerate(subgroups) if self.rank in ranks), None)
        if self.compares_subgroups:
            self.settle()  # it is a collective of this communicator
            check_subgroup(self, None if index is None else subgroups[index], "new_group")
        if index is None:
            return None
        # ranks may give only their own subgroups, so that two may have one name
        return self.create_group(subgroups[index], f"{names[index]}-{min(subgroups[index])}", timeout)

    def create_group(self, ranks: Sequence[int], name: str, timeout: timedelta) -> C10dBackend:
        """Make a subgroup over a part of the store of its own."""
        assert self._store is not None
        store = PrefixStore(f"group-{name}", self._store)
        bootstrap = Bootstrap(list(ranks).index(self.rank), len(ranks), timeout, store=store)
        return type(self)(bootstrap)

    def abort(self, reason: str) -> None:
        """End the queue with its calls, and close; no other rank takes part."""
        super().abort(reason)
        self.calls = None
        self.close()

    def end_threads(self) -> None:
        """Release the inner backend, whose end waits for its threads."""
        self.inner = None

    def close(self) -> None:
        """End the queue and release the inner backend and the store, whose server may end with it."""
        end_all((super().close, self.leave, self._release))

    def _release(self) -> None:
        inner, self.inner, self._store = self.inner, None, None
        if inner is not None and hasattr(inner, "shutdown"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                inner.shutdown()
        del inner
        release(at_once=True)  # the inner backend's part of the store


def registered(name: str, creator: Callable[..., Any], is_extended: bool) -> type[C10dBackend]:
    """Return the backend class of a creator given to ``Backend.register_backend`` (c10d's contract for both kinds)."""

    def make(given: Bootstrap) -> Any:
        if not is_extended:
            return creator(given.store, given.rank, given.size, given.timeout)
        return creator(private_names.backend_options(given), given.options)

    return type(f"{name}Backend", (C10dBackend,), {"name": name, "creator": staticmethod(make)})


# -- how each moving row is called: (backend, bytes sent, bytes received, root, bytes per rank) ------------


def _barrier(self: C10dBackend, *_: Any) -> None:
    self.inner.barrier(self._options(c10d.BarrierOptions)).wait()


def _broadcast(self: C10dBackend, send: Any, recv: Any, root: Any, shares: Any) -> None:
    self.inner.broadcast([send], self._options(c10d.BroadcastOptions, rootRank=root, rootTensor=0)).wait()


def _all_gather_single(self: C10dBackend, send: Any, recv: Any, root: Any, shares: Any) -> None:
    outputs = list(recv.chunk(self.size)) if recv.numel() else [recv] * self.size
    self.inner.allgather([outputs], [send], self._options(private_names.all_gather_options)).wait()


def _all_gather(self: C10dBackend, send: Any, recv: Any, root: Any, shares: Any) -> None:
    longest = max(shares[1])
    padded = torch.zeros(longest, dtype=torch.uint8, device=recv.device)
    padded[: send.numel()] = send
    gathered = torch.empty(self.size * longest, dtype=torch.uint8, device=recv.device)
    _all_gather_single(self, padded, gathered, root, None)
    for rank, start in enumerate(accumulate(shares[1][:-1], initial=0)):
        length = shares[1][rank]
        recv[start : start + length] = gathered[rank * longest : rank * longest + length]


def _gather(self: C10dBackend, send: Any, recv: Any, root: Any, shares: Any) -> None:
    outputs = [list(recv.view(self.size, -1))] if recv is not None else []
    self.inner.gather(outputs, [send], self._options(c10d.GatherOptions, rootRank=root)).wait()


def _scatter(self: C10dBackend, send: Any, recv: Any, root: Any, shares: Any) -> None:
    inputs = [list(send.view(self.size, -1))] if send is not None else []
    self.inner.scatter([recv], inputs, self._options(c10d.ScatterOptions, rootRank=root)).wait()


def _all_to_all(self: C10dBackend, send: Any, recv: Any, root: Any, shares: Any) -> None:
    # always with counts: another rank may give them, and gloo runs another exchange without them
    sent, received = shares or ([send.numel() // self.size] * self.size, [recv.numel() // self.size] * self.size)
    self.inner.alltoall_base(recv, send, received, sent, self._options(c10d.AllToAllOptions)).wait()


MOVES: dict[Row, Callable[..., None]] = {
    ROWS["barrier"]: _barrier,
    ROWS["broadcast"]: _broadcast,
    ROWS["all_gather_single"]: _all_gather_single,
    ROWS["all_gather"]: _all_gather,
    ROWS["gather"]: _gather,
    ROWS["scatter"]: _scatter,
    ROWS["all_to_all_single"]: _all_to_all,
    ROWS["all_to_all"]: _all_to_all,
}
