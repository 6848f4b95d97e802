"""Which of ``torch.distributed``'s own names work on our groups as they are?

The pieces of DDP's reducer, the collectives over a store, and what else ``torch.distributed``'s ``__init__`` offers
beside c10d's functions. They take a group, and a group of ours is one.
"""

from __future__ import annotations

from typing import Any

from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.distributed.remote_device import _remote_device

from hpcdist.core.group import ProcessGroup
from hpcdist.core.world import NON_GROUP_MEMBER, resolve

__all__ = [
    "_DEFAULT_FIRST_BUCKET_BYTES",
    "BuiltinCommHookType",
    "GradBucket",
    "Logger",
    "ProcessGroupGloo",
    "Reducer",
    "_Backend",
    "_ControlCollectives",
    "_StoreCollectives",
    "_Work",
    "_broadcast_coalesced",
    "_compute_bucket_assignment_by_size",
    "_create_process_group_wrapper",
    "_get_process_group_name",
    "_make_nccl_premul_sum",
    "_rank_not_in_group",
    "_register_builtin_comm_hook",
    "_register_comm_hook",
    "_remote_device",
    "_test_python_store",
    "_time_estimator",
    "_verify_params_across_processes",
]


def torchs(name: str, module: Any = _distributed_c10d) -> Any:
    """Return what torch has under a name, or None: 2.15 dropped some of these."""
    return getattr(module, name, None)


_DEFAULT_FIRST_BUCKET_BYTES = torchs("_DEFAULT_FIRST_BUCKET_BYTES")
BuiltinCommHookType = torchs("BuiltinCommHookType")
GradBucket = torchs("GradBucket")
Logger = torchs("Logger")
ProcessGroupGloo = torchs("ProcessGroupGloo", distributed_c10d)
Reducer = torchs("Reducer")
_Backend = torchs("Backend")
_ControlCollectives = torchs("_ControlCollectives")
_StoreCollectives = torchs("_StoreCollectives")
_Work = torchs("Work")
_broadcast_coalesced = torchs("_broadcast_coalesced")
_compute_bucket_assignment_by_size = torchs("_compute_bucket_assignment_by_size")
_create_process_group_wrapper = torchs("_create_process_group_wrapper", distributed_c10d)
_make_nccl_premul_sum = torchs("_make_nccl_premul_sum")
_register_builtin_comm_hook = torchs("_register_builtin_comm_hook")
_register_comm_hook = torchs("_register_comm_hook")
_test_python_store = torchs("_test_python_store")
_time_estimator = torchs("_time_estimator", distributed_c10d)
_verify_params_across_processes = torchs("_verify_params_across_processes")


def _rank_not_in_group(group: Any) -> bool:
    """Tell whether a group stands for one that this rank is not in (c10d's private name)."""
    return group is not None and not isinstance(group, ProcessGroup) and group == NON_GROUP_MEMBER


def _get_process_group_name(pg: ProcessGroup) -> str:
    """Return a group's name (c10d's private name); ValueError where it is not live."""
    return resolve(pg).group_name
