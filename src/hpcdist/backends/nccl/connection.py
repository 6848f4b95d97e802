"""Which NCCL communicators does a group have, and how do they come and go?

One for the group, made by its first call on a CUDA tensor, or at once where ``device_id`` names the GPU; and one for
each rank that this one exchanges messages with outside a group call. How the ranks find each other is in
``bootstrap``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed.distributed_c10d import PrefixStore

from hpcdist.backends.nccl import bootstrap as finding
from hpcdist.backends.nccl.library import SHRINK_SINCE, Library, check_gpu, load
from hpcdist.backends.nccl.streams import Streams
from hpcdist.core import registry
from hpcdist.core.backend import Backend, Bootstrap
from hpcdist.core.errors import DistBackendError
from hpcdist.core.objects import TensorObjects
from hpcdist.core.work import Work
from hpcdist.launch import devices

IN_PROGRESS = 7  # ncclInProgress


class Link:
    """An NCCL communicator and its streams."""

    def __init__(self, comm: Any, streams: Streams) -> None:
        self.comm = comm
        self.streams = streams


class Connections(Backend):
    """The communicators of one process group; ``backend`` makes the calls on them.

    Args:
        rank, size: this rank of the group, and how many there are.
        library: ``nccl.core``.
        store: the group's own part of a store, where there is no CPU backend to bootstrap over.
        cuda: ``torch.cuda``, whose streams and events are used.
    """

    name: ClassVar[str] = "nccl"

    def __init__(self, rank: int, size: int, library: Library, store: Any = None, cuda: Any = torch.cuda) -> None:
        self.rank = rank
        self.size = size
        self._library = library
        self._store = store
        self._cuda = cuda
        self.unfinished = deque()
        self._link: Link | None = None
        self._pairs: dict[int, Link] = {}  # by peer: for messages outside a group call
        self._is_eager = False
        self.objects = TensorObjects(self)
        self._ended: DistBackendError | None = None
        self._owned_peer: Backend | None = None
        self._relay: finding.RelayChannel | None = None  # to be told over by the parent's CPU backend

    @classmethod
    def connect(cls, bootstrap: Bootstrap) -> Connections:
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
            return self._linked(self._library.core.Communicator.init(size, rank, ids), device)

    def _linked(self, comm: Any, device: torch.device) -> Link:
        """Return a communicator with streams, whose Works can be taken out of their wait."""
        streams = Streams(device, self._cuda)
        streams.interrupt = self.interrupt
        return Link(comm, streams)

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

    # -- groups ----------------------------------------------------------------------------------------

    def split(self, subgroups: Sequence[Sequence[int]], names: Sequence[str], timeout: timedelta) -> Connections | None:
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
            child._link = child._linked(comm, link.streams.device)
            child._is_eager = True
        return child

    def create_group(self, ranks: Sequence[int], name: str, timeout: timedelta) -> Connections:
        """Make a subgroup that connects itself: ncclCommSplit would want all ranks of this one."""
        owned = self._owned_peer.create_group(ranks, name, timeout) if self._owned_peer is not None else None
        return self._child(ranks, name, owned)

    def _child(self, ranks: Sequence[int], name: str, owned: Backend | None) -> Connections:
        store = None if self._store is None else PrefixStore(f"group-{name}", self._store)
        child = type(self)(list(ranks).index(self.rank), len(ranks), self._library, store, self._cuda)
        child.peer = child._owned_peer = owned
        if self.peer is not None:
            child._relay = finding.RelayChannel(self.peer, list(ranks))
        elif self._relay is not None:
            child._relay = finding.RelayChannel(self._relay.peer, [self._relay.ranks[rank] for rank in ranks])
        return child

    def shrink(self, excluded: Sequence[int], name: str, aborts: bool = False) -> Connections:
        """Make a communicator without some ranks by ncclCommShrink; only the others call.

        Args:
            excluded: the ranks to leave out; the others keep their order.
            name: the new group's name, the same on all of them.
            aborts: those ranks failed: end what is under way with them first (NCCL_SHRINK_ABORT).

        Raises:
            ValueError: this rank is to be left out.
            DistBackendError: NCCL is older than 2.27, or fails.
        """
        gone = set(excluded)
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
            if not aborts:
                self._cuda.synchronize(streams.device)
            with self._failing("shrink"):
                flag = flags.ABORT if aborts else flags.DEFAULT
                comm = self._link.comm.shrink(sorted(gone), flag=flag)
            child._link = child._linked(comm, streams.device)
            child._is_eager = True
        return child

    # -- the end ---------------------------------------------------------------------------------------

    def _links(self) -> list[Link]:
        """Return the communicators in an order that is the same on the two ranks of each: pairs by their ranks."""
        pairs = sorted(self._pairs, key=lambda peer: (min(peer, self.rank), max(peer, self.rank)))
        links = [self._pairs[peer] for peer in pairs]
        return [*links, self._link] if self._link is not None else links

    def check_async(self) -> DistBackendError | None:
        """Return the error that a call under way ran into on the device, once; the watchdog asks."""
        if self._ended is not None:
            return None
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

    def outstanding(self) -> Work | None:
        """Return the first call that the device is not through with."""
        links = self._links()
        if not links:
            return None
        with self._cuda.device(self.device), self._library.beside_captures():
            return next((work for link in links if (work := link.streams.oldest()) is not None), None)

    def pending(self) -> list[Work]:
        """Return the asynchronous calls that the device is not through with."""
        works = [work for link in self._links() for work in list(link.streams.under_way)]
        with self._library.beside_captures():
            return [*super().pending(), *(work for work in works if not work.is_completed())]

    def interrupt(self, reason: str) -> bool:
        """End the communicators and what is under way on them, without the other ranks; any thread may call.

        Later calls, and ``wait()`` of what was under way, raise DistBackendError.
        """
        if self._ended is not None:
            return True
        self._ended = DistBackendError(f"the NCCL communicator of rank {self.rank} of {self.size} is gone: {reason}")
        for link in self._links():
            link.comm.abort()
            link.streams.fail_all(self._ended)
        return True

    def close(self) -> None:
        """Free the communicators, once what was queued is through; every rank calls it.

        ncclCommDestroy waits for the other ranks of the node, so all ranks free theirs in one order: pairs by
        their ranks, then the group's. A communicator with an error is aborted, which waits for nobody.
        """
        super().close()
        failure = self.check_async()
        if failure is not None:
            self.interrupt(str(failure))
        if self._ended is None:
            for link in self._links():
                self._cuda.synchronize(link.streams.device)
                link.comm.finalize()
                link.comm.destroy()
            self._ended = DistBackendError("the NCCL communicator was freed: its group is destroyed")
        self._pairs, self._link = {}, None
        if self._owned_peer is not None:
            self._owned_peer.close()
            self._owned_peer = None


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
