"""Bootstrap of NCCL: a unique id, made on one rank, reaches all ranks of a group.

It goes over the group's MPI communicator if there is MPI, and over the store, one key, if there is none. NCCL's own
start-up is a star around the rank that made the id, so above 128 ranks several of them make one each
(``ncclCommInitRankScalable``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from hpcdist.backends.nccl.library import SCALABLE_SINCE, Library
from hpcdist.core.backend import Backend, Bootstrap
from hpcdist.core.errors import DistBackendError
from hpcdist.core.ranks import by_value
from hpcdist.launch import devices, environment

RANKS_PER_ROOT = 128
ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES
PAIR_TAG = 32742  # one of those that are refused to users (``core.point_to_point``)


# A channel tells the other ranks of a group a few bytes. ``share`` tells all ranks what each root made: every rank
# calls it, and a root gives its own. ``pair`` tells one rank what this one made, or returns what that one made if this
# one gives None.


class PeerChannel:
    """The group's CPU backend, such as MPI."""

    def __init__(self, peer: Backend) -> None:
        self.peer = peer

    def share(self, ids: dict[int, bytes], roots: Sequence[int]) -> list[bytes]:
        """Broadcast from the one root, or gather what several made."""
        peer = self.peer
        peer.settle()  # so that all ranks are at the same place of the communicator
        if len(roots) == 1:
            return [peer.objects.broadcast(ids.get(roots[0]), roots[0])]
        gathered = peer.objects.all_gather(ids.get(peer.rank))
        return [gathered[root] for root in roots]

    def pair(self, made: bytes | None, peer: int) -> bytes:
        """Send to or receive from the one peer."""
        if made is not None:
            self.peer.send(torch.frombuffer(bytearray(made), dtype=torch.uint8), peer, PAIR_TAG)
            return made
        heard = torch.empty(ID_BYTES, dtype=torch.uint8, device="cpu")
        self.peer.recv(heard, peer, PAIR_TAG)
        return heard.numpy().tobytes()


class RelayChannel:
    """The CPU backend of the parent, for a subgroup that has none of its own: only its members take part."""

    def __init__(self, peer: Backend, ranks: Sequence[int]) -> None:
        self.peer = peer
        self.ranks = ranks  # the members' ranks in the parent
        self.rank = ranks.index(peer.rank)

    def share(self, ids: dict[int, bytes], roots: Sequence[int]) -> list[bytes]:
        """Send from each root to every other member."""
        told = []
        for root in roots:
            if root == self.rank:
                for member in range(len(self.ranks)):
                    if member != root:
                        self.pair(ids[root], member)
                told.append(ids[root])
            else:
                told.append(self.pair(None, root))
        return told

    def pair(self, made: bytes | None, peer: int) -> bytes:
        """Send to or receive from the one peer."""
        return PeerChannel(self.peer).pair(made, self.ranks[peer])


class StoreChannel:
    """A key-value store, for launches without MPI; it must be this group's own part of it."""

    def __init__(self, store: Store, rank: int) -> None:
        self.store = store
        self.rank = rank

    def share(self, ids: dict[int, bytes], roots: Sequence[int]) -> list[bytes]:
        """Set one key a root, and read them all."""
        if self.rank in ids:
            self.store.set(f"id/{self.rank}", ids[self.rank].hex())
        return [bytes.fromhex(text(self.store.get(f"id/{root}"))) for root in roots]

    def pair(self, made: bytes | None, peer: int) -> bytes:
        """Set or read the pair's key."""
        low, high = sorted((self.rank, peer))
        key = f"pair/{low}-{high}"
        if made is not None:
            self.store.set(key, made.hex())
            return made
        return bytes.fromhex(text(self.store.get(key)))


Channel = PeerChannel | RelayChannel | StoreChannel


class Finder:
    """What a group's ranks find each other over: its own or the parent's CPU backend, or its part of a store."""

    def __init__(self, rank: int, store: Any = None, relay: RelayChannel | None = None) -> None:
        self._rank = rank
        self._store = store
        self._relay = relay

    def channel(self, peer: Backend | None) -> Channel:
        """Return the way to the other ranks; ``peer`` is the group's CPU backend. DistBackendError if there is none."""
        if self._store is not None:
            return StoreChannel(self._store, self._rank)
        if peer is not None:
            return PeerChannel(peer)
        if self._relay is not None:
            return self._relay
        raise DistBackendError(
            "backend 'nccl' has nothing to find the other ranks over: make the group with a CPU backend "
            "('cpu:mpi,cuda:nccl') or a store"
        )

    def child(self, peer: Backend | None, ranks: Sequence[int], name: str) -> Finder:
        """Return the same for a subgroup of some ranks, which has no CPU backend yet; ``peer`` is this group's."""
        store = None if self._store is None else PrefixStore(f"group-{name}", self._store)
        relay = None
        if peer is not None:
            relay = RelayChannel(peer, list(ranks))
        elif self._relay is not None:
            relay = RelayChannel(self._relay.peer, [self._relay.ranks[rank] for rank in ranks])
        return Finder(list(ranks).index(self._rank), store, relay)


def text(value: bytes | str) -> str:
    """Return a store's value as text."""
    return value if isinstance(value, str) else value.decode()


def roots_of(size: int, version: Sequence[int]) -> list[int]:
    """Return the ranks that make a unique id: the first of each part of at most 128 ranks.

    NCCL deals ranks to ids in parts that differ by one at most, the longer ones first.
    """
    count = -(-size // RANKS_PER_ROOT) if tuple(version) >= SCALABLE_SINCE else 1
    length, longer = divmod(size, count)
    return [part * length + min(part, longer) for part in range(count)]


def unique_ids(library: Library, channel: Channel, rank: int, size: int) -> list[Any]:
    """Return the group's unique ids, the same on all ranks; every rank calls it."""
    roots = roots_of(size, library.version)
    mine = {rank: bytes(library.core.get_unique_id())} if rank in roots else {}
    return [library.core.UniqueId.from_bytes(each) for each in channel.share(mine, roots)]


def pair_id(library: Library, channel: Channel, rank: int, peer: int) -> Any:
    """Return the unique id of two ranks; the lower one makes it, and both call."""
    made = bytes(library.core.get_unique_id()) if rank < peer else None
    return library.core.UniqueId.from_bytes(channel.pair(made, peer))


def check_devices(peer: Backend, device: torch.device, version: Sequence[int]) -> None:
    """Raise on every rank if two ranks of a group use one GPU and did not ask for it; every rank calls."""
    peer.settle()
    mine = (environment.node_key(), devices.identity(device), str(device))
    check_shared(peer.objects.all_gather(mine), version)


def check_shared(
    used: Sequence[tuple[str, str, str]], version: Sequence[int], given: Mapping[str, str] = os.environ
) -> None:
    """Raise if two ranks use one GPU: node, identity and name of each rank's."""
    if devices.may_share(given):
        return
    for (node, identity), ranks in by_value((node, identity) for node, identity, _ in used).items():
        if len(ranks) > 1:
            raise DistBackendError(
                f"ranks {ranks} of the group use one GPU: {used[ranks[0]][2]} ({identity}) on {node}. NCCL wants one "
                "GPU a rank: call torch.cuda.set_device(hpcdist.get_node_local_rank()) before CUDA tensors are made, "
                "pass device_id=, or let Slurm bind them (--gpus-per-task=1); to share GPUs on purpose "
                f"{devices.how_to_share(version)}"
            )


def channel_store(bootstrap: Bootstrap) -> Any:
    """Return a part of the store for NCCL only; None if there is MPI or no store."""
    over_mpi = bootstrap.comm is not None or getattr(bootstrap.peer, "comm", None) is not None
    if over_mpi or bootstrap.store is None:
        return None
    return PrefixStore("nccl", bootstrap.store)


def choose_device(comm: Any) -> None:
    """Make this rank's GPU the current one if there is a choice; all ranks of ``comm`` call.

    With one GPU in sight nothing is done, so that CUDA starts only when a tensor asks for it. If the caller has chosen
    already (CUDA is running), or if ranks outnumber GPUs, the current device stays; two ranks on one are found when
    they connect.
    """
    chosen = torch.cuda.is_initialized()
    try:
        device = devices.mine(comm)
    except DistBackendError:
        return
    if not chosen and torch.cuda.device_count() > 1:
        torch.cuda.set_device(device)
