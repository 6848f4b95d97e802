"""Where are the object-oriented groups? In ``hpcdist.c10d.compat.dist2``; this is their public name."""

from hpcdist.c10d.compat.dist2 import (
    ProcessGroup,
    ProcessGroupFactory,
    ReduceOp,
    current_process_group,
    new_group,
    process_group,
    register_backend,
)

__all__ = [
    "ProcessGroup",
    "ProcessGroupFactory",
    "ReduceOp",
    "current_process_group",
    "new_group",
    "process_group",
    "register_backend",
]
