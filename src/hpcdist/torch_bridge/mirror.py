"""Mirror of our groups in the tables that ``torch.distributed`` keeps of its own.

====================================================  ==================================================  ==============
what                                                  why                                                 checked
====================================================  ==================================================  ==============
``distributed_c10d._world`` (pg_map, pg_names,        DDP, FSDP2, DTensor, DCP find ranks, names, the     2.13.0, 2.15.0
pg_group_ranks, pg_backend_config, tags_to_pg,        backend's name and the store of a group there
pg_to_tag, group_count, default_pg,
pg_coalesce_state)
``distributed_c10d._update_default_pg``               sets the default group and the rank that C++ logs   2.13.0, 2.15.0
``_C._distributed_c10d._register_process_group``,     functional collectives resolve a group by its name  2.13.0, 2.15.0
``._unregister_process_group``
====================================================  ==================================================  ==============
"""

from __future__ import annotations

from typing import Any

import torch._C._distributed_c10d as bindings
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.world import WORLD
from hpcdist.torch_bridge.features import has
from hpcdist.torch_bridge.late_store import LATE_STORE

GroupName: Any = c10d.GroupName if has("`GroupName`") else str
NAME = "hpcdist"  # of the backend, as torch.distributed.init_process_group takes it


class TorchWorld:
    """torch.distributed's tables of groups, as a mirror of ours (``World.mirror``)."""

    @property
    def made(self) -> int:
        """How many groups torch has counted: on every rank, also if this one is not a member."""
        return c10d._world.group_count

    @made.setter
    def made(self, made: int) -> None:
        c10d._world.group_count = made  # torch gives no group the number of one of ours

    def add(self, group: ProcessGroup) -> None:
        """Enter a group in the tables, as c10d enters one that ``new_group`` made."""
        world, name = c10d._world, group.group_name
        tag = f"ptd:{name}"
        world.pg_map[group] = (NAME, bindings.PrefixStore(f"{name}/", LATE_STORE))
        world.pg_names[group] = name  # type: ignore[assignment]
        world.pg_group_ranks[group] = dict(group.group_ranks)
        world.pg_backend_config[group] = ",".join(f"{device}:{NAME}" for device in group.backends)
        world.pg_to_tag[group] = tag
        for each in ("", tag):
            world.tags_to_pg.setdefault(each, []).append(group)
        bindings._register_process_group(GroupName(name), group)
        if group is WORLD.default:
            world.group_count = max(world.group_count, WORLD.made)
            c10d._update_default_pg(group)

    def remove(self, group: ProcessGroup) -> None:
        world = c10d._world
        if group not in world.pg_map:
            return
        for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
            table.pop(group, None)
        for tag in ("", world.pg_to_tag.pop(group, "")):
            members = world.tags_to_pg.get(tag, [])
            if group in members:
                members.remove(group)
            if not members:
                world.tags_to_pg.pop(tag, None)
        bindings._unregister_process_group(GroupName(group.group_name))

    def clear(self) -> None:
        """End torch's world, with the groups that it made itself."""
        if dist.is_initialized():
            dist.destroy_process_group()


def show(group: ProcessGroup) -> None:
    """Make our world torch's too, by its first group; a torch.distributed that is initialised is left as it is."""
    if not dist.is_initialized():
        mirror = TorchWorld()
        mirror.add(group)
        WORLD.mirror = mirror


def join() -> None:
    """Follow torch's world, which itself enters its default group in its tables."""
    WORLD.mirror = TorchWorld()


def forget_coalescing(group: Any) -> None:
    c10d._world.pg_coalesce_state.pop(group, None)


def is_shown(group: Any) -> bool:
    return group in c10d._world.pg_map
