"""Queries about groups: ranks, sizes, backends, names."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed import ReduceOp

from hpcdist.c10d.names import Backend
from hpcdist.core import errors, world
from hpcdist.core.device_backend import DeviceBackend
from hpcdist.core.group import Group
from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.world import NON_GROUP_MEMBER, WORLD
from hpcdist.launch import environment


class WorldMeta(type):
    """Metaclass with a property: ``WORLD`` of ``group`` and ``GroupMember`` is the current default group."""

    @property
    def WORLD(cls) -> Group | None:
        """The default group, or None before ``init_process_group``."""
        return WORLD.default

    @WORLD.setter
    def WORLD(cls, group: ProcessGroup | None) -> None:
        WORLD.default = group


class group(metaclass=WorldMeta):
    """``group.WORLD`` is the default group."""


class GroupMember(metaclass=WorldMeta):
    """``GroupMember.WORLD`` is the default group; ``NON_GROUP_MEMBER`` is the value for a group without this rank."""

    NON_GROUP_MEMBER = NON_GROUP_MEMBER


class ReduceOpNames:
    """The op names of PyTorch before 1.0, as attributes of ``reduce_op``; use ``ReduceOp``."""

    SUM = ReduceOp.SUM
    PRODUCT = ReduceOp.PRODUCT
    MIN = ReduceOp.MIN
    MAX = ReduceOp.MAX

    def __getattribute__(self, name: str) -> Any:
        """Warn of the deprecation, then look the name up."""
        if not name.startswith("__"):
            warnings.warn("`reduce_op` is deprecated, please use `ReduceOp` instead", FutureWarning, stacklevel=2)
        return object.__getattribute__(self, name)


reduce_op = ReduceOpNames()


def is_initialized() -> bool:
    """Tell whether there is a default group."""
    return WORLD.default is not None


def get_rank(group: ProcessGroup | None = None) -> int:
    """Return this process's rank in a group; -1 if it is not a member.

    Raises:
        ValueError: before ``init_process_group``, or a destroyed group.
    """
    return -1 if world.is_outside(group) else world.resolve(group).rank()


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks of a group; -1 if this process is not a member. Raises as ``get_rank``."""
    return -1 if world.is_outside(group) else world.resolve(group).size()


_rank_not_in_group = world.is_outside


def _get_process_group_name(pg: ProcessGroup) -> str:
    """Return a group's name (c10d's private name); ValueError if it is not live."""
    return world.resolve(pg).group_name


def get_backend(group: ProcessGroup | None = None) -> str:
    """Return the backend string that a group was made with, such as ``"mpi"``.

    Raises:
        ValueError: before init, a destroyed group, or one that this rank is not in.
    """
    return Backend(world.resolve(group).config)


def get_backend_config(group: ProcessGroup | None = None) -> str:
    """Return the pairs of device type and backend of a group, such as ``"cpu:mpi,cuda:nccl"``.

    Raises as ``get_backend``.
    """
    return ",".join(f"{device}:{backend.name}" for device, backend in world.resolve(group).backends.items())


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Return a global rank's rank in a group.

    Raises:
        ValueError: the rank is not in the group, or the group is not live.
    """
    return world.group_rank(world.resolve(group), global_rank, None)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Return the global rank of a rank of a group.

    Raises:
        ValueError: the group has no such rank, or is not live.
    """
    pg = world.resolve(group)
    return pg.ranks[world.group_rank(pg, None, group_rank)]


def get_process_group_ranks(group: ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group, in the order of their ranks in it. Raises as ``get_backend``."""
    return list(world.resolve(group).ranks)


def get_backend_impl(group: str | ProcessGroup | None = None, device: torch.device | None = None) -> DeviceBackend:
    """Return the backend of a group for a device's tensors (c10d's since torch 2.14).

    Args:
        group: the group or its name; None for the default one.
        device: the device; None if the group has one backend for all of its devices.

    Raises:
        ValueError: a group that this rank is not in, or ``device`` is None and the group has several backends.
    """
    meant: Any = WORLD.groups.get(group, group) if isinstance(group, str) else group
    pg = world.resolve(meant)
    if device is not None:
        return DeviceBackend(pg, pg.backend(torch.device(device)))
    if len({id(backend) for backend in pg.backends.values()}) > 1:
        raise ValueError(
            f"group {pg.group_name!r} has several backends ({get_backend_config(meant)}); name one by device="
        )
    return DeviceBackend(pg, pg.any_backend())


def get_pg_count() -> int:
    """Return the number of groups that all ranks have made together since ``init_process_group``."""
    return WORLD.made


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process's rank on its node, as the launcher gives it.

    Args:
        fallback_rank: the result if there is no launcher.

    Raises:
        RuntimeError: there is neither.
    """
    if (local_rank := environment.node_local_rank()) is not None:
        return local_rank
    if fallback_rank is not None:
        return int(fallback_rank)
    raise RuntimeError(
        f"No launcher gave this process a node-local rank (looked at {', '.join(environment.LOCAL_RANKS)}). "
        "Consider passing fallback_rank to allow `get_node_local_rank` to work."
    )


def get_mpi_comm(group: ProcessGroup | None = None) -> Any:
    """Return a group's MPI communicator, for calls of your own.

    It is the one that hpcdist uses: your messages on it can match the group's, and it is freed with the group;
    ``Dup()`` it to avoid both.

    Raises:
        ValueError: before init, a destroyed group, or one that this rank is not in.
        DistBackendError: the group is not carried by MPI.
    """
    pg = world.resolve(group)
    for backend in pg.backends.values():
        comm = getattr(backend, "comm", None)
        if comm is not None and backend.name == Backend.MPI:
            return comm
    raise errors.DistBackendError(f"group {pg.group_name!r} has no MPI communicator: it is carried by {pg.config}")
