"""Bootstrap of NCCL: sends a unique id, made on one rank, to all ranks of a group.

It uses the group's MPI communicator, or one key of a store without MPI. NCCL's own start-up is a star around the rank
that made the id, so above 128 ranks several of them make one each (``ncclCommInitRankScalable``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from hpcdist.backends.nccl.library import Library
from hpcdist.core.backend import Backend, Bootstrap
from hpcdist.core.errors import DistBackendError
from hpcdist.core.ranks import ranks_by_value
from hpcdist.launch import devices, environment

RANKS_PER_ROOT = 128
ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES
PAIR_TAG = 32742  # a tag that users cannot give (``core.point_to_point``)


# A channel sends a few bytes to other ranks of a group. ``share`` sends each root's bytes to all ranks: every rank
# calls it, and a root gives its own. ``pair`` sends bytes to one rank, or receives that rank's if it gets None.
# ``child`` returns the channel of a subgroup that contains this rank.


class PeerChannel:
    """A CPU backend, such as MPI: the group's own, or the parent's for a subgroup without one; the members call."""

    def __init__(self, peer: Backend, members: Sequence[int] | None = None) -> None:
        self.peer = peer
        self.members = members  # a subgroup's ranks in the parent

    def share(self, ids: dict[int, bytes], roots: Sequence[int]) -> list[bytes]:
        """Broadcast from a single root, or gather the bytes of several; in a subgroup send from each to all others."""
        peer, members = self.peer, self.members
        if members is not None:
            told = []
            for root in roots:  # one after another: a send may wait for its receive
                for member in range(len(members)) if root in ids else ():
                    if member != root:
                        self.pair(ids[root], member)
                told.append(ids[root] if root in ids else self.pair(None, root))
            return told
        peer.settle()  # so that all ranks make the same calls on the communicator
        if len(roots) == 1:
            return [peer.objects.broadcast(ids.get(roots[0]), roots[0])]
        gathered = peer.objects.all_gather(ids.get(peer.rank))
        return [gathered[root] for root in roots]

    def pair(self, made: bytes | None, peer: int) -> bytes:
        """Send to or receive from the one peer."""
        rank = peer if self.members is None else self.members[peer]
        if made is not None:
            self.peer.send(torch.frombuffer(bytearray(made), dtype=torch.uint8), rank, PAIR_TAG)
            return made
        heard = torch.empty(ID_BYTES, dtype=torch.uint8, device="cpu")
        self.peer.recv(heard, rank, PAIR_TAG)
        return heard.numpy().tobytes()

    def child(self, ranks: Sequence[int], name: str) -> PeerChannel:
        """Return the same backend for some ranks."""
        return PeerChannel(self.peer, [rank if self.members is None else self.members[rank] for rank in ranks])


class StoreChannel:
    """A key-value store, for launches without MPI; its prefix must be this group's own."""

    def __init__(self, store: Store, rank: int) -> None:
        self.store = store
        self.rank = rank

    def share(self, ids: dict[int, bytes], roots: Sequence[int]) -> list[bytes]:
        """Set one key for each root, and read them all."""
        if self.rank in ids:
            self.store.set(f"id/{self.rank}", ids[self.rank].hex())
        return [bytes.fromhex(self.store.get(f"id/{root}").decode()) for root in roots]

    def pair(self, made: bytes | None, peer: int) -> bytes:
        """Set or read the pair's key."""
        low, high = sorted((self.rank, peer))
        key = f"pair/{low}-{high}"
        if made is not None:
            self.store.set(key, made.hex())
            return made
        return bytes.fromhex(self.store.get(key).decode())

    def child(self, ranks: Sequence[int], name: str) -> StoreChannel:
        """Return a part of the store for some ranks."""
        return StoreChannel(PrefixStore(f"group-{name}", self.store), list(ranks).index(self.rank))


Channel = PeerChannel | StoreChannel


def known(channel: Channel | None) -> Channel:
    """Return a channel; DistBackendError if there is none."""
    if channel is None:
        raise DistBackendError(
            "backend 'nccl' has nothing to find the other ranks over: make the group with a CPU backend "
            "('cpu:mpi,cuda:nccl') or a store"
        )
    return channel


def roots_of(size: int) -> list[int]:
    """Return the ranks that make a unique id: the first of each part of at most 128 ranks.

    NCCL divides the ranks among the ids into parts that differ by one at most, the longer ones first.
    """
    count = -(-size // RANKS_PER_ROOT)
    length, longer = divmod(size, count)
    return [part * length + min(part, longer) for part in range(count)]


def unique_ids(library: Library, channel: Channel, rank: int, size: int) -> list[Any]:
    """Return the group's unique ids, the same on all ranks; every rank calls it."""
    roots = roots_of(size)
    mine = {rank: bytes(library.core.get_unique_id())} if rank in roots else {}
    return [library.core.UniqueId.from_bytes(each) for each in channel.share(mine, roots)]


def pair_id(library: Library, channel: Channel, rank: int, peer: int) -> Any:
    """Return the unique id of two ranks; the lower one makes it, and both call."""
    made = bytes(library.core.get_unique_id()) if rank < peer else None
    return library.core.UniqueId.from_bytes(channel.pair(made, peer))


def check_devices(peer: Backend, device: torch.device, version: Sequence[int]) -> None:
    """Raise on every rank if two ranks of a group use one GPU without the user's setting; every rank calls."""
    peer.settle()
    mine = (environment.node_key(), devices.identity(device), str(device))
    check_shared(peer.objects.all_gather(mine), version)


def check_shared(
    used: Sequence[tuple[str, str, str]], version: Sequence[int], given: Mapping[str, str] = os.environ
) -> None:
    """Raise if two ranks use one GPU, given node, identity and name of each rank's."""
    if devices.may_share(given):
        return
    for (node, identity), ranks in ranks_by_value((node, identity) for node, identity, _ in used).items():
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

    With only one visible GPU nothing is done, so that CUDA starts only with the first tensor. If the caller has chosen
    already (CUDA is running), or if there are more ranks than GPUs, the current device stays; two ranks on one GPU are
    found when they connect.
    """
    chosen = torch.cuda.is_initialized()
    try:
        device = devices.choose_gpu(comm)
    except DistBackendError:
        return
    if not chosen and torch.cuda.device_count() > 1:
        torch.cuda.set_device(device)
