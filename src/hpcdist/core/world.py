"""World: the groups of this process."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch.distributed
from torch.distributed.distributed_c10d import Store

from hpcdist.core import errors, hooks
from hpcdist.core.backend import Backend
from hpcdist.core.group import Group
from hpcdist.core.ranks import as_rank, format_ranks

NON_GROUP_MEMBER = torch.distributed.GroupMember.NON_GROUP_MEMBER


class World:
    """The default group, every other group, and the number of groups made so far."""

    def __init__(self) -> None:
        self.default: Group | None = None
        self.groups: dict[str, Group] = {}
        self._made = 0  # groups that all ranks made together
        self.store: Store | None = None
        self.mirror: Any = None  # is told of each group that comes and goes: ``torch_bridge.mirror.TorchWorld``
        self._left: list[Group] = []  # groups that have ended, although calls of other threads may still block on them

    def add(self, group: Group, is_shown: bool = True) -> None:
        """Register a group under its name, and show it to the mirror."""
        self._register(group)
        if is_shown and self.mirror is not None:
            self.mirror.add(group)

    def _register(self, group: Group) -> None:
        """Add a group to the table; if ``split_group`` gave its name to another one, that one keeps its entry."""
        key = group.group_name
        while key in self.groups and self.groups[key].backends:
            key += "'"
        self.groups[key] = group

    def has(self, group: Any) -> bool:
        return any(each is group for each in self.groups.values())

    def rename(self, group: Group, name: str) -> None:
        """Register a group under another name, if it is registered."""
        is_known = self._unregister(group)
        group._name = group.journal.group = name
        if is_known:
            self._register(group)

    def remove(self, group: Group) -> None:
        if self._unregister(group):
            self._leave(group)
        if self.mirror is not None:
            self.mirror.remove(group)

    def discard(self, group: Group) -> None:
        """Remove a group that its own ``shutdown`` ends, of which the mirror knows already."""
        if group is self.default:
            self._reset()
        elif self._unregister(group):
            self._leave(group)

    def _unregister(self, group: Group) -> bool:
        """Remove a group from the table; tell whether it was there."""
        before = len(self.groups)
        self.groups = {key: each for key, each in self.groups.items() if each is not group}
        return len(self.groups) < before

    @property
    def made(self) -> int:
        """The number of groups that all ranks have made together, including those of the mirror's owner."""
        return self._made if self.mirror is None else max(self._made, self.mirror.made)

    @made.setter
    def made(self, made: int) -> None:
        self._made = made
        if self.mirror is not None:
            self.mirror.made = made

    def next_name(self) -> str:
        """Return a name for the next group that all ranks make together; it is the same on all of them."""
        self.made += 1
        return str(self.made - 1)

    def clear(self) -> None:
        """Remove all groups, so that an init may follow; groups that are a world of their own stay while they live."""
        mirror = self.mirror
        self._reset()
        if mirror is not None:
            mirror.clear()

    def _reset(self) -> None:
        kept = {key: each for key, each in self.groups.items() if each.is_own_world and each.backends}
        for key, group in self.groups.items():
            if key not in kept:
                self._leave(group)
        left = self._left
        self.__init__()  # type: ignore[misc]
        self.groups, self._left = kept, left

    def _leave(self, group: Group) -> None:
        if group.journal.blocked():
            self._left.append(group)

    def backends(self) -> list[Backend]:
        """Return the backends of all groups, each once."""
        groups = list(self.groups.values())
        return list(dict.fromkeys(each for group in groups for each in list(group.backends.values())))

    def watched(self) -> list[Group]:
        """Return the groups, including ended ones on which a call of another thread still blocks."""
        for group in list(self._left):
            if not group.journal.blocked():
                self._left.remove(group)
        return list(self.groups.values()) + self._left

    def end(self) -> None:
        """Refuse all further calls of all threads: this process ends."""
        hooks.is_ending = True
        for group in self.groups.values():
            group.end()

    def end_threads(self) -> None:
        for group in self.groups.values():
            group.end_threads()

    def detach(self) -> None:
        """Refuse all calls on all groups, in a forked child; ranks, sizes and names stay known."""
        errors.end_all(group.detach for group in self.groups.values())


WORLD = World()
os.register_at_fork(after_in_child=lambda: WORLD.detach())


def default_group() -> Group:
    """Return the default group; ValueError before ``init_process_group``."""
    if WORLD.default is None:
        raise errors.not_initialized()
    return WORLD.default


def is_outside(group: Any) -> bool:
    """Tell whether a caller's group is the value for a group without this rank."""
    return type(group) is type(NON_GROUP_MEMBER) and bool(group == NON_GROUP_MEMBER)


def resolve(group: Any) -> Group:
    """Return the group that a caller means; None stands for the default group.

    Raises ValueError if it is not a live group of this process, or this rank is not in it.
    """
    if group is None:
        return default_group()
    if isinstance(group, Group) and group.backends:
        return group
    if is_outside(group):
        raise ValueError("Invalid process group specified: this rank is not in the group (NON_GROUP_MEMBER)")
    if WORLD.default is None:
        raise errors.not_initialized()
    raise errors.destroyed(group)


def member_group(group: Any, call: str) -> Group | None:
    """Return the group that a caller means; if this rank is not in it, warn as c10d does and return None."""
    pg = WORLD.default if group is None else group
    if isinstance(pg, Group) and pg.backends:
        return pg
    if not is_outside(group):
        return resolve(group)
    rank = -1 if WORLD.default is None else WORLD.default.rank()
    warnings.warn(f"Running {call} on global rank {rank} which does not belong to the given group.", stacklevel=3)
    return None


def route(group: Any, call: str, peer: int | None, group_peer: int | None) -> tuple[Group, int] | None:
    """Return the group and the peer's or root's rank in it; None if this rank is not in the group."""
    pg = WORLD.default if group is None else group
    if (
        peer.__class__ is int
        and group_peer is None
        and isinstance(pg, Group)
        and pg.backends
        and (rank := pg.group_ranks.get(peer)) is not None
    ):
        return pg, rank
    if (pg := member_group(group, call)) is None:
        return None
    return pg, group_rank(pg, peer, group_peer)


def origin(group: Any, call: str, src: int | None, group_src: int | None) -> tuple[Group, int | None] | None:
    """Return the group and a sender's rank in it, or None for anyone, where no sender is given; else as ``route``."""
    if src is not None or group_src is not None:
        return route(group, call, src, group_src)
    pg = member_group(group, call)
    return None if pg is None else (pg, None)


def group_rank(group: Group, global_rank: int | None, rank_in_group: int | None) -> int:
    """Return a rank of ``group``, given either as a global rank or as a rank of the group; raise if it has none."""
    if rank_in_group is None:
        if global_rank is None:
            raise ValueError("Must specify global_rank or group_rank")
        if (rank := group.group_ranks.get(as_rank(global_rank))) is None:
            raise errors.MismatchError(
                f"Global rank {global_rank} is not part of group {group} (it has global {format_ranks(group.ranks)})"
            )
        return rank
    if global_rank is not None:
        raise ValueError("Can't specify both group_rank and global_rank")
    rank_in_group = as_rank(rank_in_group)
    if not 0 <= rank_in_group < len(group.ranks):
        raise errors.MismatchError(
            f"Group rank {rank_in_group} is not part of group {group} (its ranks: 0 to {len(group.ranks) - 1})"
        )
    return rank_in_group
