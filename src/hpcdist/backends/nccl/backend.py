"""How does NCCL carry a process group? CUDA tensors, by nccl4py.

The communicator is made by the first call on a CUDA tensor, or at once where ``device_id`` names the GPU. What a call
means for CUDA streams is in ``streams``, how the ranks find each other in ``bootstrap``, and which of NCCL's calls
make a row of the table in ``calls``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import PrefixStore

from hpcdist.backends.nccl import bootstrap as finding
from hpcdist.backends.nccl import datatypes
from hpcdist.backends.nccl.calls import Call, calls_of, scaled
from hpcdist.backends.nccl.library import FLOAT8_SINCE, SHRINK_SINCE, Library, check_gpu, load
from hpcdist.backends.nccl.streams import Batch, Streams, StreamWork
from hpcdist.core import reduction, registry
from hpcdist.core.backend import Backend, Bootstrap, Counts
from hpcdist.core.errors import DistBackendError
from hpcdist.core.table import ALL_REDUCE, ALL_TO_ALL, ALL_TO_ALL_SINGLE, Row
from hpcdist.core.work import Work
from hpcdist.launch import devices


class Link:
    """An NCCL communicator and its streams."""

    def __init__(self, comm: Any, streams: Streams) -> None:
        self.comm = comm
        self.streams = streams


class NCCLBackend(Backend):
    """An NCCL communicator that belongs to one process group.

    Args:
        rank, size: this rank of the group, and how many there are.
        library: ``nccl.core``.
        store: the group's own part of a store, where there is no CPU backend to bootstrap over.
        cuda: ``torch.cuda``, whose streams and events are used.
    """

    name: ClassVar[str] = "nccl"
    has_groups: ClassVar[bool] = True

    def __init__(self, rank: int, size: int, library: Library, store: Any = None, cuda: Any = torch.cuda) -> None:
        self.rank = rank
        self.size = size
        self._library = library
        self._store = store
        self._cuda = cuda
        self._link: Link | None = None
        self._pairs: dict[int, Link] = {}  # by peer: for messages outside a group call
        self._is_eager = False
        self._batch: Batch | None = None
        self._ended: DistBackendError | None = None
        self._calls: dict[Row, Call] = calls_of(library.version)
        self._factors: dict[tuple[torch.dtype, float], Any] = {}
        self._token: torch.Tensor | None = None  # what a barrier reduces
        self._owned_peer: Backend | None = None
        self._relay: finding.RelayChannel | None = None  # to be told over by the parent's CPU backend

    @classmethod
    def connect(cls, bootstrap: Bootstrap) -> NCCLBackend:
        """Make the group's NCCL; its communicator at once where the device is named.

        Raises:
            DistBackendError: no nccl4py, no libnccl, no GPU, or two ranks on one.
        """
        library = load()
        check_gpu()
        backend = cls(bootstrap.rank, bootstrap.size, library, channel_store(bootstrap))
        backend.peer = bootstrap.peer
        if backend.peer is None and bootstrap.comm is not None:
            # a group of NCCL alone under MPI: a communicator of MPI to find each other over
            backend.peer = backend._owned_peer = registry.connect("mpi", bootstrap)
        if bootstrap.device_id is not None and bootstrap.device_id.type == "cuda":
            backend._connect(bootstrap.device_id)
            backend._is_eager = True
        else:
            choose_device(bootstrap.comm)
        return backend

    # -- the communicator ------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The GPU that the group is on; before it is connected, the current one."""
        if self._link is not None:
            return self._link.streams.device
        return torch.device("cuda", self._cuda.current_device())

    def _channel(self) -> finding.Channel:
        if self._store is not None:
            return finding.StoreChannel(self._store, self.rank)
        if self.peer is not None:
            return finding.PeerChannel(self.peer)
        if self._relay is not None:
            return self._relay
        raise DistBackendError(
            "backend 'nccl' has nothing to find the other ranks over: make the group with a CPU backend "
            "('cpu:mpi,cuda:nccl') or a store"
        )

    def _connect(self, device: torch.device) -> Link:
        """Make the group's communicator on a device; every rank of the group is here."""
        self._check_live()
        if self.peer is not None and self.size > 1:
            finding.check_devices(self.peer, device)
        ids = finding.unique_ids(self._library, self._channel(), self.rank, self.size)
        self._link = self._made(device, self.size, self.rank, ids)
        return self._link

    def _made(self, device: torch.device, size: int, rank: int, ids: Any) -> Link:
        with self._failing("connect"), self._cuda.device(device):
            return Link(self._library.core.Communicator.init(size, rank, ids), Streams(device, self._cuda))

    def _pair(self, peer: int, device: torch.device) -> tuple[Link, int]:
        """Return the communicator for messages with one rank, and that rank in it.

        In a group connected at once it is the group's. Otherwise it is one of the two ranks alone, as in c10d,
        because the others of the group do not come to a message.
        """
        if peer == self.rank:
            raise DistBackendError(
                "NCCL carries a message to oneself only together with its receive: use batch_isend_irecv"
            )
        if self._is_eager:
            return self._link or self._connect(device), peer
        link = self._pairs.get(peer)
        if link is None:
            self._check_live()
            unique_id = finding.pair_id(self._library, self._channel(), self.rank, peer)
            link = self._pairs[peer] = self._made(device, 2, int(self.rank > peer), unique_id)
        return link, int(peer > self.rank)

    def _check_live(self) -> None:
        if self._ended is not None:
            raise self._ended

    @contextmanager
    def _failing(self, call: str) -> Iterator[None]:
        """Turn NCCL's errors into c10d's."""
        try:
            yield
        except self._library.failures as error:
            raise self._failure(call, error) from error

    def _failure(self, call: str, error: Exception) -> DistBackendError:
        detail = ""
        if self._link is not None and self._link.comm.is_valid:
            detail = self._link.comm.get_last_error()
        elif call == "connect":
            detail = f"if two ranks use one GPU, bind them apart or set {devices.SHARE}=1"
        return DistBackendError(
            f"{call} on rank {self.rank} of {self.size} failed in NCCL "
            f"{'.'.join(map(str, self._library.version))}: {error}{' (' + detail + ')' if detail else ''}"
        )

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
        if row in (ALL_TO_ALL, ALL_TO_ALL_SINGLE) and send.data_ptr() == recv.data_ptr():
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
        values, names = datatypes.as_reduced(send), datatypes.ops_of(send.dtype)
        if op != reduction.PREMUL_SUM:
            return values, self._library.core.NcclRedOp[names[op]]
        factor = reduction.premultiplier(op)
        if isinstance(factor, torch.Tensor):
            return values * factor.to(values.dtype), self._library.core.NcclRedOp.SUM
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

    # -- groups ----------------------------------------------------------------------------------------

    def split(self, subgroups: Sequence[Sequence[int]], names: Sequence[str], timeout: timedelta) -> NCCLBackend | None:
        """Make all subgroups by one ncclCommSplit; where this group is not connected yet, they connect themselves."""
        index = next((i for i, ranks in enumerate(subgroups) if self.rank in ranks), None)
        link = self._link
        comm = None
        if link is not None:
            self._check_live()
            self._cuda.synchronize(link.streams.device)  # NCCL wants none of the parent's calls outstanding
            key = 0 if index is None else list(subgroups[index]).index(self.rank)
            with self._failing("split"):
                comm = link.comm.split(index, key)
        owned = None
        if self._owned_peer is not None:
            owned = self._owned_peer.split(subgroups, names, timeout)
        if index is None:
            return None
        child = self._child(subgroups[index], names[index], owned)
        if link is not None:
            child._link = Link(comm, Streams(link.streams.device, self._cuda))
            child._is_eager = True
        return child

    def create_group(self, ranks: Sequence[int], name: str, timeout: timedelta) -> NCCLBackend:
        """Make a subgroup that connects itself: ncclCommSplit would want all ranks of this one."""
        owned = self._owned_peer.create_group(ranks, name, timeout) if self._owned_peer is not None else None
        return self._child(ranks, name, owned)

    def _child(self, ranks: Sequence[int], name: str, owned: Backend | None) -> NCCLBackend:
        store = None if self._store is None else PrefixStore(f"group-{name}", self._store)
        child = type(self)(list(ranks).index(self.rank), len(ranks), self._library, store, self._cuda)
        child.peer = child._owned_peer = owned
        if self.peer is not None:
            child._relay = finding.RelayChannel(self.peer, list(ranks))
        elif self._relay is not None:
            child._relay = finding.RelayChannel(self._relay.peer, [self._relay.ranks[rank] for rank in ranks])
        return child

    def shrink(self, exclude: Sequence[int], name: str, has_failed: bool = False) -> NCCLBackend:
        """Make a communicator without some ranks by ncclCommShrink; only the others call.

        Args:
            exclude: the ranks to leave out; the others keep their order.
            name: the new group's name, the same on all of them.
            has_failed: those ranks failed: end what is under way with them first (NCCL_SHRINK_ABORT).

        Raises:
            ValueError: this rank is to be left out.
            DistBackendError: NCCL is older than 2.27, or fails.
        """
        gone = set(exclude)
        if self.rank in gone:
            raise ValueError(f"rank {self.rank} is one of those to leave out ({sorted(gone)}); only the others call")
        remaining = [rank for rank in range(self.size) if rank not in gone]
        if self._library.version < SHRINK_SINCE:
            raise DistBackendError(
                f"shrink needs NCCL {'.'.join(map(str, SHRINK_SINCE))} or later (ncclCommShrink); this one is "
                f"{'.'.join(map(str, self._library.version))}"
            )
        child = self._child(remaining, name, None)
        if self._link is not None:
            streams = self._link.streams
            flags = self._library.core.CommShrinkFlag
            if not has_failed:
                self._cuda.synchronize(streams.device)
            with self._failing("shrink"):
                flag = flags.ABORT if has_failed else flags.DEFAULT
                comm = self._link.comm.shrink(sorted(gone), flag=flag)
            child._link = Link(comm, Streams(streams.device, self._cuda))
            child._is_eager = True
        return child

    # -- the end ---------------------------------------------------------------------------------------

    def _links(self) -> list[Link]:
        """Return the communicators in an order that is the same on the two ranks of each: pairs by their ranks."""
        pairs = sorted(self._pairs, key=lambda peer: (min(peer, self.rank), max(peer, self.rank)))
        links = [self._pairs[peer] for peer in pairs]
        return [*links, self._link] if self._link is not None else links

    def check_async(self) -> DistBackendError | None:
        """Return the error that a call under way ran into on the device, or None; a watchdog asks."""
        if self._ended is not None:
            return self._ended
        for link in self._links():
            if not link.comm.is_valid:
                continue
            result = int(link.comm.get_async_error())
            if result not in (0, IN_PROGRESS):
                detail = link.comm.get_last_error()
                return DistBackendError(
                    f"NCCL reports {self._library.core.get_error_string(result)} on rank {self.rank} of "
                    f"{self.size}: {detail}"
                )
        return None

    def is_idle(self) -> bool:
        """Tell whether the device is through with every call of the group; a watchdog asks."""
        return all(link.streams.is_idle() for link in self._links())

    def abort(self, reason: str = "it was aborted") -> None:
        """End the communicators and what is under way on them, without the other ranks; any thread may call.

        Later calls, and ``wait()`` of what was under way, raise DistBackendError.
        """
        if self._ended is not None:
            return
        self._ended = DistBackendError(f"the NCCL communicator of rank {self.rank} of {self.size} is gone: {reason}")
        for link in self._links():
            link.comm.abort()
            link.streams.fail_all(self._ended)

    def close(self) -> None:
        """Free the communicators, once what was queued is through; every rank calls it.

        ncclCommDestroy waits for the other ranks of the node, so all ranks free theirs in one order: pairs by
        their ranks, then the group's. A communicator with an error is aborted, which waits for nobody.
        """
        super().close()
        failure = self.check_async() if self._ended is None else None
        if failure is not None:
            self.abort(str(failure))
        if self._ended is None:
            for link in self._links():
                self._cuda.synchronize(link.streams.device)
                link.comm.finalize()
                link.comm.destroy()
            self._ended = DistBackendError("the NCCL communicator was freed: its group is destroyed")
        self._pairs, self._link, self._token = {}, None, None
        if self._owned_peer is not None:
            self._owned_peer.close()
            self._owned_peer = None


IN_PROGRESS = 7  # ncclInProgress


def nothing(stream: int) -> None:
    """Stand for a call on no elements, which NCCL need not hear of."""


def named(src: int | None) -> int:
    """Return the sender; DistBackendError where it is anyone."""
    if src is None:
        raise DistBackendError(
            "NCCL cannot receive from anyone: name the sender (src=), or receive a CPU tensor, which MPI carries"
        )
    return src


def channel_store(bootstrap: Bootstrap) -> Any:
    """Return a part of the store for NCCL alone; None where there is MPI or no store."""
    over_mpi = bootstrap.comm is not None or getattr(bootstrap.peer, "comm", None) is not None
    if over_mpi or bootstrap.store is None:
        return None
    return PrefixStore("nccl", bootstrap.store)


def choose_device(comm: Any) -> None:
    """Make this rank's GPU the current one where there is a choice; all ranks of ``comm`` call.

    With one GPU in sight nothing is done, so that CUDA starts only when a tensor asks for it. Where the caller has
    chosen already (CUDA is running), or where ranks outnumber GPUs, the current device stays; two ranks on one are
    found when they connect.
    """
    chosen = torch.cuda.is_initialized()
    try:
        device = devices.mine(comm)
    except DistBackendError:
        return
    if not chosen and torch.cuda.device_count() > 1:
        torch.cuda.set_device(device)
