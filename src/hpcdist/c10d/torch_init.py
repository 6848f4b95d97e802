"""Creator of groups for ``torch.distributed.init_process_group("hpcdist")``.

torch calls ``create`` once for the default group and, on its members, once for every group that ``new_group`` or
``DeviceMesh`` makes. The default group is the facade's too: both interfaces share one world.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from hpcdist.c10d import lifecycle
from hpcdist.c10d.names import Backend
from hpcdist.core import factory, registry
from hpcdist.core.group import Group
from hpcdist.core.work import check_timeout
from hpcdist.core.world import WORLD
from hpcdist.launch import decision
from hpcdist.torch_bridge import mirror, registration
from hpcdist_stores import PrefixStore

BESIDE: list[Any] = []  # our world for groups in a job whose default group is torch's own


def create(options: Any, pg_options: Any) -> Group:
    """Return the group for c10d's ``_DistributedBackendOptions``; torch enters it in its tables.

    An empty list of ranks is the default group. ValueError if torch's rank or size differs from that of MPI's world, or
    of hpcdist's existing one.
    """
    check_timeout(options.timeout)
    ranks = tuple(options.global_ranks_in_group)
    if ranks and WORLD.default is not None:
        registry.check_options(pg_options, [each.name for each in WORLD.default.backends.values()])
        for each in WORLD.default.backends.values():
            each.options = pg_options
        return create_subgroup(WORLD.default, ranks, options)
    lifecycle.forget_aborted()
    if (group := WORLD.default) is None:
        group = create_world(options, pg_options)
    if (group.rank(), group.size()) != (options.group_rank, options.group_size):
        raise ValueError(
            f"torch.distributed says rank {options.group_rank} of {options.group_size}, hpcdist's world is rank "
            f"{group.rank()} of {group.size()}: the launcher and the arguments of init_process_group disagree"
        )
    mirror.join()
    return group


def create_world(options: Any, pg_options: Any) -> Group:
    """Make the default group: over MPI if the launcher started it, else over torch's store."""
    lifecycle.prepare(getattr(options, "enable_reconfigure", False))  # an option since torch 2.14
    launch, timeout = decision.find_launch(), options.timeout
    rank, size, store = options.group_rank, options.group_size, options.store
    if mirror.is_late(store):
        store = None
    if lifecycle.is_mpi(launch):
        rank, size, store = -1, -1, None  # MPI's numbers, which may differ from torch's
    config = lifecycle.choose(launch, None, store if size > 1 else None, None, rank, size)
    if size == 1:
        config = Backend.LOOPBACK
    elif any(f":{Backend.TORCH}" in asked for asked in registration.ASKED):  # the library was named explicitly
        config = f"cpu:{config.partition(',')[0].removeprefix('cpu:')},{registration.DEVICES[-1]}:{Backend.TORCH}"
    carried = lifecycle.available_backends(config)
    registry.check_options(pg_options, carried.values())
    stock = getattr(options, "process_group", None)  # since torch 2.14: the group that ours replaces
    device = getattr(stock, "bound_device_id", None)
    bootstrap = lifecycle.find_peers(carried, launch, None, store, rank, size, None, timeout)
    backends = registry.connect_all(carried, bootstrap._replace(device_id=device, options=pg_options))
    return lifecycle.make_default_group(backends, config, options.group_id, timeout, device, bootstrap.store or store)


def create_subgroup(default: Group, ranks: tuple[int, ...], options: Any) -> Group:
    """Make a group of some ranks; only they call (MPI_Comm_create_group)."""
    members = [default.group_ranks[rank] for rank in ranks]
    name, limit = options.group_id, options.timeout
    by_device = default.create_backends(members, name, limit)
    WORLD.made = max(WORLD.made, int(name) + 1 if name.isdigit() else 0)
    device = default.bound_device_id  # torch enters the group in its tables itself
    return factory.make(ranks, by_device, default.config, name, "undefined", limit, device, is_shown=False)


def begin_beside(name: str, default: Any, store: Any, timeout: timedelta) -> None:
    """Make our world for groups in a job whose default group is torch's own; every rank calls this, member or not.

    It is over MPI, whose ranks must be numbered as torch's; for "hpcdist" without an MPI launcher it is gloo's, over
    torch's store.
    """
    if WORLD.default is not None:
        return
    launch, rank, size = decision.find_launch(), default.rank(), default.size()
    place: dict[str, Any] = {"timeout": timeout, "rank": rank, "world_size": size, "bridge": False}
    if name == Backend.MPI or (launch is not None and launch.starts_mpi):
        decision.check_mpi(launch, size)
        lifecycle.init_process_group(Backend.MPI, **place)
    else:
        lifecycle.init_process_group(Backend.GLOO, store=PrefixStore("hpcdist", store), **place)
    BESIDE[:] = [WORLD.default]


def end_beside() -> None:
    """End the world that ``begin_beside`` made, with torch's own default group; every rank calls this."""
    if BESIDE and WORLD.default is BESIDE.pop():
        lifecycle.destroy_process_group()


registration.register(create, begin_beside, end_beside)
