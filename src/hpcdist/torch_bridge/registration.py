"""Registration of the backend "hpcdist" with ``torch.distributed``, and what of torch's must know its groups for that.

====================================================  ==================================================  ==============
what                                                  why                                                 checked
====================================================  ==================================================  ==============
``rendezvous._rendezvous_handlers["env"]``            ``init_process_group("hpcdist")`` without           2.13.0, 2.15.0
                                                      MASTER_ADDR, where the launcher starts MPI
``distributed_c10d._new_process_group_helper``,       ``python -m hpcdist run``: "mpi" and "gloo" become  2.13.0, 2.15.0
``.rendezvous``, ``.is_mpi_available``                "hpcdist" in an unmodified script
``distributed_c10d._world`` (default_pg, pg_map)      the group that is meant; the name that was asked    2.13.0, 2.15.0
``distributed_c10d.monitored_barrier``                refuses, on 2.13, what is not named "gloo"          2.13.0
``distributed_c10d._process_group_name``              the name of a group that only its members make     2.13.0, 2.14.1
``distributed_c10d._get_split_source``                hands C++ a backend made in Python                  2.13.0, 2.14.1
``distributed_c10d._maybe_attach_flight_recorder``    raises for a group made in Python                  2.15.0
``distributed_c10d._update_default_pg``               tells that torch has forgotten an aborted world     2.13.0, 2.14.1
====================================================  ==================================================  ==============
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.world import WORLD
from hpcdist.launch import environment
from hpcdist.torch_bridge.late_store import fresh_store
from hpcdist.torch_bridge.mirror import NAME
from hpcdist.torch_bridge.stock import STOCK

DEVICES = ["cpu", "cuda"]
DIVERTED = frozenset({"mpi", "gloo", "undefined", NAME})  # what `hpcdist run` carries itself
LAUNCH: list[environment.Launch | None] = []  # how this process was started, as ``divert`` was told

rendezvous_module: Any = __import__("torch.distributed.rendezvous", fromlist=["rendezvous"])


def register(creator: Callable[[Any, Any], Any]) -> None:
    """Make the backend "hpcdist" known to torch.distributed, and "env://" content without MASTER_ADDR under MPI.

    Args:
        creator: makes a ProcessGroup of c10d's backend options and the caller's ``pg_options``.
    """
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, creator, extended_api=True, devices=DEVICES)
    handlers = rendezvous_module._rendezvous_handlers
    if handlers["env"] is not by_launcher:
        STOCK["env"] = handlers["env"]
        handlers["env"] = by_launcher
    open_monitored_barrier()
    keep_recorder_away()
    name_local_groups()
    split_from_none()
    follow_aborts()


def name_local_groups() -> None:
    """Let torch name a group that only its members make after its ranks, while its world is ours.

    Its own name has the number of groups that the process has made, or has, in it, and torch 2.14 counts this one for
    the names of groups that all make too: on members that are in different numbers of groups the names differ.
    """
    if "name" in STOCK or not hasattr(c10d, "_process_group_name"):
        return
    stock = STOCK["name"] = c10d._process_group_name

    def name(ranks: Any, use_hashed_name: bool) -> Any:
        is_ours = use_hashed_name and isinstance(c10d._world.default_pg, ProcessGroup)
        return WORLD.local_name(ranks) if is_ours else stock(ranks, use_hashed_name)

    setattr(c10d, "_process_group_name", name)  # noqa: B010  # for mypy


def split_from_none() -> None:
    """Keep torch from handing C++ the backend of a default group of ours, bound to a GPU, to split new groups from.

    C++ takes only its own, and groups of ours are made by their members.
    """
    stock = getattr(c10d, "_get_split_source", None)
    if stock is None or "split" in STOCK:
        return
    STOCK["split"] = stock

    def split_source(pg: Any) -> Any:
        return None if isinstance(pg, ProcessGroup) else stock(pg)

    setattr(c10d, "_get_split_source", split_source)  # noqa: B010  # for mypy


def follow_aborts() -> None:
    """Forget a world of ours that torch has aborted and forgotten: its groups know only that each of them was aborted.

    torch's destroy ends the default group by ``shutdown``, which forgets it.
    """
    if "default" in STOCK:
        return
    stock = STOCK["default"] = c10d._update_default_pg

    def update(pg: Any) -> None:
        stock(pg)
        default = WORLD.default
        if pg is None and WORLD.mirror is not None and isinstance(default, ProcessGroup) and default.is_aborted():
            WORLD.clear()

    setattr(c10d, "_update_default_pg", update)  # noqa: B010  # for mypy


def keep_recorder_away() -> None:
    """Keep torch 2.15 from attaching its flight recorder to groups of ours, which it cannot: ``watch`` records them."""
    stock = getattr(c10d, "_maybe_attach_flight_recorder", None)
    if stock is None or "recorder" in STOCK:
        return
    STOCK["recorder"] = stock

    def attach(pg: Any, *args: Any) -> None:
        if not isinstance(pg, ProcessGroup):
            stock(pg, *args)

    setattr(c10d, "_maybe_attach_flight_recorder", attach)  # noqa: B010  # for mypy


def open_monitored_barrier() -> None:
    """Let ``torch.distributed.monitored_barrier`` take groups of ours: torch 2.13 does only what is named "gloo"."""
    if "monitored_barrier" in STOCK:
        return
    stock = STOCK["monitored_barrier"] = c10d.monitored_barrier

    @wraps(stock)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        pg: Any = c10d._world.default_pg if group is None else group
        if isinstance(pg, ProcessGroup):
            return pg.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]  # c10d.monitored adds it
        return stock(group, timeout, wait_all_ranks)

    for module in (c10d, dist):
        setattr(module, "monitored_barrier", monitored_barrier)  # noqa: B010  # for mypy


def launched() -> environment.Launch | None:
    """Return how this process was started, as ``divert`` was told or as the environment says."""
    return LAUNCH[0] if LAUNCH else environment.detect()


def by_launcher(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Take rank and size from an MPI launcher where the environment lacks what ``env://`` needs."""
    launch = launched()
    if "MASTER_ADDR" in os.environ or launch is None or not launch.starts_mpi:
        yield from STOCK["env"](url, *args, **kwargs)
        return
    yield fresh_store(), launch.rank, launch.size


def divert(launch: environment.Launch | None) -> None:
    """Let ``init_process_group`` and ``new_group`` with "mpi" or "gloo" make groups of ours; once a process.

    ``get_backend`` goes on to say what the script asked for.

    Args:
        launch: how this process was started, before anyone set what torchrun sets.
    """
    if "helper" in STOCK:
        return
    LAUNCH.append(launch)
    meet_by_url = STOCK["rendezvous"] = rendezvous_module.rendezvous
    helper = STOCK["helper"] = c10d._new_process_group_helper

    def make(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        carried = str(backend) in DIVERTED
        if carried and size < 0:  # c10d asks nobody for its own MPI
            rank, size = (launch.rank, launch.size) if launch is not None else (0, 1)
        made = helper(size, rank, ranks, c10d.Backend(NAME) if carried else backend, *args, **kwargs)
        group, store = made
        if carried and group in c10d._world.pg_map:
            asked = NAME if str(backend) == "undefined" else str(backend)
            c10d._world.pg_map[group] = (asked, store)
            group.asked_name = None if asked == NAME else asked
        return made

    def meet(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[Any]:
        if launch is not None and not launch.starts_mpi:
            yield from meet_by_url(url, rank, world_size, **kwargs)
        else:
            yield fresh_store(), launch.rank if launch is not None else 0, launch.size if launch is not None else 1

    patched: Any = c10d
    patched._new_process_group_helper, patched.rendezvous = make, meet
    modules: list[Any] = [patched, dist]
    for module in modules:
        module.is_mpi_available = lambda: True
