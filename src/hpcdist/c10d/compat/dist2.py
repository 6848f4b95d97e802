"""Groups made as objects, without a default group or registry: torch's experimental ``_dist2``.

``new_group`` makes a world of its own, over MPI or a store. Its collectives are the methods of the group, and the
functions of ``hpcdist`` take it as ``group=`` too.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import Store

from hpcdist.c10d.lifecycle import find_peers, limit_start, watch
from hpcdist.core import factory, registry
from hpcdist.core.backend import Bootstrap
from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.work import check_timeout
from hpcdist.core.world import WORLD
from hpcdist.launch import decision, rendezvous
from hpcdist.torch_bridge import private_names
from hpcdist.watch.watchdog import RUNNING
from hpcdist_stores import PrefixStore

__all__ = [
    "ProcessGroup",
    "ProcessGroupFactory",
    "ReduceOp",
    "current_process_group",
    "new_group",
    "process_group",
    "register_backend",
]


class ProcessGroupFactory(Protocol):
    """A function that makes a group from a store, this process's rank, and options of its own."""

    def __call__(
        self, store: Store, rank: int, world_size: int, timeout: timedelta, device: torch.device, **kwargs: object
    ) -> Any:
        """Make the group; every process calls it."""


FACTORIES: dict[str, ProcessGroupFactory] = {}

# the options of each of our backends
OPTIONS: dict[str, tuple[str, ...]] = {"mpi": ("comm",), "gloo": (), "nccl": (), "loopback": ()}
EVERY_DEVICE = ("cpu", "cuda", "xpu")
DEVICES = {"mpi": EVERY_DEVICE, "gloo": ("cpu",), "nccl": ("cuda",), "loopback": EVERY_DEVICE}
COUNT = itertools.count()  # of groups made here; the same on all processes, which make them in the same order


def register_backend(name: str, func: ProcessGroupFactory) -> None:
    """Register a factory under a name; ValueError if the name is taken."""
    if name in FACTORIES or name in OPTIONS:
        raise ValueError(f"Backend {name} already registered")
    FACTORIES[name] = func


def new_group(backend: str, timeout: timedelta, device: str | torch.device, **kwargs: object) -> Any:
    """Make a group of all processes of the job, independent of the default group; every process calls this.

    Args:
        backend: ``"mpi"``, ``"gloo"``, ``"nccl"``, ``"loopback"`` or a name given to ``register_backend``.
        timeout: the limit of each call.
        device: where the tensors will be.
        **kwargs: options of the backend; of "mpi": ``comm``, an mpi4py communicator to make the group of.

    Returns:
        The group.

    Raises:
        TypeError: a timeout that is not a timedelta, or an invalid ``comm``.
        ValueError: an unknown backend, a device that it does not carry, or a timeout below zero.
        KeyError: an unknown option.
        DistBackendError: the backend's library is missing.
    """
    where = torch.device(device)
    check_timeout(timeout, is_optional=False)
    if backend in FACTORIES:
        store, rank, size = meet(timeout)
        return FACTORIES[backend](store, rank, size, timeout, where, **kwargs)
    if backend not in OPTIONS:
        raise ValueError(f"Backend {backend} not registered (known: {', '.join(sorted({*OPTIONS, *FACTORIES}))})")
    for option in kwargs:
        if option not in OPTIONS[backend]:
            raise KeyError(f"Unknown option {option} of backend {backend} (known: {OPTIONS[backend]})")
    carried = DEVICES[backend]
    if where.type not in carried:
        raise ValueError(f"backend {backend!r} carries {carried}; got device {where}")
    with limit_start({where.type: backend}, kwargs.get("comm"), timeout):
        if backend in ("gloo", "nccl"):
            store, rank, size = meet(timeout)
            bootstrap = Bootstrap(rank, size, timeout, store=store)
        else:
            launch = None if backend == "loopback" else decision.find_launch()
            bootstrap = find_peers({where.type: backend}, launch, None, None, -1, -1, kwargs.get("comm"), timeout)
        bootstrap = bootstrap._replace(device_id=where if where.index is not None else None)
        made = registry.connect(backend, bootstrap)
        name = f"dist2:{next(COUNT)}"
        numbers = made.objects.all_gather(RUNNING[0].rank if WORLD.groups and RUNNING else None)
        is_first = not {*numbers} - {None}
        ranks = range(made.size) if None in numbers else numbers  # the world's: the watchdog identifies groups by it
        own, gpu = {where.type: made}, bootstrap.device_id
        group = factory.make(ranks, own, backend, name, "dist2", timeout, gpu, is_shown=False, is_own_world=True)
        if is_first:
            watch(group)
    return group


def meet(timeout: timedelta) -> tuple[Store, int, int]:
    """Return a store that no other group uses, this process's rank, and the number of processes."""
    store, rank, size = rendezvous.find(decision.find_launch(), None, None, -1, -1, timeout)
    return PrefixStore(f"dist2:{next(COUNT)}", store), rank, size


current_process_group = private_names.current_group


@contextmanager
def process_group(pg: Any) -> Generator[None, None, None]:
    """Make a group the current one of this thread, also for torch's code, inside a ``with``."""
    before = private_names.current_group()
    private_names.set_current_group(pg)
    try:
        yield
    finally:
        private_names.set_current_group(before)
