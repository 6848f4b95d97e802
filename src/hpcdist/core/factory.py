"""Factory of groups: makes each one and registers it in the world, whose groups the watchdog looks at.

It is the only caller of the constructor. All groups (of init, new_group, a split, torch's registries, dist2, a shrink,
an elastic job) have a timeout and a report, belong to the parent after a fork, and the end of the process waits for
their calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch

from hpcdist.core import registry
from hpcdist.core.backend import Backend
from hpcdist.core.errors import MismatchError
from hpcdist.core.printing import format_value
from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.ranks import as_rank
from hpcdist.core.work import check_timeout
from hpcdist.core.world import WORLD


def make(
    ranks: Sequence[int],
    backends: dict[str, Backend],
    config: str,
    name: str,
    description: str,
    timeout: timedelta,
    device: torch.device | None = None,
    *,
    is_default: bool = False,
    is_shown: bool = True,
    is_own_world: bool = False,
) -> ProcessGroup:
    """Make a group of this rank's communicators, which know this process's rank, and register it under its name.

    The ranks are global ones, in the group's order; ``config`` is the backend string. With ``is_default`` it becomes
    the default group; with ``is_shown`` it is entered in torch's tables too, if our world is torch's; if it
    ``is_own_world``, the end of the default group does not end it.
    """
    rank = next(iter(backends.values())).rank
    group = ProcessGroup(tuple(ranks), rank, backends, config, name, description, timeout)
    group.bound_device_id = device
    group.is_own_world = is_own_world
    if is_default:
        WORLD.default = group
    elif not is_own_world and (default := WORLD.default) is not None and default.config == config:
        group.asked_name = default.asked_name
    WORLD.add(group, is_shown)
    return group


def split_group(
    self: ProcessGroup,
    ranks: list[int],
    timeout: timedelta | None = None,
    opts: Any = None,
    group_name: str | None = None,
    group_desc: str | None = None,
    device_types: list[torch.device] | None = None,
) -> ProcessGroup | None:
    """Make a group of some ranks of this one, without an entry in torch's tables; the members call.

    Args:
        self: this group.
        ranks: ranks of this group, in the order of their ranks in the new one.
        timeout: the limit of each call, this one included; None for this group's.
        opts: c10d's options of the backend; a communicator is made like this group's.
        group_name: a name for the members; None makes one of this group's, the ranks and a number.
        group_desc: what the group is for.
        device_types: keep only the backends of these.

    Returns:
        The group; None on a rank that is not in it.

    Raises:
        TypeError: other options, or ranks that are no integers.
        ValueError, RuntimeError: no ranks, or some that the group does not have, or twice.
    """
    self.any_backend()  # raises if the group has ended
    registry.check_options(opts, [each.name for each in self.backends.values()])
    check_timeout(timeout)
    if not (ranks := check_ranks(ranks, False, self.size())):
        raise MismatchError("the split group cannot be empty")
    kinds = [torch.device(each).type for each in device_types] if device_types else None
    if kinds and not self.carriers.keys() & kinds:
        self.backend(kinds[0])  # raises
    if self.rank() not in ranks:
        return None
    members, limit = [self.ranks[rank] for rank in ranks], timeout or self.timeout
    own_name = self.next_name(members)  # so that no two groups meet under one name, although the caller gave the same
    return make(
        members,
        self.create_backends(ranks, own_name, limit, kinds),
        self.config,
        group_name or own_name,
        group_desc or f"{self.group_desc}:split",
        limit,
        is_shown=False,
    )


ProcessGroup.split_group = split_group


def check_ranks(ranks: Any, is_sorted: bool, size: int) -> list[int]:
    """Return the ranks of a new group of a parent's, of so many ranks, checked."""
    if not isinstance(ranks, Iterable):
        raise TypeError(f"ranks is {format_value(ranks)} of type {type(ranks).__name__}; expected a list of ints")
    chosen = [as_rank(rank) for rank in ranks]
    if is_sorted:
        chosen.sort()
    if len(set(chosen)) != len(chosen):
        raise MismatchError(f"ranks list must not contain duplicate entries, got {chosen}")
    for rank in chosen:
        if rank < 0 or rank >= size:
            raise MismatchError(f"Rank {rank} is out of range. Valid ranks are 0 to {size - 1} (world_size={size})")
    return chosen
