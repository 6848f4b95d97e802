"""How does NCCL carry a process group? CUDA tensors, by nccl4py.

What a call means for CUDA streams is in ``streams``, which of NCCL's calls make a row of the table in ``calls``, and
where the communicators come from in ``connection``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from hpcdist.backends.nccl import datatypes
from hpcdist.backends.nccl.calls import Call, calls_of, scaled
from hpcdist.backends.nccl.connection import Connections, Link
from hpcdist.backends.nccl.library import FLOAT8_SINCE, Library
from hpcdist.backends.nccl.streams import Batch, StreamWork
from hpcdist.core import reduction
from hpcdist.core.errors import DistBackendError
from hpcdist.core.table import ALL_REDUCE, EXCHANGES, Counts, Row
from hpcdist.core.work import Work


class NCCLBackend(Connections):
    """An NCCL communicator that belongs to one process group; takes what ``Connections`` takes."""

    has_groups: ClassVar[bool] = True

    def __init__(self, rank: int, size: int, library: Library, store: Any = None, cuda: Any = torch.cuda) -> None:
        super().__init__(rank, size, library, store, cuda)
        self._batch: Batch | None = None
        self._calls: dict[Row, Call] = calls_of(library.version)
        self._factors: dict[tuple[torch.dtype, float], Any] = {}
        self._token: torch.Tensor | None = None  # what a barrier reduces

    # -- collectives -----------------------------------------------------------------------------------

    def check_reduction(self, row: Row, dtype: torch.dtype, op: Any) -> None:
        """Raise where NCCL cannot reduce, naming the way over MPI."""
        datatypes.check(row, dtype, op, dtype not in datatypes.FLOAT8 or self._reduces_float8())

    def _reduces_float8(self) -> bool:
        return self._library.version >= FLOAT8_SINCE and self._cuda.get_device_capability() >= (9, 0)

    def run(
        self,
        row: Row,
        send: torch.Tensor | None,
        recv: torch.Tensor | None,
        op: Any,
        root: int | None,
        counts: Counts | None,
    ) -> None:
        """Queue one collective on the current stream; a barrier waits on the host as well."""
        if self._batch is not None:
            self.start(row, send, recv, op, root, counts, [], None)
            return
        if row.buffers == 0:
            self.start(row, None, None, None, None, None, [], None).wait()
            return
        tensor = send if send is not None else recv
        assert tensor is not None
        link = self._link or self._connect(tensor.device)
        call = self._prepared(link, row, send, recv, op, root, counts)
        if call is not None:
            current = link.streams.current()
            try:
                call(current.cuda_stream)
            except self._library.failures as error:
                raise self._failure(row.name, error) from error
            link.streams.mark(current)

    def start(
        self,
        row: Row,
        send: torch.Tensor | None,
        recv: torch.Tensor | None,
        op: Any,
        root: int | None,
        counts: Counts | None,
        result: list[torch.Tensor],
        finish: Callable[[], None] | None,
    ) -> Work:
        """Queue one collective on the side stream, behind what the current stream holds."""
        is_barrier = row.buffers == 0
        if is_barrier:
            link = self._link or self._connect(self.device)
            if self._token is None:
                self._token = torch.zeros(1, device=link.streams.device)
            row, send, recv, op = ALL_REDUCE, self._token, self._token, reduction.SUM
        tensor = send if send is not None else recv
        assert tensor is not None
        link = self._link or self._connect(tensor.device)
        call = self._prepared(link, row, send, recv, op, root, counts) or nothing
        buffers = [each for each in (send, recv) if each is not None]
        return self._launch(link, call, finish, result, buffers, row.name, is_barrier=is_barrier)

    def _launch(
        self,
        link: Link,
        call: Callable[[int], None],
        finish: Callable[[], None] | None,
        result: list[torch.Tensor],
        buffers: list[torch.Tensor],
        name: str,
        source: int | None = None,
        is_barrier: bool = False,
    ) -> Work:
        streams = link.streams
        if self._batch is not None:
            work = StreamWork(streams, streams.current(), result, buffers, source, is_barrier)
            return self._batch.add(streams, call, finish, work)
        work = StreamWork(streams, streams.fork(), result, buffers, source, is_barrier)
        try:
            call(streams.side.cuda_stream)
        except self._library.failures as error:
            raise self._failure(name, error) from error
        if finish is not None:
            with streams.on_side():
                finish()
        work.launched(streams.record_end())
        return streams.keep(work)

    def _prepared(
        self, link: Link, row: Row, send: Any, recv: Any, op: Any, root: int | None, counts: Counts | None
    ) -> Callable[[int], None] | None:
        """Return the call with buffers and op as NCCL takes them, to be made on a stream; None for no elements."""
        self._check_live()
        given = send if send is not None else recv
        if row.reduces:
            send, op = self._reducible(link, send, op)
            recv = None if recv is None else datatypes.as_reduced(recv)
        elif given.dtype not in datatypes.DATATYPES:
            same = send is recv
            send = None if send is None else datatypes.as_moved(send)
            recv = send if same else None if recv is None else datatypes.as_moved(recv)
        if row in EXCHANGES and send.data_ptr() == recv.data_ptr():
            send = send.clone()  # NCCL exchanges between two buffers only
        if counts is None and given.numel() == 0:
            return None
        if counts is not None and row.reduces:
            counts = scaled(counts, 2 if given.is_complex() else 1)
        elif counts is not None and given.dtype not in datatypes.DATATYPES:
            counts = scaled(counts, given.itemsize)
        made, library, comm = self._calls[row], self._library, link.comm
        return lambda stream: made(library, comm, send, recv, op, root, counts, stream)

    def _reducible(self, link: Link, send: torch.Tensor, op: Any) -> tuple[torch.Tensor, Any]:
        """Return the values to reduce, and NCCL's op."""
        names = datatypes.ops_of(send.dtype)
        if op != reduction.PREMUL_SUM:
            return datatypes.as_reduced(send), self._library.core.NcclRedOp[names[op]]
        factor = reduction.premultiplier(op)
        if isinstance(factor, torch.Tensor):
            if factor.is_complex() and not send.is_complex():
                raise TypeError(f"PREMUL_SUM of {send.dtype} by a factor of {factor.dtype}; expected a real one")
            return datatypes.as_reduced(send * factor.to(send.dtype)), self._library.core.NcclRedOp.SUM
        values = datatypes.as_reduced(send)
        key = (values.dtype, float(factor))
        made = self._factors.get(key)
        if made is None:  # kept: NCCL has room for many, and a training loop uses one or two
            made = link.comm.create_pre_mul_sum(
                datatypes.bits(float(factor), values.dtype),
                self._library.core.NcclDataType[datatypes.DATATYPES[values.dtype]],
            )
            self._factors[key] = made
        return values, made

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """Hold back the calls made inside and launch them at the end as one group; nothing of an inner one."""
        if self._batch is not None:
            yield
            return
        batch = self._batch = Batch()
        try:
            yield
        finally:
            self._batch = None
        if batch.calls:
            with self._failing("group of calls"):
                batch.launch(self._library.core.group)

    # -- point to point --------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        """Queue a send on the current stream; NCCL has no tags, so messages match in order."""
        self._message("send", tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> int:
        """Queue a receive on the current stream."""
        source = named(src)
        self._message("recv", tensor, source)
        return source

    def _message(self, name: str, tensor: torch.Tensor, peer: int) -> None:
        link, to = self._pair(peer, tensor.device)
        data = datatypes.as_moved(tensor)
        if data.numel():
            current = link.streams.current()
            with self._failing(name):
                getattr(link.comm, name)(data, to, stream=current.cuda_stream)
            link.streams.mark(current)

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        """Queue a send on the side stream."""
        return self._begin_message("send", tensor, dst, None, None, [])

    def irecv(self, tensor: torch.Tensor, src: int | None, tag: int, finish: Callable[[], None] | None) -> Work:
        """Queue a receive on the side stream."""
        source = named(src)
        return self._begin_message("recv", tensor, source, source, finish, [tensor])

    def _begin_message(
        self,
        name: str,
        tensor: torch.Tensor,
        peer: int,
        source: int | None,
        finish: Callable[[], None] | None,
        result: list[torch.Tensor],
    ) -> Work:
        if self._batch is not None:
            link, to = self._link or self._connect(tensor.device), peer
        else:
            link, to = self._pair(peer, tensor.device)
        self._check_live()
        data = datatypes.as_moved(tensor)
        method = getattr(link.comm, name)

        def call(stream: int) -> None:
            if data.numel():
                method(data, to, stream=stream)

        return self._launch(link, call, finish, result, [tensor], name, source)

    def close(self) -> None:
        """Free the communicators; every rank calls it."""
        super().close()
        self._token = None
        self._factors.clear()


def nothing(stream: int) -> None:
    """Stand for a call on no elements, which NCCL need not hear of."""


def named(src: int | None) -> int:
    """Return the sender; DistBackendError where it is anyone."""
    if src is None:
        raise DistBackendError(
            "NCCL cannot receive from anyone: name the sender (src=), or receive a CPU tensor, which MPI carries"
        )
    return src
