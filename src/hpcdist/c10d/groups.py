"""Creation of groups: ``new_group``, ``new_subgroups`` and ``split_group``.

All groups of a call are made in one step, ``MPI_Comm_split`` under MPI. Unless stated otherwise every rank of the
default group calls, also those that will not be members.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch

from hpcdist.c10d.names import Backend, BackendConfig
from hpcdist.core import factory, registry, world
from hpcdist.core.agreement import check_subgroup
from hpcdist.core.backend import Backend as Communicator
from hpcdist.core.backend import Bootstrap
from hpcdist.core.errors import MismatchError
from hpcdist.core.factory import check_ranks
from hpcdist.core.group import Group
from hpcdist.core.printing import format_value
from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.ranks import as_int, ranks_by_value
from hpcdist.core.work import check_timeout
from hpcdist.core.world import NON_GROUP_MEMBER, WORLD
from hpcdist.launch import environment
from hpcdist.torch_bridge.features import has
from hpcdist.watch.logs import LOG
from hpcdist_stores import PrefixStore

BESIDE = "new_group with another backend"  # than its parent's, as the parent's ranks compare the call
IS_IN_ORDER = has("`split_group` in the order given")
# what other ranks get of ``split_group``, and with ``use_local_synchronization``
OUTSIDE = NON_GROUP_MEMBER if IS_IN_ORDER else None


def set_timeout(timeout: timedelta, group: ProcessGroup | None = None) -> None:
    """Set the limit of each later call on a group (c10d's since torch 2.14); every rank sets the same.

    Args:
        timeout: the limit.
        group: the group; None for the default one.

    Raises:
        TypeError: a timeout that is not a timedelta.
        ValueError: a negative one; a group that this rank is not in, or that is not live.
    """
    world.resolve(group).set_timeout(timeout)


def new_group(
    ranks: Any = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
) -> Any:
    """Make a group of some ranks of the default group.

    Args:
        ranks: global ranks; None for all.
        timeout: the limit of each call on the group, once it is made; None for the default group's.
        backend: a backend string; None for the default group's.
        pg_options: c10d's options of the backend, or options of a backend of ``Backend.register_backend``.
        use_local_synchronization: only the members call (``MPI_Comm_create_group``).
        group_desc: a description of the group.
        device_id: the device to which the group is bound.
        sort_ranks: number the group's ranks in ascending order of ``ranks``; if False in the order given.

    Returns:
        The ProcessGroup; on other ranks ``GroupMember.NON_GROUP_MEMBER``, or with ``use_local_synchronization`` None
        if this torch is older than 2.14.

    Raises:
        ValueError: before init, duplicate ranks, or ranks out of range.
        TypeError: a timeout that is not a timedelta, or options that are not c10d's.
    """
    default = world.default_group()
    check_timeout(timeout)
    chosen = list(range(default.size())) if ranks is None else check_ranks(ranks, sort_ranks, default.size())
    if not use_local_synchronization:
        made = make(default, [chosen], timeout, backend, pg_options, group_desc, device_id)
        return NON_GROUP_MEMBER if made is None else made
    default.any_backend()  # raises if the group has ended
    if default.rank() not in chosen:
        return OUTSIDE
    registry.check_options(pg_options, [each.name for each in default.backends.values()])
    if backend is not None and Backend(backend) != default.config:
        raise ValueError(
            f"new_group with use_local_synchronization takes the default group's backend {default.config!r}; "
            f"got {backend!r}"
        )
    name, limit = default.next_name(chosen), timeout or default.timeout
    for each in default.backends.values():
        each.options = pg_options
    backends = default.create_backends(chosen, name, limit)
    device, description = device_id or default.bound_device_id, group_desc or "undefined"
    return log_group(factory.make(chosen, backends, default.config, name, description, limit, device))


def new_subgroups(
    group_size: int | None = None,
    group: Group | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[Any, list[Any]]:
    """Divide a group into subgroups of equal size, all in one step.

    Args:
        group_size: the number of ranks of each; None for one subgroup for each node.
        group: the group to divide; None for the default one.
        timeout, backend, pg_options, group_desc: as for ``new_group``.

    Returns:
        This rank's subgroup, and a list with an entry for each subgroup: the one of this rank, and
        ``NON_GROUP_MEMBER`` for the others.

    Raises:
        ValueError: a size that is not positive, or does not divide the group's.
    """
    parent = world.resolve(group)
    if group_size is None:
        return new_subgroups_by_enumeration(ranks_by_node(parent), timeout, backend, pg_options, group_desc)
    size, group_size = parent.size(), as_int(group_size, "group_size")
    if group_size <= 0:
        raise ValueError(f"The arg 'group_size' ({group_size}) must be positive")
    if size < group_size:
        raise ValueError(f"The arg 'group_size' ({group_size}) must not exceed the world size ({size})")
    if size % group_size:
        raise ValueError(f"The world size ({size}) must be divisible by '{group_size=}'")
    divided = [list(parent.ranks[start : start + group_size]) for start in range(0, size, group_size)]
    return new_subgroups_by_enumeration(divided, timeout, backend, pg_options, group_desc)


def ranks_by_node(parent: Group) -> list[list[int]]:
    """Return the global ranks on each node of a group; every rank of it calls."""
    with parent.during("new_subgroups"):
        keys = parent.any_backend().objects.all_gather(environment.node_key(), call="new_subgroups")
    return [[parent.ranks[rank] for rank in those] for those in ranks_by_value(keys).values()]


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: list[list[int]],
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[Any, list[Any]]:
    """Make disjoint subgroups, all in one step.

    Args:
        ranks_per_subgroup_list: the global ranks of each; a rank is in one or in none.
        timeout, backend, pg_options, group_desc: as for ``new_group``.

    Returns:
        This rank's subgroup or None, and a list with an entry for each subgroup: the one of this rank, and
        ``NON_GROUP_MEMBER`` for the others.

    Raises:
        ValueError: an empty list, a rank in two subgroups, or ranks out of range.
    """
    if not ranks_per_subgroup_list:
        raise ValueError("The arg 'ranks_per_subgroup_list' cannot be empty")
    default = world.default_group()
    check_timeout(timeout)
    subgroups = check_subgroups(ranks_per_subgroup_list, default.size())
    mine = make(default, subgroups, timeout, backend, pg_options, group_desc, None)
    listed = [mine if mine is not None and default.rank() in ranks else NON_GROUP_MEMBER for ranks in subgroups]
    return mine, listed


def split_group(
    parent_pg: Group | None = None,
    split_ranks: list[list[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> Any:
    """Split a group into disjoint subgroups in one step; every rank of the parent calls, and no other.

    Args:
        parent_pg: the group to split; None for the default one.
        split_ranks: for each subgroup, ranks of the parent. A subgroup numbers them in the order given, as torch does
            since 2.14; in ascending order if this torch is older.
        timeout: the limit of each call on the subgroup; None for the parent's.
        pg_options: c10d's options of the backend, or options of a backend of ``Backend.register_backend``.
        group_desc: a description of the groups; by default the parent's description and ``:split:``.
        backend: a part of the parent's backend string, to keep only these backends.

    Returns:
        This rank's subgroup; on other ranks ``GroupMember.NON_GROUP_MEMBER``, or None if this torch is older than 2.14.

    Raises:
        ValueError: empty or overlapping subgroups, duplicate or unknown ranks, or another backend.
    """
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    check_timeout(timeout)
    parent = world.resolve(parent_pg)
    subgroups = check_subgroups(split_ranks, parent.size(), is_sorted=not IS_IN_ORDER)
    if not all(subgroups):
        raise ValueError("the split group cannot be empty")
    if backend is not None:
        check_kept(parent, backend)
    description = group_desc if group_desc is not None else f"{parent.group_desc}:split"
    made = make(parent, subgroups, timeout, backend, pg_options, description, parent.bound_device_id, is_local=True)
    return OUTSIDE if made is None else made


def check_kept(parent: Group, backend: str) -> None:
    """Raise if a backend string names a device type or backend that the parent does not have."""
    carried = {device: each.name for device, each in parent.backends.items()}
    for device, name in BackendConfig(backend).get_device_backend_map().items():
        if ":" not in backend and device not in carried:
            continue
        if carried.get(device) != name:
            raise ValueError(
                f"Backend mismatch for device '{device}': the parent has {carried.get(device)!r}, requested {name!r} "
                f"(the parent's backends: {carried})"
            )


def check_subgroups(lists: Iterable[Any], size: int, is_sorted: bool = True) -> list[list[int]]:
    """Return the ranks of each subgroup, checked and disjoint."""
    if not isinstance(lists, Iterable):
        raise TypeError(
            f"subgroups are {format_value(lists)} of type {type(lists).__name__}; expected a list of lists of ints"
        )
    subgroups, seen = [check_ranks(ranks, is_sorted, size) for ranks in lists], dict[int, list[int]]()
    for ranks in subgroups:
        for rank in ranks:
            if rank in seen:
                raise ValueError(f"Rank {rank} has appeared in both subgroup {seen[rank]} and {ranks}")
            seen[rank] = ranks
    return subgroups


def make(
    parent: Group,
    subgroups: Sequence[list[int]],
    timeout: timedelta | None,
    backend: str | None,
    options: Any,
    description: str | None,
    device_id: torch.device | None,
    is_local: bool = False,
) -> ProcessGroup | None:
    """Make disjoint subgroups of a group in one step; every rank of the parent calls.

    With ``is_local`` only the parent's ranks call, so that names are made from the ranks, not from the count of groups
    that all processes share.
    """
    parent.any_backend()  # raises if the parent has ended
    limit, before, before_locally = timeout or parent.timeout, WORLD.made, parent.named.copy()
    names = [
        parent.next_name([parent.ranks[r] for r in ranks]) if is_local else WORLD.next_name() for ranks in subgroups
    ]
    index = next((i for i, ranks in enumerate(subgroups) if parent.rank() in ranks), None)
    config = Backend(backend) if backend else parent.config
    wanted = {device: each.name for device, each in parent.backends.items()}
    if backend is not None:
        named = BackendConfig(backend).get_device_backend_map()
        wanted = named if ":" in backend else {d: n for d, n in named.items() if d in wanted} or named
    by_name = {each.name: each for each in parent.backends.values()}
    registry.check_options(options, wanted.values())
    for each in by_name.values():
        each.options = options
    made: dict[str, Communicator | None] = {}

    def connect_over_store(name: str) -> Communicator | None:
        """Make this rank's subgroup on a backend that the parent does not have."""
        from hpcdist.launch import rendezvous

        # every rank of the parent takes part
        carrier = parent.any_backend()
        carrier.settle()
        check_subgroup(carrier, None if index is None else subgroups[index], BESIDE)
        store = rendezvous.store_of(parent)
        if index is None:
            return None
        ranks = subgroups[index]
        # ranks may give only their own subgroups, so that two may have one name
        store = PrefixStore(f"group-{names[index]}-{min(ranks)}-{name}", store)
        bootstrap = Bootstrap(ranks.index(parent.rank()), len(ranks), limit, store=store, options=options)
        peer = next((each for each in made.values() if each is not None), None)
        return registry.connect(name, bootstrap._replace(device_id=parent.bound_device_id, peer=peer))

    try:
        with parent.journal.during("new_group"):
            for name in dict.fromkeys(wanted.values()):
                parents = by_name.get(name)
                made[name] = connect_over_store(name) if parents is None else parents.split(subgroups, names, limit)
    except MismatchError:
        parent.named = before_locally  # ranks that gave other lists, or made another call, have another count
        WORLD.made = before
        raise
    if index is None:
        return None
    backends: dict[str, Any] = {device: made[name] for device, name in wanted.items()}
    ranks = [parent.ranks[rank] for rank in subgroups[index]]
    device = device_id or parent.bound_device_id
    return log_group(factory.make(ranks, backends, config, names[index], description or "undefined", limit, device))


def log_group(group: ProcessGroup) -> ProcessGroup:
    """Log a new group, and return it."""
    LOG.debug("made of ranks %s, timeout %s", [*group.ranks], group.timeout, extra={"group": group.group_name})
    return group
