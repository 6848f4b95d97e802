"""Recording stand-in for nccl4py and ``torch.cuda``, on CPU memory.

It has nccl4py's names and signatures (a test holds them against the real ones), refuses what NCCL refuses, and
writes every call to a journal. If it is given a way to the other ranks it also carries the data, of CPU tensors and
over MPI, so that the results of the calls can be looked at as well as their order.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import weakref
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hpcdist.core import reduction

JOURNAL: list[tuple[Any, ...]] = []


def take_journal() -> list[tuple[Any, ...]]:
    """Return what was recorded and begin anew."""
    taken = list(JOURNAL)
    JOURNAL.clear()
    return taken


# -- torch.cuda ------------------------------------------------------------------------------------------------

HANDLES = itertools.count(1)


class Stream:
    def __init__(self, device: Any = None, name: str | None = None) -> None:
        self.cuda_stream = self.stream_id = next(HANDLES)
        self.name = name or "side"
        STREAMS[self.cuda_stream] = self.name

    def wait_event(self, event: Event) -> None:
        JOURNAL.append((self.name, "waits for", event.recorded_on))

    def synchronize(self) -> None:
        JOURNAL.append(("host", "waits for", self.name))


STREAMS: dict[int, str] = {}


class Event:
    def __init__(self) -> None:
        self.recorded_on: str | None = None
        self.is_complete = True

    def record(self, stream: Stream) -> None:
        self.recorded_on = stream.name
        JOURNAL.append((stream.name, "records"))

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)

    def query(self) -> bool:
        return self.is_complete

    def synchronize(self) -> None:
        JOURNAL.append(("host", "waits for", f"event on {self.recorded_on}"))


class FakeCuda:
    """``torch.cuda``'s names, as far as the backend uses them."""

    Stream = Stream
    Event = Event

    def __init__(self) -> None:
        self.main = self._current = Stream(name="current")
        self.is_capturing = False
        self.capability = (9, 0)

    def current_stream(self, device: Any = None) -> Stream:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Any:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    @contextlib.contextmanager
    def device(self, device: Any) -> Any:
        yield

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return self.capability

    def synchronize(self, device: Any = None) -> None:
        JOURNAL.append(("host", "waits for", "device"))


# -- nccl.core: enums and ids ----------------------------------------------------------------------------------


class NcclInvalid(Exception):
    pass


class NCCLError(Exception):
    pass


class NcclRedOp(IntEnum):
    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


class NcclDataType(IntEnum):
    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT8E4M3 = 10
    FLOAT8E5M2 = 11


class CommShrinkFlag(IntEnum):
    DEFAULT = 0
    ABORT = 1


TAKEN = {
    torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int32, torch.int64,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint32, torch.uint64,
}  # fmt: skip


class UniqueId:
    def __init__(self, data: bytes = bytes(128)) -> None:
        self.data = data

    def __bytes__(self) -> bytes:
        return self.data

    @staticmethod
    def from_bytes(b: bytes | bytearray | memoryview) -> UniqueId:
        assert len(b) == 128, len(b)
        return UniqueId(bytes(b))


def get_unique_id(empty: bool = False) -> UniqueId:
    return UniqueId() if empty else UniqueId(os.urandom(128))


def get_error_string(nccl_result: int) -> str:
    return f"error {int(nccl_result)}"


class CustomRedOp:
    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.op = 100 + len(CUSTOM_OPS)
        CUSTOM_OPS[self.op] = self


CUSTOM_OPS: dict[int, CustomRedOp] = {}


# -- nccl.core: groups -----------------------------------------------------------------------------------------

DEPTH = 0
HELD: list[tuple[Any, ...]] = []


@contextlib.contextmanager
def group() -> Any:
    global DEPTH
    if DEPTH == 0:
        JOURNAL.append(("group", "start"))
    DEPTH += 1
    try:
        yield
    finally:
        DEPTH -= 1
        if DEPTH == 0:
            JOURNAL.append(("group", "end"))
            held = list(HELD)
            HELD.clear()
            play(held)


class Wire:
    """Tensors over MPI, as bytes: pickle knows no float8."""

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi

    @staticmethod
    def pack(tensor: torch.Tensor) -> tuple[torch.dtype, Any]:
        return tensor.dtype, tensor.reshape(-1).view(torch.uint8).numpy().copy()

    @staticmethod
    def unpack(packed: tuple[torch.dtype, Any]) -> torch.Tensor:
        return torch.from_numpy(packed[1]).view(packed[0])

    def allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [self.unpack(each) for each in self.mpi.allgather(self.pack(tensor))]

    def gather(self, tensor: torch.Tensor, root: int) -> list[torch.Tensor] | None:
        got = self.mpi.gather(self.pack(tensor), root)
        return None if got is None else [self.unpack(each) for each in got]

    def bcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        return self.unpack(self.mpi.bcast(self.pack(tensor), root))

    def scatter(self, tensors: list[torch.Tensor] | None, root: int) -> torch.Tensor:
        return self.unpack(self.mpi.scatter(None if tensors is None else [self.pack(t) for t in tensors], root))

    def alltoall(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self.unpack(each) for each in self.mpi.alltoall([self.pack(t) for t in tensors])]

    def isend(self, tensor: torch.Tensor, peer: int) -> Any:
        return self.mpi.isend(self.pack(tensor), peer)

    def recv(self, peer: int) -> torch.Tensor:
        return self.unpack(self.mpi.recv(source=peer))


UNFINISHED: list[Any] = []


def play(held: list[tuple[Any, ...]]) -> None:
    """Carry out calls that belong together: no order among sends and receives makes them wait."""
    sent, received = [], []
    for comm, name, args in held:
        if comm.mpi is None:
            continue
        if name == "send":
            sent.append(Wire(comm.mpi).isend(args[0], args[1]))
        elif name == "recv":
            received.append((comm, *args))
        else:
            getattr(comm, "_" + name)(*args)
    for comm, tensor, peer in received:
        tensor.copy_(Wire(comm.mpi).recv(peer).view(tensor.shape))
    UNFINISHED.extend(sent)  # a send is buffered: on a GPU the host does not wait for it either


# -- nccl.core: communicators ----------------------------------------------------------------------------------

FIND: Any = None  # (ids, rank, size) -> an MPI communicator, or None to record only


def combine(values: list[torch.Tensor], op: Any) -> torch.Tensor:
    """Return what NCCL would, in rank order."""
    dtype = values[0].dtype
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    if dtype is torch.bool:
        wide = torch.uint8
    if dtype in (torch.uint32, torch.uint64):
        wide = torch.int64
    wides = [value.to(wide) for value in values]
    if isinstance(op, CustomRedOp):
        total = sum(each * op.factor for each in wides)
    elif op in (NcclRedOp.SUM, NcclRedOp.AVG):
        total = torch.stack(wides).sum(0).to(wide)
        if op is NcclRedOp.AVG:
            total = reduction.average(total, len(values))
    elif op is NcclRedOp.PROD:
        total = torch.stack(wides).prod(0)
    else:
        stacked = torch.stack(wides)
        total = stacked.amax(0) if op is NcclRedOp.MAX else stacked.amin(0)
    return total.to(dtype)


COMMUNICATORS: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


class Communicator:
    def __init__(self, ptr: int | None = None) -> None:
        self.is_valid = False
        self.mpi: Any = None
        self.error = 0
        self.ptr = id(self)
        COMMUNICATORS[self.ptr] = self

    @classmethod
    def init(cls, nranks: int, rank: int, unique_id: Any, config: Any = None) -> Communicator:
        comm = cls()
        ids = [unique_id] if isinstance(unique_id, UniqueId) else list(unique_id)
        JOURNAL.append(("init", nranks, rank, len(ids)))
        comm.nranks, comm.rank, comm.is_valid = nranks, rank, True
        comm.ids = [bytes(each) for each in ids]
        comm.mpi = FIND(comm.ids, rank, nranks) if FIND is not None else None
        return comm

    def _allreduce(self, sendbuf: Any, recvbuf: Any, op: Any) -> None:
        recvbuf.copy_(combine(Wire(self.mpi).allgather(sendbuf), op).view(recvbuf.shape))

    def _broadcast(self, sendbuf: Any, recvbuf: Any, root: int) -> None:
        recvbuf.copy_(Wire(self.mpi).bcast(sendbuf, root).view(recvbuf.shape))

    def _reduce(self, sendbuf: Any, recvbuf: Any, op: Any, root: int) -> None:
        values = Wire(self.mpi).gather(sendbuf, root)
        if values is not None:
            recvbuf.copy_(combine(values, op).view(recvbuf.shape))

    def _allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        recvbuf.copy_(torch.cat([each.reshape(-1) for each in Wire(self.mpi).allgather(sendbuf)]).view(recvbuf.shape))

    def _reduce_scatter(self, sendbuf: Any, recvbuf: Any, op: Any) -> None:
        total = combine([each.reshape(self.nranks, -1) for each in Wire(self.mpi).allgather(sendbuf)], op)
        recvbuf.copy_(total[self.rank].view(recvbuf.shape))

    def _alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        got = Wire(self.mpi).alltoall(list(sendbuf.reshape(self.nranks, -1)))
        recvbuf.copy_(torch.cat(got).view(recvbuf.shape))

    def _gather(self, sendbuf: Any, recvbuf: Any, root: int) -> None:
        values = Wire(self.mpi).gather(sendbuf, root)
        if values is not None:
            recvbuf.copy_(torch.cat([each.reshape(-1) for each in values]).view(recvbuf.shape))

    def _scatter(self, sendbuf: Any, recvbuf: Any, root: int) -> None:
        values = list(sendbuf.reshape(self.nranks, -1)) if self.rank == root else None
        recvbuf.copy_(Wire(self.mpi).scatter(values, root).view(recvbuf.shape))

    def create_pre_mul_sum(self, scalar: Any, datatype: Any = None) -> CustomRedOp:
        assert isinstance(scalar, np.ndarray)
        assert scalar.size == 1
        dtype = {
            NcclDataType.FLOAT16: torch.float16, NcclDataType.BFLOAT16: torch.bfloat16,
            NcclDataType.FLOAT32: torch.float32, NcclDataType.FLOAT64: torch.float64,
            NcclDataType.FLOAT8E4M3: torch.float8_e4m3fn, NcclDataType.FLOAT8E5M2: torch.float8_e5m2,
        }[datatype]  # fmt: skip
        factor = torch.from_numpy(scalar.copy()).view(dtype).to(torch.float64).item()
        JOURNAL.append(("create_pre_mul_sum", factor, datatype.name))
        return CustomRedOp(factor)

    def split(self, color: int | None = None, key: int = 0, config: Any = None) -> Communicator:
        JOURNAL.append(("split", color, key))
        child = type(self)()
        child.nranks, child.rank = self.nranks, self.rank
        if color is not None:
            child.is_valid = True
        if self.mpi is not None:
            from mpi4py import MPI

            child.mpi = self.mpi.Split(MPI.UNDEFINED if color is None else color, key)
            if color is not None:
                child.nranks, child.rank = child.mpi.Get_size(), child.mpi.Get_rank()
        return child

    def shrink(
        self, exclude_ranks: Any = None, config: Any = None, flag: CommShrinkFlag = CommShrinkFlag.DEFAULT
    ) -> Communicator:
        gone = list(exclude_ranks or [])
        JOURNAL.append(("shrink", gone, flag.name))
        child = type(self)()
        child.is_valid, child.nranks = True, self.nranks - len(gone)
        child.rank = self.rank - sum(rank < self.rank for rank in gone)
        if self.mpi is not None:
            whole = self.mpi.Get_group()
            child.mpi = self.mpi.Create_group(whole.Excl(gone), 5)
        return child

    def get_async_error(self) -> int:
        return self.error

    def get_last_error(self) -> str:
        return "the last error"

    def finalize(self) -> None:
        JOURNAL.append(("finalize", self.nranks))

    def destroy(self) -> None:
        JOURNAL.append(("destroy", self.nranks))
        self.is_valid = False

    def abort(self) -> None:
        JOURNAL.append(("abort", self.nranks))
        self.is_valid = False


# -- nccl.bindings.nccl: NCCL's functions, on addresses ---------------------------------------------------------


def Comm(handle: int = 0) -> Communicator:
    return COMMUNICATORS[handle]


TYPES = {
    NcclDataType.INT8: torch.int8, NcclDataType.UINT8: torch.uint8, NcclDataType.INT32: torch.int32,
    NcclDataType.UINT32: torch.uint32, NcclDataType.INT64: torch.int64, NcclDataType.UINT64: torch.uint64,
    NcclDataType.FLOAT16: torch.float16, NcclDataType.FLOAT32: torch.float32, NcclDataType.FLOAT64: torch.float64,
    NcclDataType.BFLOAT16: torch.bfloat16, NcclDataType.FLOAT8E4M3: torch.float8_e4m3fn,
    NcclDataType.FLOAT8E5M2: torch.float8_e5m2,
}  # fmt: skip


def tensor_at(address: int, count: int, datatype: int) -> torch.Tensor:
    dtype = TYPES[NcclDataType(datatype)]
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def queue(comm: Communicator, name: str, args: tuple[Any, ...], stream: int) -> None:
    if not comm.is_valid:
        raise NCCLError(f"{name}: the communicator is no more")
    shown = tuple(
        (tuple(a.shape), str(a.dtype)) if isinstance(a, torch.Tensor) else getattr(a, "name", a) for a in args
    )
    JOURNAL.append((name, *shown, STREAMS[stream]))
    HELD.append((comm, name, args))
    if DEPTH == 0:
        held = list(HELD)
        HELD.clear()
        play(held)


def op_of(number: int) -> Any:
    return CUSTOM_OPS[number] if number in CUSTOM_OPS else NcclRedOp(number)


def send(sendbuff: int, count: int, datatype: int, peer: int, comm: Any, stream: int) -> None:
    queue(comm, "send", (tensor_at(sendbuff, count, datatype), peer), stream)


def recv(recvbuff: int, count: int, datatype: int, peer: int, comm: Any, stream: int) -> None:
    queue(comm, "recv", (tensor_at(recvbuff, count, datatype), peer), stream)


def all_reduce(sendbuff: int, recvbuff: int, count: int, datatype: int, op: int, comm: Any, stream: int) -> None:
    tensors = tensor_at(sendbuff, count, datatype), tensor_at(recvbuff, count, datatype)
    queue(comm, "allreduce", (*tensors, op_of(op)), stream)


def broadcast(sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, comm: Any, stream: int) -> None:
    tensors = tensor_at(sendbuff, count, datatype), tensor_at(recvbuff, count, datatype)
    queue(comm, "broadcast", (*tensors, root), stream)


def reduce(sendbuff: int, recvbuff: int, count: int, datatype: int, op: int, root: int, comm: Any, stream: int) -> None:
    tensors = tensor_at(sendbuff, count, datatype), tensor_at(recvbuff, count, datatype)
    queue(comm, "reduce", (*tensors, op_of(op), root), stream)


def all_gather(sendbuff: int, recvbuff: int, sendcount: int, datatype: int, comm: Any, stream: int) -> None:
    tensors = tensor_at(sendbuff, sendcount, datatype), tensor_at(recvbuff, sendcount * comm.nranks, datatype)
    queue(comm, "allgather", tensors, stream)


def reduce_scatter(
    sendbuff: int, recvbuff: int, recvcount: int, datatype: int, op: int, comm: Any, stream: int
) -> None:
    tensors = tensor_at(sendbuff, recvcount * comm.nranks, datatype), tensor_at(recvbuff, recvcount, datatype)
    queue(comm, "reduce_scatter", (*tensors, op_of(op)), stream)


def allto_all(sendbuff: int, recvbuff: int, count: int, datatype: int, comm: Any, stream: int) -> None:
    if sendbuff == recvbuff:
        raise NCCLError("ncclAlltoAll is not in place")
    whole = count * comm.nranks
    queue(comm, "alltoall", (tensor_at(sendbuff, whole, datatype), tensor_at(recvbuff, whole, datatype)), stream)


def gather(sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, comm: Any, stream: int) -> None:
    whole = count * (comm.nranks if comm.rank == root else 1)
    queue(comm, "gather", (tensor_at(sendbuff, count, datatype), tensor_at(recvbuff, whole, datatype), root), stream)


def scatter(sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, comm: Any, stream: int) -> None:
    whole = count * (comm.nranks if comm.rank == root else 1)
    queue(comm, "scatter", (tensor_at(sendbuff, whole, datatype), tensor_at(recvbuff, count, datatype), root), stream)


FUNCTIONS = (
    send, recv, all_reduce, broadcast, reduce, all_gather, reduce_scatter, allto_all, gather, scatter
)  # fmt: skip
BINDINGS = SimpleNamespace(Comm=Comm, **{each.__name__: each for each in FUNCTIONS})

CORE = SimpleNamespace(
    Communicator=Communicator,
    CommShrinkFlag=CommShrinkFlag,
    NcclDataType=NcclDataType,
    NcclInvalid=NcclInvalid,
    NcclRedOp=NcclRedOp,
    UniqueId=UniqueId,
    get_error_string=get_error_string,
    get_unique_id=get_unique_id,
    group=group,
)
FAILURES = (NcclInvalid, NCCLError)
