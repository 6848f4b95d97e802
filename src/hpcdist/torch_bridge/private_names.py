"""Private names of torch, each behind a function that describes its use.

====================================================  ==================================================  ==============
what                                                  why                                                 checked
====================================================  ==================================================  ==============
``_C._distributed_c10d._current_process_group``,      ``dist2``'s group of this thread is torch's too     2.9.1, 2.15.0
``._set_process_group``
``distributed_c10d._DistributedBackendOptions``,      what ``Backend.register_backend``'s creators take  2.13.0, 2.15.0
``Work._source_rank``                                 and from whom it received
``ProcessGroupGloo._Options``                         ``hpcdist bench`` has gloo on one interface         2.13.0, 2.15.0
``torch.testing``'s ``fake_pg``                       ``hpcdist bench`` times torch's own part of a call  2.13.0
``UntypedStorage._new_shared_fd_cpu``                 ``node_shared``: memory that torch knows to be     2.13.0, 2.14.1
                                                      shared, so that it sends it to processes uncopied
``cuda._sleep``                                       ``hpcdist bench`` keeps a GPU busy meanwhile        2.14.1
``torch.distributed``'s in ``UNDERSCORED``            handed on by ``hpcdist`` as they are; 2.15 has no   2.13.0, 2.15.0
                                                      ``_ControlCollectives, _StoreCollectives``
====================================================  ==================================================  ==============
"""

from __future__ import annotations

import importlib
import threading
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as bindings
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hpcdist.core.backend import Bootstrap
from hpcdist.torch_bridge.features import has


def named(name: str) -> Any:
    """Return a private object of ``torch.distributed``, or None if this torch does not have it."""
    return getattr(dist, name, None)


# classes and functions that take a group, and so one of ours: DDP's pieces, collectives over a store
BuiltinCommHookType = named("BuiltinCommHookType")
CoalescingManager = named("_CoalescingManager")  # the Works of calls that are issued together
GradBucket = named("GradBucket")
Logger = named("Logger")
ProcessGroupGloo = named("ProcessGroupGloo")
Reducer = named("Reducer")
UNDERSCORED = {name: named(name) for name in (
    "_CoalescingManager", "_DEFAULT_FIRST_BUCKET_BYTES", "_Backend", "_ControlCollectives", "_StoreCollectives",
    "_Work", "_broadcast_coalesced", "_compute_bucket_assignment_by_size", "_create_process_group_wrapper",
    "_make_nccl_premul_sum",
    "_register_builtin_comm_hook", "_register_comm_hook", "_remote_device", "_test_python_store", "_time_estimator",
    "_verify_params_across_processes",
)}  # fmt: skip


def backend_options(given: Bootstrap) -> Any:
    """Return a group's bootstrap in c10d's form for the creator of a backend."""
    assert given.store is not None
    options: Any = c10d._DistributedBackendOptions()  # type: ignore[attr-defined]
    options.store, options.group_rank, options.group_size = given.store, given.rank, given.size
    options.timeout = given.timeout
    return options


def all_gather_options() -> Any:
    return bindings.AllgatherOptions()


def sender(work: Any) -> int:
    return work._source_rank()


def gloo_at(host: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return torch's gloo on the network interface with the address ``host``."""
    options = ProcessGroupGloo._Options()
    options._devices, options._timeout = [ProcessGroupGloo.create_device(hostname=host)], timeout
    return ProcessGroupGloo(store, rank, size, options)


def fake_group() -> Any:
    """Return torch's "fake" group, which sends nothing, with the default group's ranks; every rank calls this."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    return dist.new_group(backend="fake")


THREADS_GROUP = "a current group in each thread"
CURRENT = threading.local()  # the current ``group`` of this thread, for a torch without one


def current_group() -> Any:
    """Return the current group of torch's code in this thread, or None."""
    return bindings._current_process_group() if has(THREADS_GROUP) else getattr(CURRENT, "group", None)


def set_current_group(group: Any) -> None:
    """Set the current group of torch's code in this thread."""
    if has(THREADS_GROUP):
        bindings._set_process_group(group)
    else:
        CURRENT.group = group


def occupy_gpu(cycles: int) -> None:
    """Keep the current stream busy for a number of a GPU's cycles."""
    torch.cuda._sleep(cycles)


def storage_of(descriptor: int, nbytes: int) -> torch.UntypedStorage:
    """Map a file as a storage that ``torch.multiprocessing`` shares without a copy, with its own descriptor."""
    made: torch.UntypedStorage = torch.UntypedStorage._new_shared_fd_cpu(descriptor, nbytes)  # type: ignore[attr-defined]
    return made
