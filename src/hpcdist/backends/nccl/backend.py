"""NCCL backend: carries a process group's CUDA tensors, by nccl4py.

``streams`` has the stream semantics of calls and the lifetime of memory, ``calls`` NCCL's functions for each row of the
table, and ``communicators`` the creation of communicators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch

from hpcdist.backends.nccl import bootstrap as finding
from hpcdist.backends.nccl import datatypes, variables
from hpcdist.backends.nccl.calls import Function, apart, calls_of, message, premultiplied
from hpcdist.backends.nccl.communicators import Communicators, Link
from hpcdist.backends.nccl.library import Library, check_gpu, config_of, load
from hpcdist.backends.nccl.streams import Batch, Held, PendingCall, Streams, StreamWork, oldest
from hpcdist.core import reduction, registry
from hpcdist.core.backend import Backend, Bootstrap
from hpcdist.core.call import Call, Run, Start
from hpcdist.core.call_log import OwnCallLog
from hpcdist.core.call_words import words_of
from hpcdist.core.errors import DistBackendError, end_all
from hpcdist.core.objects import TensorObjects
from hpcdist.core.table import ALL_REDUCE, EXCHANGES, Row, scale
from hpcdist.core.work import Work

ALONE = "NCCL carries a message to oneself only together with its receive: use batch_isend_irecv"

Queue = Callable[[int], None]  # queues a call on the stream of a handle; references all of its memory


class NCCLBackend(Backend):
    """The NCCL communicators of one process group, and the calls on them.

    Without a CPU backend for the bootstrap, the store has a prefix of the group's own.
    """

    name: ClassVar[str] = "nccl"
    has_groups: ClassVar[bool] = True

    def __init__(self, rank: int, size: int, library: Library, store: Any = None) -> None:
        self.rank = rank
        self.size = size
        self.communicators = self.faults = Communicators(rank, size, library)
        self.objects = TensorObjects(self, self.run)
        self._library = library
        self._owned_peer: Backend | None = None
        self._given: finding.Channel | None = None if store is None else finding.StoreChannel(store, rank)
        self.batch = Batch(self._launch)
        self._calls: dict[Row, Function] = calls_of(library)
        self._ops = {each.name: int(each) for each in library.core.NcclRedOp}
        self._types = {dtype: int(library.core.NcclDataType[name]) for dtype, name in datatypes.DATATYPES.items()}
        self._token: torch.Tensor | None = None  # the tensor that a barrier reduces

    @classmethod
    def connect(cls, bootstrap: Bootstrap) -> NCCLBackend:
        """Make the group's backend, and its communicator at once if the device is named."""
        library = load()
        check_gpu()
        variables.warn()
        backend = cls(bootstrap.rank, bootstrap.size, library, finding.channel_store(bootstrap))
        backend.peer, backend.communicators.options = bootstrap.peer, bootstrap.options
        if backend.peer is None and bootstrap.comm is not None:
            # a group with NCCL only, under MPI: MPI's communicator for the bootstrap
            backend.peer = backend._owned_peer = registry.connect("mpi", bootstrap)
        if bootstrap.device_id is not None and bootstrap.device_id.type == "cuda":
            backend.connect_device(bootstrap.device_id)
        else:
            finding.choose_device(bootstrap.comm)
        return backend

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The group's GPU; before it is connected, the current one."""
        for link in self.communicators.links():
            return link.streams.device
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def calls(self) -> OwnCallLog | None:  # type: ignore[override]
        """The log of this rank's collectives, unless a graph has captured some, which it repeats unseen."""
        link = self.communicators.group
        return None if link is None or link.streams.is_in_graph else link.calls

    def connect_device(self, device: torch.device) -> None:
        """Make the group's communicator on a GPU, if there is none yet, and use it for messages too."""
        if self.communicators.group is None:
            self._connect(device)
        self.communicators.is_eager = True

    def _connect(self, device: torch.device) -> Link:
        """Make the group's communicator on a device; every rank of the group calls."""
        self.communicators.check_live()
        return self.communicators.connect(device, finding.known(self._channel()), self.peer)

    def _channel(self) -> finding.Channel | None:
        """Return the channel of the bootstrap: a part of a store, this group's CPU backend, or a parent's."""
        if self.peer is None or isinstance(self._given, finding.StoreChannel):
            return self._given
        return finding.PeerChannel(self.peer)

    def _pair(self, peer: int, device: torch.device) -> tuple[Link, int]:
        """Return the communicator for messages with one rank, and that rank in it.

        In a group connected at once it is the group's. Otherwise it is of the two ranks only, as in c10d, because the
        other ranks do not take part in a message.
        """
        if peer == self.rank:
            raise DistBackendError(ALONE)
        communicators = self.communicators
        communicators.check_live()
        if communicators.is_eager:
            return communicators.group or self._connect(device), peer
        link = communicators.pairs.get(peer) or communicators.connect_pair(device, finding.known(self._channel()), peer)
        return link, int(peer > self.rank)

    # -- collectives -----------------------------------------------------------------------------------

    def check_reduction(self, row: Row, dtype: torch.dtype, op: Any) -> None:
        """Raise if NCCL cannot reduce; the error names the way over MPI."""
        has_float8 = dtype not in datatypes.FLOAT8 or torch.cuda.get_device_capability(self.device) >= (9, 0)
        datatypes.check(row, dtype, op, has_float8)

    def run(self, call: Call) -> None:
        """Queue one collective on the current stream; a barrier waits on the host as well."""
        if self.batch.is_open:
            self.start(call._replace(finish=None, result=None))
            return
        if call.row.buffers == 0:
            self.start(Call(call.row)).wait()
            return
        link = self._link_for(call)
        queue = self._queued(link, call)
        self.record(call)
        self._run(link, call.row.name, queue)

    def _run(self, link: Link, name: str, queue: Queue) -> None:
        """Queue a call on the current stream."""
        if queue is not nothing:
            with link.streams.on_device():
                current = link.streams.current()
                self.communicators.launch(name, queue, current.cuda_stream)
                link.streams.mark(current)

    def start(self, call: Call) -> Work:
        """Queue one collective on the side stream, behind the work on the current stream."""
        made, is_barrier = call, call.row.buffers == 0
        if is_barrier:
            link = self.communicators.group or self._connect(self.device)
            if self._token is None:
                self._token = torch.zeros(1, device=link.streams.device)
            call = Call(ALL_REDUCE, self._token, self._token, reduction.SUM, finish=call.finish, result=call.shown())
        link = self._link_for(call)
        queue = self._queued(link, call)
        self.record(made)
        return self._start(link, call.row.name, queue, call.finish, call.shown(), call.nbytes, None, is_barrier)

    def prepare(self, call: Call) -> tuple[Run, Start | None]:
        """Return functions that queue a collective again, on the current stream and on the side stream."""
        row, send, _, op, root, *_ = call
        link = self.communicators.group
        is_plain = send is not None and call.recv is not None and call.counts is None and row not in EXCHANGES
        if link is None or not is_plain or send.dtype not in self._types or not send.numel():
            return super().prepare(call)
        name, nbytes = row.name, call.nbytes
        number = self._op(send.dtype, op) if row.reduces else None
        rest = self._types[send.dtype], number, root, None
        function, calls, words = partial(self._calls[row], link.where), link.calls, words_of(call, self.rank, self.size)

        def run(send: torch.Tensor, recv: torch.Tensor) -> None:
            if self.batch.is_open:
                self.run(Call(row, send, recv, op, root))
                return
            if calls is not None:
                calls.add(*words)
            self._run(link, name, partial(function, apart(row, self.rank, send, recv), recv, *rest))

        def start(send: torch.Tensor, recv: torch.Tensor) -> Work:
            queue = partial(function, apart(row, self.rank, send, recv), recv, *rest)
            if calls is not None:
                calls.add(*words)
            return self._start(link, name, queue, None, [recv], nbytes)

        return run, start

    def _link_for(self, call: Call) -> Link:
        link = self.communicators.group
        device = call.tensor.device if link is None else link.streams.device
        check_device(self, call.row.name, device, call.send, call.recv)
        return self._connect(device) if link is None else link

    def _start(
        self,
        link: Link,
        name: str,
        queue: Queue,
        finish: Callable[[], None] | None,
        result: list[torch.Tensor],
        nbytes: int,
        source: int | None = None,
        is_barrier: bool = False,
    ) -> Work:
        """Queue a call on the side stream, and ``finish``, which copies its result back, behind it.

        ``queue`` and ``finish`` reference all memory that the device will use (see ``streams``).
        """
        pending = PendingCall(link.streams, link.streams.current(), (queue, finish), nbytes)
        return self.batch.begin(Held(name, queue, finish, StreamWork(pending, result, source, is_barrier)))

    def _launch(self, streams: Streams, calls: list[Held], is_group: bool) -> None:
        """Make a call on the side stream, or several in one group."""

        def queue_all(stream: int) -> None:
            with self._library.core.group():
                for each in calls:
                    each.queue(stream)

        name, queue = ("group of calls", queue_all) if is_group else (calls[0].name, calls[0].queue)
        self.communicators.launch(name, queue, streams.side.cuda_stream)

    def _queued(self, link: Link, call: Call) -> Queue:
        """Return a function that queues a collective, with NCCL's buffers and op; ``nothing`` for no elements."""
        if link.calls is not None:
            link.calls.check()  # first: calls that differ are the reason of what NCCL reports
        self.communicators.check_live()
        row, send, recv, op, root, counts, *_ = call
        given = call.tensor
        dtype = given.dtype
        is_known = dtype in self._types
        number, function = None, self._calls[row]
        if row.reduces and op == reduction.PREMUL_SUM:
            send, factor = datatypes.premultiplied(send, op)
            function = premultiplied(function, factor)
        elif row.reduces:
            number = self._op(dtype, op)
        elif not is_known:
            is_in_place = send is recv
            send = None if send is None else datatypes.as_moved(send)
            recv = send if is_in_place else None if recv is None else datatypes.as_moved(recv)
        send = apart(row, self.rank, send, recv, counts)
        if counts is None:
            if given.numel() == 0:
                return nothing
        elif not is_known:
            counts = scale(counts, given.itemsize)
        datatype = self._types[dtype if is_known else torch.uint8]
        return partial(function, link.where, send, recv, datatype, number, root, counts)

    def _op(self, dtype: torch.dtype, op: Any) -> int:
        return self._ops[datatypes.ops_of(dtype)[op]]

    # -- point to point --------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        """Queue a send on the current stream; NCCL has no tags, so messages match in order."""
        self._run(*self._message("send", tensor, dst))

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> int:
        """Queue a receive on the current stream."""
        source = named(src)
        self._run(*self._message("recv", tensor, source))
        return source

    def isend(self, tensor: torch.Tensor, dst: int, tag: int, finish: Callable[[], None] | None = None) -> Work:
        """Queue a send on the side stream."""
        return self._start(*self._message("send", tensor, dst), finish, [], tensor.nbytes)

    def irecv(self, tensor: torch.Tensor, src: int | None, tag: int, finish: Callable[[], None] | None) -> Work:
        """Queue a receive on the side stream."""
        source = named(src)
        return self._start(*self._message("recv", tensor, source), finish, [tensor], tensor.nbytes, source)

    def _message(self, name: str, tensor: torch.Tensor, peer: int) -> tuple[Link, str, Queue]:
        """Return the communicator of a message, its name, and a function that queues it."""
        if self.batch.is_open:
            link, to = self.communicators.group or self._connect(tensor.device), peer
        else:
            link, to = self._pair(peer, tensor.device)
        if not tensor.numel():
            return link, name, nothing
        check_device(self, name, link.streams.device, tensor)
        data = datatypes.as_moved(tensor)
        return link, name, partial(message, link.where, name, data, self._types[data.dtype], to)

    # -- groups ----------------------------------------------------------------------------------------

    def split(self, subgroups: Sequence[Sequence[int]], names: Sequence[str], timeout: timedelta) -> NCCLBackend | None:
        """Make all subgroups by one ncclCommSplit; if this group is not connected yet, each connects by itself."""
        index = next((i for i, ranks in enumerate(subgroups) if self.rank in ranks), None)
        link = self.communicators.group
        if link is not None:
            color, key = None, 0
            if index is not None:  # a rank may give only its own subgroup
                color, key = min(subgroups[index]), list(subgroups[index]).index(self.rank)
            comm = self.communicators.split(color, key, config_of(self._library, self._childs_options))
        owned = self._owned_peer.split(subgroups, names, timeout) if self._owned_peer is not None else None
        if index is None:
            return None
        child = self._child(subgroups[index], names[index], owned)
        return child if link is None else child._take_over(comm, link, names[index])

    def create_group(self, ranks: Sequence[int], name: str, timeout: timedelta) -> NCCLBackend:
        """Make a subgroup that connects by itself: ncclCommSplit would need all ranks of this one."""
        owned = self._owned_peer.create_group(ranks, name, timeout) if self._owned_peer is not None else None
        return self._child(ranks, name, owned)

    def shrink(self, excluded: Sequence[int], name: str, aborts: bool) -> NCCLBackend:
        """Make a communicator without some ranks by ncclCommShrink; only the others call, and keep their order.

        The name is the new group's, the same on all of them. With ``aborts`` the excluded ranks have failed: calls
        under way with them are ended first (NCCL_SHRINK_ABORT).
        """
        child = self._child([rank for rank in range(self.size) if rank not in excluded], name, None)
        link = self.communicators.group
        if link is None:
            return child
        return child._take_over(self.communicators.shrink(excluded, aborts), link, name)

    @property
    def _childs_options(self) -> Any:
        """c10d's options of the next group made from this one: those given for it, or this one's."""
        return self.options or self.communicators.options

    def _child(self, ranks: Sequence[int], name: str, owned: Backend | None) -> NCCLBackend:
        child = type(self)(list(ranks).index(self.rank), len(ranks), self._library)
        child.peer = child._owned_peer = owned
        child.communicators.options = self._childs_options
        channel = self._channel()
        child._given = None if channel is None else channel.child(ranks, name)
        return child

    def _take_over(self, comm: Any, parent: Link, name: str) -> NCCLBackend:
        """Adopt a communicator that was made from the parent's, under the new group's name."""
        token = "" if parent.calls is None else f"{parent.calls.token}-{name}"
        self.communicators.adopt(comm, parent.streams.device, token=token)
        self.communicators.is_eager = True
        return self

    # -- supervision and the end -----------------------------------------------------------------------

    def outstanding(self) -> Work | None:
        """Return the first call that the device has not ended."""
        return oldest(link.streams for link in self.communicators.links())

    def pending(self) -> list[Work]:
        """Return the asynchronous calls that the device has not ended."""
        return [*super().pending(), *(work for link in self.communicators.links() for work in link.streams.pending())]

    def close(self) -> None:
        """Free the communicators, after the device has ended the queued calls; every rank calls it.

        Everything is freed, although ``Communicators.close`` may raise.
        """
        leave = [] if self.communicators.ended is not None else [self.leave]
        end_all((super().close, *leave, self.communicators.close, partial(self._forget, lambda peer: peer.close())))

    def abort(self, reason: str) -> None:
        """Interrupt the calls under way, and drop the communicators."""
        super().abort(reason)
        if self.communicators.interrupt(reason):
            self.communicators.forget()
        self._forget(lambda peer: peer.abort(reason))

    def _forget(self, end: Callable[[Backend], None]) -> None:
        """Release the calls' objects; ``end`` is called with this group's own communicator of MPI."""
        self._token = None
        self._given = None  # the store, whose server may end with it
        if self._owned_peer is not None:
            end(self._owned_peer)
            self._owned_peer = None


def nothing(stream: int) -> None:
    """Do nothing: the call on no elements, which NCCL does not get."""


def check_device(backend: Backend, name: str, device: torch.device, *tensors: torch.Tensor | None) -> None:
    """Raise for a tensor on another GPU than the communicator or the call's other tensors."""
    for tensor in tensors:
        if tensor is not None and tensor.device != device:
            raise DistBackendError(
                f"{name} on rank {backend.rank} of {backend.size}: a tensor is on {tensor.device}, and the other "
                f"tensors or the group's communicator are on {device}: move it there"
            )


def named(src: int | None) -> int:
    """Return the sender; DistBackendError for any source."""
    if src is None:
        raise DistBackendError(
            "NCCL cannot receive from anyone: name the sender (src=), or receive a CPU tensor, which MPI carries"
        )
    return src
