"""Registration of the backend "hpcdist" with ``torch.distributed``, and the diversion of unmodified scripts.

====================================================  ==================================================  ==============
what                                                  why                                                 checked
====================================================  ==================================================  ==============
``rendezvous._rendezvous_handlers["env"]``            ``init_process_group("hpcdist")`` without           2.13.0, 2.15.0
                                                      MASTER_ADDR, where the launcher starts MPI
``distributed_c10d._new_process_group_helper``        "mpi" becomes "hpcdist", also beside a group of     2.13.0, 2.15.0
                                                      torch's; ``python -m hpcdist run``: "gloo" too
``distributed_c10d._new_group_with_tag``              "mpi" with ``use_local_synchronization``, which     2.8.0, 2.14.1
                                                      c10d refuses
``distributed_c10d.rendezvous``                       ``python -m hpcdist run``: no address is needed     2.13.0, 2.15.0
``distributed_c10d._world`` (default_pg, pg_map,      the group that is meant; the name that was asked    2.13.0, 2.15.0
pg_backend_config)
====================================================  ==================================================  ==============
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Container, Iterator
from functools import cache
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hpcdist.core.printing import add_hint
from hpcdist.core.process_group import ProcessGroup
from hpcdist.launch import arrival, decision, environment
from hpcdist.launch.rendezvous import query
from hpcdist.torch_bridge import replaced
from hpcdist.torch_bridge.mirror import LATE_STORE, NAME, STOCK, fresh_store

# "cuda" is CUDA's and ROCm's; a torch built for CPUs has none, and torch's libraries would still choose it
DEVICES = [
    "cpu",
    *(["cuda"] if torch.backends.cuda.is_built() else []),
    *(["xpu"] if getattr(torch.version, "xpu", None) else []),
]
DIVERTED = frozenset({"gloo", "undefined"})  # names that mean our groups under `hpcdist run`
CARRIED = DIVERTED | {"mpi", NAME}
AT_START: list[environment.Launch | None] = []  # the launch of ``hpcdist run``; a script may set variables later
ASKED: list[str] = []  # the backend string of the group that torch makes now
BEGIN_BESIDE: list[Callable[..., None]] = []  # makes our world in a job whose default group is torch's own

rendezvous_module: Any = __import__("torch.distributed.rendezvous", fromlist=["rendezvous"])


def register(
    creator: Callable[[Any, Any], Any], begin_beside: Callable[..., None], end_beside: Callable[[], None]
) -> None:
    """Register the backend "hpcdist" with torch.distributed, and let "env://" work without MASTER_ADDR under MPI.

    ``creator`` makes a group from c10d's backend options and the caller's ``pg_options``; the two others begin and end
    our world in a job whose default group is torch's own (every rank calls, with the backend's name, that group, its
    store and the timeout).
    """
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, creator, extended_api=True, devices=DEVICES)
    BEGIN_BESIDE.append(begin_beside)
    handlers = rendezvous_module._rendezvous_handlers
    if handlers["env"] is not by_launcher:
        STOCK["env"] = handlers["env"]
        handlers["env"] = by_launcher
    replaced.AFTER_ABORT.append(end_beside)
    replaced.replace("_new_process_group_helper", make, c10d)
    replaced.replace("_new_group_with_tag", make_by_members, c10d)
    replaced.replace_all()


def by_launcher(url: str, *args: Any, is_ours: bool = False, **kwargs: Any) -> Iterator[Any]:
    """Take rank and size from an MPI launcher, if the group is ours or the environment lacks what ``env://`` needs."""
    launch = decision.find_launch() if is_ours else environment.detect()
    is_asked = launch is not None and launch.size == environment.UNKNOWN and LATE_STORE.is_reserved
    is_torchs = "MASTER_ADDR" in os.environ or is_asked  # a program that does not use hpcdist starts no MPI
    if launch is None or not launch.starts_mpi or (is_torchs and not is_ours):
        is_first = is_ours and launch is not None and launch.rank == 0
        try:
            with arrival.report_wait(launch, is_first):
                iterator = STOCK["env"](url, *args, **kwargs)
                found = next(iterator)
        except ValueError as error:
            if launch is not None or not is_ours:
                raise
            raise ValueError(add_hint(f"{error}; {environment.NOT_STARTED}", "rendezvous")) from error
        yield found
        yield from iterator
        return
    launch = decision.with_size(launch) or launch
    yield fresh_store(), launch.rank, launch.size


def limit_devices(carried: Container[str]) -> None:
    """Limit the devices of the name "hpcdist" to the default group's: torch's libraries use a GPU if it has one.

    A torch that is built for CUDA may run without a GPU.
    """
    dist.Backend.backend_capability[NAME] = [each for each in DEVICES if each in carried]


def cpu_backend(asked: str) -> str:
    """Return the CPU's backend in a string, a name or pairs; empty if there is none."""
    if ":" not in asked:
        return asked
    pairs = [pair.strip().partition(":") for pair in asked.split(",")]
    return next((name for device, _, name in pairs if device == "cpu"), "")


@cache
def warn_of_absent(asked: str) -> None:
    """Warn that this machine has no GPU for a part of the requested backends."""
    warnings.warn(
        add_hint(
            f"backend {asked!r}: this process has no CUDA device, so its group carries CPU tensors only", "no-cuda"
        ),
        stacklevel=2,
    )


def make(helper: Any, size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a group as torch's ``_new_process_group_helper`` does; groups for MPI are ours.

    ``get_backend`` and ``get_backend_config`` still return the script's own backend.
    """
    asked = str(backend)
    name = cpu_backend(asked)
    is_subgroup, default = len(ranks) > 0, c10d._world.default_pg
    beside = None if is_subgroup else default  # a second world is made by hand, with numbers and a store of its own
    if name not in CARRIED or (name in DIVERTED and ("meet" not in STOCK or beside is not None)):
        return helper(size, rank, ranks, backend, *args, **kwargs)
    if beside is not None and (rank, size) == (beside.rank(), beside.size()):
        ranks, is_subgroup = list(range(size)), True
    if is_subgroup and not isinstance(default, ProcessGroup):
        if name in DIVERTED:
            return helper(size, rank, ranks, backend, *args, **kwargs)
        BEGIN_BESIDE[-1](name, default, args[0], kwargs["timeout"])
    elif not is_subgroup:
        launch = decision.find_launch()
        if name in DIVERTED:
            launch = decision.with_size(launch)  # which ``hpcdist run`` has asked for: one rank may call this
        starts_own = size > 1 and AT_START == [None]  # the program starts its processes itself
        has_own_store = launch is not None and (rank, size) != (launch.rank, launch.size)  # ``meet`` refuses the others
        if name in DIVERTED and (starts_own or has_own_store):
            return helper(size, rank, ranks, backend, *args, **kwargs)
        if name == "mpi":
            decision.check_mpi(launch, size)
        limit_devices(DEVICES)
        if size < 0:  # for "mpi" c10d would use its own MPI, without a store
            if launch is None:
                decision.warn_if_alone()
            launch = decision.with_size(launch)
            rank, size = (launch.rank, launch.size) if launch is not None else (0, 1)
            args = (fresh_store(), *args[1:])
    if "cuda:" in asked and not torch.cuda.is_available():
        warn_of_absent(asked)
    ASKED[:] = [asked]
    made = helper(size, rank, ranks, c10d.Backend(NAME), *args, **kwargs)
    if made[0] in c10d._world.pg_map and asked != NAME:
        show(made[0], asked)
    return made


def show(group: Any, asked: str) -> None:
    """Have ``get_backend``, ``get_backend_config`` and profiles name a group's backend as the script did."""
    shown, name = NAME if asked == "undefined" else asked, cpu_backend(asked)
    c10d._world.pg_map[group] = (shown, c10d._world.pg_map[group][1])
    c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(shown)))
    group.asked_name = None if name in ("undefined", NAME) else name


def make_by_members(
    stock: Any,
    ranks: Any = None,
    timeout: Any = None,
    backend: Any = None,
    *args: Any,
    use_local_synchronization: bool = False,
    **kwargs: Any,
) -> Any:
    """Make a group of ours that only its members make by the name "mpi" too, for which c10d refuses it."""
    default: Any = c10d._world.default_pg
    asked = str(backend or (c10d._world.pg_map[default][0] if default is not None else "")).lower()
    is_ours = use_local_synchronization and asked == "mpi" and isinstance(default, ProcessGroup)
    kwargs["use_local_synchronization"] = use_local_synchronization
    group = stock(ranks, timeout, NAME if is_ours else backend, *args, **kwargs)
    if is_ours and isinstance(group, ProcessGroup):
        show(group, asked)
    return group


def number(given: int, variable: str) -> int | None:
    """Return a rank or size from the caller, or else from the environment."""
    return given if given != -1 else environment.integer(os.environ, variable)


def meet(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[Any]:
    """Connect the processes of an unmodified script: over MPI if its launcher starts it, else as torch does.

    A script that starts its processes itself, and gives their number, is left to torch, as is one that meets again for
    a world of its own beside the default group. ValueError if the caller's rank or size differs from the launcher's.
    """
    if dist.is_initialized():
        yield from STOCK["meet"](url, rank, world_size, **kwargs)
        return
    launch = decision.with_size(decision.find_launch())
    rank, world_size = query(urlparse(str(url)), rank, world_size)
    if launch is not None and launch.starts_mpi:
        if rank not in (-1, launch.rank) or world_size not in (-1, launch.size):
            raise ValueError(
                f"init_process_group was given rank {rank} of {world_size}, and {launch.name} started this process as "
                f"rank {launch.rank} of {launch.size}: give neither, or the launcher's"
            )
        yield fresh_store(), launch.rank, launch.size
    elif launch is None and number(world_size, "WORLD_SIZE") in (None, 1) and number(rank, "RANK") in (None, 0):
        if world_size == -1:
            decision.warn_if_alone()
        yield fresh_store(), 0, 1
    else:
        yield from STOCK["meet"](url, rank, world_size, **kwargs)


def divert(launch: environment.Launch | None, is_mpi_available: Callable[[], bool]) -> None:
    """Let ``init_process_group`` and ``new_group`` with "gloo" or without a name make groups of ours."""
    if "meet" in STOCK:
        return
    STOCK["meet"] = rendezvous_module.rendezvous
    AT_START.append(launch)
    patched: Any = c10d
    patched.rendezvous = meet
    shown: Any = dist  # c10d's own name would send torch to a ProcessGroupMPI that it does not have
    shown.is_mpi_available = is_mpi_available
