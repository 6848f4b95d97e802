"""Mirror of our groups in the tables that ``torch.distributed`` keeps of its own, and the store that goes with them.

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
``_C._distributed_c10d.Store``                        the class of a store that C++ takes                 2.13.0, 2.15.0
``threading._DummyThread``                            a thread of C++'s that calls Python                 3.10, 3.13
====================================================  ==================================================  ==============
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as bindings
import torch.distributed as dist
from torch.distributed import default_pg_timeout
from torch.distributed import distributed_c10d as c10d

from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.world import WORLD
from hpcdist.torch_bridge.features import has

GroupName: Any = c10d.GroupName if has("`GroupName`") else str
NAME = "hpcdist"  # of the backend, as torch.distributed.init_process_group takes it


STOCK: dict[str, Callable[..., Any]] = {}  # torch's own functions, by the names of the places that hpcdist took


class LateStore(bindings.Store):
    """The world's store, opened when it is first used: few programs ask for one, and a server costs time.

    Under MPI the first use opens it for all ranks, so all of them have to come to it.
    """

    is_reserved = False  # for groups of ours only, since torch imported hpcdist and the program did not

    def opened(self) -> Any:
        if WORLD.store is None:
            from hpcdist.launch import rendezvous

            if WORLD.default is not None:
                return rendezvous.store_of(WORLD.default)
            if self.is_reserved:
                return next(STOCK["env"]("env://"))[0]  # its error says what is missing
            WORLD.store = next(iter(rendezvous.rendezvous("mpi://")))[0]
        return WORLD.store

    def check(self, keys: list[str]) -> bool:
        """Tell whether keys are there.

        c10d's own threads look for a signal now and then, each rank when it likes. They do not open the store, which
        takes all ranks: one that nobody has opened holds nothing.
        """
        if WORLD.store is None and isinstance(threading.current_thread(), threading._DummyThread):
            return False
        return bool(self.opened().check(keys))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long calls wait; a store that is not open yet takes the world's limit when it opens."""
        super().set_timeout(timeout)  # what C++ and ``timeout`` say
        if WORLD.store is not None:
            WORLD.store.set_timeout(timeout)


STORE_CALLS = (
    "set", "get", "add", "wait", "compare_set", "delete_key", "num_keys", "append", "multi_get",
    "multi_set", "has_extended_api", "queue_push", "queue_pop", "queue_len", "list_keys", "barrier", "clone",
)  # fmt: skip


# by which torch's C++ PrefixStore calls two of them; queues and list_keys it does not hand on to a store made in Python
CXX_NAMES = {"deleteKey": "delete_key", "getNumKeys": "num_keys"}


def forwarded(name: str) -> Callable[..., Any]:
    """Return a method that calls the opened store's method of the same name."""

    def call(self: LateStore, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.opened(), name)(*args, **kwargs)

    call.__name__ = name
    return call


for each in STORE_CALLS:
    setattr(LateStore, each, forwarded(each))
for theirs, ours in CXX_NAMES.items():
    setattr(LateStore, theirs, forwarded(ours))

LATE_STORE = LateStore()  # C++ keeps only its half of a store made in Python, so this one lives for ever


def fresh_store() -> LateStore:
    """Return the store for a world that is about to begin."""
    if WORLD.default is None:
        WORLD.store = None
        LATE_STORE.set_timeout(default_pg_timeout)  # a world's own, where a store by itself has 5 minutes
    return LATE_STORE


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
