"""Start and end of the default group: ``init_process_group`` and ``destroy_process_group``."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from numbers import Integral
from typing import Any, TypeGuard
from urllib.parse import urlparse

import torch
from torch.distributed import default_pg_timeout
from torch.distributed.distributed_c10d import DebugLevel, Store, get_debug_level

from hpcdist.c10d.debug import set_debug_level_from_env
from hpcdist.c10d.names import Backend, BackendConfig, is_nccl_available, is_xccl_available
from hpcdist.core import errors, factory, hooks, registry
from hpcdist.core.agreement import check_same
from hpcdist.core.backend import Backend as Communicator
from hpcdist.core.backend import Bootstrap
from hpcdist.core.group import Group, hashed_name
from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.work import check_timeout
from hpcdist.core.world import WORLD, is_outside
from hpcdist.launch import decision, environment, topology
from hpcdist.torch_bridge import mirror, registration
from hpcdist.watch import logs, watchdog
from hpcdist.watch.exit import EXIT


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: torch.device | int | None = None,
    _ranks: list[int] | None = None,
    enable_reconfigure: bool = False,
    *,
    comm: Any = None,
    bridge: bool | None = None,
) -> None:
    """Make the default group; every process of the job calls this.

    Without arguments the launcher decides: MPI under mpirun and srun, a store under torchrun, and a world of one
    process without a launcher.

    Args:
        backend: ``"mpi"``, ``"gloo"``, ``"nccl"``, ``"loopback"``, a name given to
            ``Backend.register_backend``, or pairs such as ``"cpu:mpi,cuda:nccl"``.
        init_method: how the processes find each other without MPI: ``env://``, ``tcp://host:port``,
            ``file:///path``, ``slurm://``; or ``mpi://`` for a store over MPI. The default is that of
            the variable HPCDIST_INIT_METHOD, if it is set. Without a backend, ``tcp://`` and ``file://`` with
            the rank and size of an MPI launcher mean MPI.
        timeout: the limit of each call; 30 minutes by default.
        world_size, rank: the number of processes and this one's number, if neither a launcher nor MPI gives them.
        store: the store by which the processes find each other, in place of ``init_method``.
        group_name: accepted as in c10d, and ignored.
        pg_options: c10d's options of the backend, or options of a backend of ``Backend.register_backend``.
        device_id: the GPU of this process; binds it and connects NCCL at once.
        _ranks: the source of the default group's name, if this world is a part of a larger one.
        enable_reconfigure: not supported (c10d's since torch 2.14, private); ``elastic`` replaces ranks.
        comm: an mpi4py communicator that becomes the world, in place of MPI.COMM_WORLD. It is duplicated;
            every rank of it calls this.
        bridge: make this world ``torch.distributed``'s too, so that DDP, FSDP2, DTensor … use it. None means
            yes unless ``HPCDIST_BRIDGE=0``; a ``torch.distributed`` that is initialised already is left as it is.

    Raises:
        ValueError: called twice, an unknown backend, a wrong rank or size, or a value of HPCDIST_LOG that is not a
            level.
        TypeError: a timeout that is not a timedelta, or a store, comm or device of another type.
        RuntimeError: ``enable_reconfigure``, a rank or size that is not an integer, or an ``init_method`` that is not a
            string or has an unknown scheme.
        DistBackendError: no MPI library, or one that does not belong to the launcher.
    """
    forget_aborted()
    if WORLD.default is not None:
        raise ValueError("trying to initialize the default process group twice!")
    check_timeout(timeout)
    prepare(enable_reconfigure)
    if store is not None and init_method is not None:
        raise AssertionError("Cannot specify both init_method and store.")
    if comm is not None and (store is not None or init_method is not None):
        raise AssertionError("Cannot specify comm and init_method or store: the ranks are those of comm.")
    for name, number in (("rank", rank), ("world_size", world_size)):
        if not isinstance(number, Integral):
            raise RuntimeError(f"`{name}` must be an integer. {number!r}")
    if not isinstance(store, (Store, type(None))):
        raise TypeError(f"store: expected a Store, got {type(store).__name__} {store!r}")
    if store is not None and (world_size <= 0 or rank < 0):
        raise AssertionError(
            f"world_size must be positive and rank non-negative if using store; got {world_size} and {rank}"
        )
    if not isinstance(init_method, (str, type(None))):
        raise RuntimeError(f"`url` must be a string. {type(init_method)}: {init_method}")
    if init_method is None and store is None and comm is None:
        init_method = os.environ.get(environment.INIT_METHOD) or None
    device = check_device(device_id)
    is_given = not (init_method or "env:").startswith("env:") or store is not None or comm is not None
    launch = environment.detect() if is_given else decision.find_launch()
    config = Backend(backend) if backend is not None else choose(launch, init_method, store, comm, rank, world_size)
    device_backends = available_backends(config)
    for name in device_backends.values():
        registry.check(name)  # before the processes look for each other
    registry.check_options(pg_options, device_backends.values())
    limit = timeout if timeout is not None else default_pg_timeout
    with limit_start(device_backends, comm, limit):
        bootstrap = find_peers(device_backends, launch, init_method, store, rank, world_size, comm, limit)
        bootstrap = bootstrap._replace(device_id=device, options=pg_options)
        backends = registry.connect_all(device_backends, bootstrap)
        name = hashed_name(*_ranks) if _ranks else WORLD.next_name()
        is_shown = bridge if bridge is not None else environment.is_on(environment.BRIDGE)
        make_default_group(backends, config, name, limit, device, bootstrap.store, is_shown)


def forget_aborted() -> None:
    """Remove a default group that was aborted, so that an init may follow without a destroy, as in c10d."""
    default = WORLD.default
    if isinstance(default, ProcessGroup) and default.is_aborted():
        WORLD.clear()


def prepare(reconfigures: bool) -> None:
    """Read the variables that decide about calls, before the processes look for each other.

    Raises ValueError if one has an invalid value, and RuntimeError for torch's private ``_reconfigure`` (since torch
    2.14). Then nothing has changed, and this rank may call init again.
    """
    if reconfigures:
        raise RuntimeError(
            "init_process_group(enable_reconfigure=True) is not supported: hpcdist.elastic replaces ranks that died, "
            "shrink_group and new_group make groups of other ranks"
        )
    logs.set_up()
    for switch in environment.SWITCHES:
        environment.is_on(switch)
    set_debug_level_from_env()


def make_default_group(
    backends: dict[str, Communicator],
    config: str,
    name: str,
    timeout: timedelta,
    device: torch.device | None,
    store: Store | None,
    is_shown: bool = False,
) -> ProcessGroup:
    """Make the default group, with ``is_shown`` torch.distributed's too, and check that its ranks' settings are equal.

    If a step raises, as it does on every rank if the settings differ, no default group stays.
    """
    before = hooks.reproducible
    for each in watchdog.RUNNING:
        each.renumber([])
    first = next(iter(backends.values()))
    ranks = range(first.size)
    group = factory.make(ranks, backends, config, name, "default_pg", timeout, device, is_default=True)
    WORLD.store = store
    try:
        hooks.reproducible = before or environment.is_on(environment.REPRODUCIBLE)
        if group.cpu is not None and group.size() > 1:
            settings = group.cpu.settings() | {environment.REPRODUCIBLE: str(hooks.reproducible)}
            settings["TORCH_DISTRIBUTED_DEBUG=DETAIL"] = str(get_debug_level() == DebugLevel.DETAIL)
            check_same(group.cpu, settings)
        watch(group)
        registration.limit_devices(backends)
        if group.rank() == 0:
            topology.warn_if_spread()
        if is_shown:
            mirror.show(group)
    except BaseException as error:
        hooks.reproducible = before
        if isinstance(error, errors.DistBackendError):
            group.close()
        else:
            group.abort("init_process_group has failed", ends_calls=False)  # on this rank only, perhaps
        WORLD.clear()
        raise
    return group


def watch(group: ProcessGroup) -> None:
    """Start the watchdog of a default group and the handling of this process's end; every rank of the group calls."""
    watchdog.watch(group)
    EXIT.register()
    EXIT.backend, EXIT.limit = group.any_backend(), group.timeout.total_seconds()


def choose(
    launch: environment.Launch | None, init_method: str | None, store: Any, comm: Any, rank: int, world_size: int
) -> str:
    """Return the backend string if the caller gave none."""
    over_mpi = comm is not None or is_mpi(launch)
    has_others = rank > 0 or world_size > 1 or environment.names_others()  # unless the caller started the processes
    if store is not None or (init_method is not None and not init_method.startswith(("mpi:", "env:"))):
        over_mpi = store is None and is_of_mpi(launch, init_method, rank, world_size)
    elif not over_mpi and launch is None and init_method is None and not has_others:
        if world_size == -1:
            decision.warn_if_alone()
        return Backend.LOOPBACK
    cpu = Backend.MPI if over_mpi else Backend.GLOO
    if is_xccl_available():
        return f"cpu:{cpu},xpu:{Backend.XCCL}"
    return f"cpu:{cpu},cuda:{Backend.NCCL}" if is_nccl_available() else cpu


def is_of_mpi(launch: environment.Launch | None, url: str | None, rank: int, world_size: int) -> bool:
    """Tell whether a rank and size are those of MPI: from the variables of its launcher, or from mpi4py.

    ``slurm://`` is hpcdist's own way without MPI.
    """
    from hpcdist.launch import rendezvous

    given = rendezvous.query(urlparse(str(url)), rank, world_size)
    is_counted = launch is not None and launch.size in (given[1], environment.UNKNOWN)
    if is_mpi(launch) and is_counted and given[0] == launch.rank and not str(url).startswith("slurm:"):
        return given[1] > 1
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized() or mpi.COMM_WORLD.Get_size() == 1:
        return False
    return given == (mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size())


def is_mpi(launch: environment.Launch | None) -> TypeGuard[environment.Launch]:
    """Tell whether the launcher starts MPI's ranks."""
    return launch is not None and launch.starts_mpi


def available_backends(config: str) -> dict[str, str]:
    """Return the backend of each device type that this machine has."""
    if config == Backend.UNDEFINED:
        raise ValueError("backend 'undefined' is c10d's placeholder; give a name, or None to let the launcher decide")
    pairs = BackendConfig(config).get_device_backend_map()
    if pairs.get("cuda") == Backend.NCCL and "cpu" in pairs and ":" in config and not has_device("cuda"):
        registration.warn_of_absent(config)
        return {device: name for device, name in pairs.items() if device != "cuda"}
    if ":" in config:
        return pairs
    return {device: name for device, name in pairs.items() if device == "cpu" or has_device(device)} or pairs


def has_device(kind: str) -> bool:
    """Tell whether this machine has a device of a type."""
    return kind in ("cuda", "xpu") and hasattr(torch, kind) and getattr(torch, kind).is_available()


def limit_start(device_backends: dict[str, str], comm: Any, limit: timedelta) -> AbstractContextManager[None]:
    """Limit the time that MPI waits for all ranks until the watchdog runs; a store has a limit of its own."""
    if comm is None and Backend.MPI not in device_backends.values():
        return nullcontext()
    from hpcdist.backends.mpi.process import runtime

    return runtime.limit_start(limit)


FINDING = {Backend.NCCL, Backend.XCCL, Backend.TORCH}  # alone, each finds its ranks over MPI under mpirun


def find_peers(
    device_backends: dict[str, str],
    launch: environment.Launch | None,
    init_method: str | None,
    store: Store | None,
    rank: int,
    world_size: int,
    comm: Any,
    timeout: timedelta,
) -> Bootstrap:
    """Connect the processes, by MPI if a backend needs it, else by a store."""
    names = set(device_backends.values())
    if "loopback" in names:
        check_loopback(launch, world_size)
        return Bootstrap(0, 1, timeout)
    is_given = init_method is not None or store is not None
    if "mpi" in names or comm is not None or (names <= FINDING and is_mpi(launch) and not is_given):
        from hpcdist.backends.mpi.process import runtime

        if comm is None:
            decision.check_mpi(launch, world_size)
        world = runtime.check_comm(comm) if comm is not None else runtime.world(timeout)
        own, size = world.Get_rank(), world.Get_size()
        if comm is None:
            decision.check_size(launch, size)
        if rank not in (-1, own) or world_size not in (-1, size):
            raise ValueError(
                f"init_process_group was given rank {rank} of {world_size}, and this process is rank {own} of {size} "
                "in MPI: give neither, or MPI's"
            )
        return Bootstrap(own, size, timeout, comm=world)
    from hpcdist.launch import rendezvous

    found, rank, world_size = rendezvous.find(launch, init_method, store, rank, world_size, timeout)
    return Bootstrap(rank, world_size, timeout, store=found)


def check_loopback(launch: environment.Launch | None, world_size: int) -> None:
    """Raise for a world of one process in a job of several, unless the caller gave ``world_size=1``."""
    if world_size > 1:
        raise ValueError(f"backend 'loopback' is one process; world_size is {world_size}")
    if world_size == -1 and launch is not None and launch.size > 1:
        raise ValueError(
            f"backend 'loopback' is one process, and {launch.name} started {launch.size} (this is rank {launch.rank}): "
            "leave the backend out, or give world_size=1 for a world of its own in each"
        )


def check_device(device_id: torch.device | int | None) -> torch.device | None:
    """Return ``device_id`` as a device; ValueError if this machine has no such device, TypeError for other values."""
    if device_id is None:
        return None
    if isinstance(device_id, int):
        accelerator = torch.accelerator.current_accelerator()  # if this torch is built for it
        device = torch.device("cuda" if accelerator is None else accelerator.type, device_id)
    elif isinstance(device_id, torch.device):
        device = device_id
    else:
        raise TypeError(
            f"device_id is {device_id!r} of type {type(device_id).__name__}; expected a torch.device or int"
        )
    if device.type == "cpu":
        return device
    if not has_device(device.type):
        raise ValueError(
            f"device_id {device_id} does not match what this machine has: no {device.type} device is available"
        )
    if device.index is None:
        raise ValueError(f"Please use a device_id with index; got {device}")
    if device.index >= (count := getattr(torch, device.type).device_count()):
        raise ValueError(f"device_id {device} is out of range: there are {count} devices")
    return device


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Free a group's communicators; every rank of it calls this. An aborted group is only removed.

    On this rank, receives that wait for a message raise, calls that other threads begin raise, and those that other
    threads but daemons are in are waited for. If one group cannot be freed the others are all the same; the first error
    is raised then.

    Args:
        group: the group; None or the default group destroys all, and ``init_process_group`` may follow.

    Raises:
        ValueError: a group that is not live.
    """
    if is_outside(group):
        return
    pg = WORLD.default if group is None else group
    if pg is None:
        raise errors.not_initialized()
    if not isinstance(pg, ProcessGroup) or not (pg.backends or WORLD.has(pg)):
        raise errors.destroyed(pg)
    doomed: list[Group] = [pg]
    if pg is WORLD.default:  # itself last, and in the same order on every rank
        doomed = [each for each in reversed(WORLD.groups.values()) if not each.is_own_world]
    try:
        errors.end_all(each.close for each in doomed)
        logs.LOG.debug("destroyed", extra={"group": pg.group_name})
    finally:
        if pg is WORLD.default:
            WORLD.clear()
        else:
            WORLD.remove(pg)
