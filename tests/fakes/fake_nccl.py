"""Recording stand-in for nccl4py and ``torch.cuda``, on CPU memory.

It has nccl4py's names and signatures (a test holds them against the real ones), refuses what NCCL refuses, and
writes every call to a journal. It carries no data; the emulated GPUs do.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hpcdist.backends.nccl.library import Library

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


NcclRedOp = IntEnum("NcclRedOp", "SUM PROD MAX MIN AVG", start=0)
NcclDataType = IntEnum(
    "NcclDataType",
    "INT8 UINT8 INT32 UINT32 INT64 UINT64 FLOAT16 FLOAT32 FLOAT64 BFLOAT16 FLOAT8E4M3 FLOAT8E5M2",
    start=0,
)
CommShrinkFlag = IntEnum("CommShrinkFlag", "DEFAULT ABORT", start=0)


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


# -- nccl.core: communicators ----------------------------------------------------------------------------------

COMMUNICATORS: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


class Communicator:
    def __init__(self, ptr: int | None = None) -> None:
        self.is_valid = False
        self.error = 0
        self.ptr = id(self)
        COMMUNICATORS[self.ptr] = self

    @classmethod
    def init(cls, nranks: int, rank: int, unique_id: Any, config: Any = None) -> Communicator:
        comm = cls()
        ids = [unique_id] if isinstance(unique_id, UniqueId) else list(unique_id)
        JOURNAL.append(("init", nranks, rank, len(ids)))
        comm.nranks, comm.rank, comm.is_valid = nranks, rank, True
        return comm

    def create_pre_mul_sum(self, scalar: Any, datatype: Any = None) -> CustomRedOp:
        assert isinstance(scalar, np.ndarray)
        assert scalar.size == 1
        factor = torch.from_numpy(scalar.copy()).view(TYPES[datatype]).to(torch.float64).item()
        JOURNAL.append(("create_pre_mul_sum", factor, datatype.name))
        return CustomRedOp(factor)

    def split(self, color: int | None = None, key: int = 0, config: Any = None) -> Communicator:
        JOURNAL.append(("split", color, key))
        child = type(self)()
        child.nranks, child.rank = self.nranks, self.rank
        if color is not None:
            child.is_valid = True
        return child

    def shrink(
        self, exclude_ranks: Any = None, config: Any = None, flag: CommShrinkFlag = CommShrinkFlag.DEFAULT
    ) -> Communicator:
        gone = list(exclude_ranks or [])
        JOURNAL.append(("shrink", gone, flag.name))
        child = type(self)()
        child.is_valid, child.nranks = True, self.nranks - len(gone)
        child.rank = self.rank - sum(rank < self.rank for rank in gone)
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


TYPES = dict(
    zip(
        NcclDataType,
        (
            *(torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64),
            *(torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        ),
        strict=True,
    )
)


def elements(count: int, datatype: int) -> tuple[tuple[int], str]:
    """Return a buffer as the journal shows it."""
    return (count,), str(TYPES[NcclDataType(datatype)])


def op_of(number: int) -> Any:
    return CUSTOM_OPS[number] if number in CUSTOM_OPS else NcclRedOp(number).name


def queue(comm: Communicator, stream: int, name: str, *args: Any) -> None:
    if not comm.is_valid:
        raise NCCLError(f"{name}: the communicator is no more")
    JOURNAL.append((name, *args, STREAMS[stream]))


def send(sendbuff: int, count: int, datatype: int, peer: int, comm: Any, stream: int) -> None:
    queue(comm, stream, "send", elements(count, datatype), peer)


def recv(recvbuff: int, count: int, datatype: int, peer: int, comm: Any, stream: int) -> None:
    queue(comm, stream, "recv", elements(count, datatype), peer)


def all_reduce(sendbuff: int, recvbuff: int, count: int, datatype: int, op: int, comm: Any, stream: int) -> None:
    queue(comm, stream, "allreduce", *[elements(count, datatype)] * 2, op_of(op))


def broadcast(sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, comm: Any, stream: int) -> None:
    queue(comm, stream, "broadcast", *[elements(count, datatype)] * 2, root)


def reduce(sendbuff: int, recvbuff: int, count: int, datatype: int, op: int, root: int, comm: Any, stream: int) -> None:
    queue(comm, stream, "reduce", *[elements(count, datatype)] * 2, op_of(op), root)


def all_gather(sendbuff: int, recvbuff: int, sendcount: int, datatype: int, comm: Any, stream: int) -> None:
    queue(comm, stream, "allgather", elements(sendcount, datatype), elements(sendcount * comm.nranks, datatype))


def reduce_scatter(
    sendbuff: int, recvbuff: int, recvcount: int, datatype: int, op: int, comm: Any, stream: int
) -> None:
    whole = elements(recvcount * comm.nranks, datatype)
    queue(comm, stream, "reduce_scatter", whole, elements(recvcount, datatype), op_of(op))


def allto_all(sendbuff: int, recvbuff: int, count: int, datatype: int, comm: Any, stream: int) -> None:
    if sendbuff == recvbuff:
        raise NCCLError("ncclAlltoAll is not in place")
    queue(comm, stream, "alltoall", *[elements(count * comm.nranks, datatype)] * 2)


def gather(sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, comm: Any, stream: int) -> None:
    whole = count * (comm.nranks if comm.rank == root else 1)
    queue(comm, stream, "gather", elements(count, datatype), elements(whole, datatype), root)


def scatter(sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, comm: Any, stream: int) -> None:
    whole = count * (comm.nranks if comm.rank == root else 1)
    queue(comm, stream, "scatter", elements(whole, datatype), elements(count, datatype), root)


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


def library(version: tuple[int, ...] = (2, 30, 0), driver: Any = None) -> Library:
    """Return what stands for a release of NCCL."""
    return Library(CORE, BINDINGS, FAILURES, version, driver)
