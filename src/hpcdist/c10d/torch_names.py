"""Names of ``torch.distributed`` that work on our groups as they are.

The pieces of DDP's reducer, the collectives over a store, and what else ``torch.distributed``'s ``__init__`` offers
beside c10d's functions. They take a group, and a group of ours is one.
"""

from __future__ import annotations

from hpcdist.c10d.queries import is_outside
from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.world import resolve
from hpcdist.torch_bridge.private_names import named

BuiltinCommHookType = named("BuiltinCommHookType")
GradBucket = named("GradBucket")
Logger = named("Logger")
ProcessGroupGloo = named("ProcessGroupGloo")
Reducer = named("Reducer")
UNDERSCORED = {name: named(name) for name in (
    "_DEFAULT_FIRST_BUCKET_BYTES", "_Backend", "_ControlCollectives", "_StoreCollectives", "_Work",
    "_broadcast_coalesced", "_compute_bucket_assignment_by_size", "_create_process_group_wrapper",
    "_make_nccl_premul_sum",
    "_register_builtin_comm_hook", "_register_comm_hook", "_remote_device", "_test_python_store", "_time_estimator",
    "_verify_params_across_processes",
)}  # fmt: skip
_rank_not_in_group = is_outside


def _get_process_group_name(pg: ProcessGroup) -> str:
    """Return a group's name (c10d's private name); ValueError if it is not live."""
    return resolve(pg).group_name
