"""Mirror of our groups in the private tables of ``torch.distributed``, and the world's store.

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
NAME = "hpcdist"  # the backend's name in torch.distributed.init_process_group


STOCK: dict[str, Callable[..., Any]] = {}  # torch's own functions that hpcdist has replaced, by their names


class LateStore(bindings.Store):
    """The world's store, opened at its first use: few programs need one, and a server costs time.

    Under MPI the first use opens it on all ranks, so all of them must make a call on it. Its limit is the world's until
    the program sets another, which C++ may do without a call of Python, as torch's PrefixStore does.
    """

    timeout: timedelta  # torch's property, which reads the C++ half; torch's stubs do not have it
    is_reserved = False  # for our groups only, since torch imported hpcdist and the program did not

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Forget the limit that a program has set."""
        self.limit = default_pg_timeout  # the last that the opened store was given
        self.set_timeout(self.limit)  # the world's; a store's own would be 5 minutes

    def opened(self) -> Any:
        """Return the world's store, with this one's limit if that was set."""
        store = self._opened()
        if self.limit != (limit := self.timeout):
            store.set_timeout(limit)
            self.limit = limit
        return store

    def _opened(self) -> Any:
        if WORLD.store is None:
            from hpcdist.launch import rendezvous

            if WORLD.default is not None:
                return rendezvous.store_of(WORLD.default)
            if self.is_reserved:
                return next(STOCK["env"]("env://"))[0]  # its error names what is missing
            WORLD.store = next(iter(rendezvous.rendezvous("mpi://")))[0]
        return WORLD.store

    def check(self, keys: list[str]) -> bool:
        """Tell whether keys are there.

        c10d's own threads poll for a key now and then, each rank by itself. They do not open the store, which needs all
        ranks: a store that is not open has no keys.
        """
        if WORLD.store is None and isinstance(threading.current_thread(), threading._DummyThread):
            return False
        return bool(self.opened().check(keys))


STORE_CALLS = (
    "set", "get", "add", "wait", "compare_set", "delete_key", "num_keys", "append", "multi_get",
    "multi_set", "has_extended_api", "queue_push", "queue_pop", "queue_len", "list_keys", "barrier", "clone",
)  # fmt: skip


# names of two of them in torch's C++ PrefixStore, which does not forward queues and list_keys to a store in Python
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

LATE_STORE = LateStore()  # C++ keeps only its half of a store made in Python, so this one lives forever


def fresh_store() -> LateStore:
    """Return the store for a new world."""
    if WORLD.default is None:
        WORLD.store = None
        LATE_STORE.reset()
    return LATE_STORE


def is_late(store: Any) -> bool:
    """Tell whether a store is the world's own, which it would open by itself, or a part of it."""
    while isinstance(store, bindings.PrefixStore):
        store = store.underlying_store
    return store is LATE_STORE


class TorchWorld:
    """torch.distributed's tables of groups, which mirror ours (``World.mirror``)."""

    @property
    def made(self) -> int:
        """The number of groups that torch has counted, also those without this rank."""
        return c10d._world.group_count

    @made.setter
    def made(self, made: int) -> None:
        c10d._world.group_count = made  # torch gives no group the number of one of ours

    def add(self, group: ProcessGroup) -> None:
        """Enter a group in the tables, as c10d's ``new_group`` does, named as the default one if of its kind."""
        world, name = c10d._world, group.group_name
        default: Any = WORLD.default
        tag = f"ptd:{name}"
        shown, config = NAME, ",".join(f"{device}:{NAME}" for device in group.backends)
        if default in world.pg_map and default.config == group.config:
            shown, config = world.pg_map[default][0], world.pg_backend_config[default]
        world.pg_map[group] = (shown, bindings.PrefixStore(f"{name}/", LATE_STORE))
        world.pg_names[group] = name  # type: ignore[assignment]
        world.pg_group_ranks[group] = dict(group.group_ranks)
        world.pg_backend_config[group] = config
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
        """End torch's world, including groups that it made itself."""
        if dist.is_initialized():
            dist.destroy_process_group()


def show(group: ProcessGroup) -> None:
    """Make our world torch's too, by its first group, unless torch.distributed is initialized."""
    if not dist.is_initialized():
        mirror = TorchWorld()
        mirror.add(group)
        WORLD.mirror = mirror


def join() -> None:
    """Follow torch's world, which enters its default group in the tables itself."""
    WORLD.mirror = TorchWorld()


def forget_coalescing(group: Any) -> None:
    c10d._world.pg_coalesce_state.pop(group, None)


def is_shown(group: Any) -> bool:
    return group in c10d._world.pg_map


def get_group_store(group: Any) -> Any:
    """Return a group's part of the world's store, or None if torch does not know the group."""
    return c10d._world.pg_map.get(group, (None, None))[1]


ProcessGroup.get_group_store = get_group_store  # type: ignore[assignment]  # torch's own reads C++, which has no store
