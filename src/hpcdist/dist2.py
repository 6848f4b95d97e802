"""Object-oriented groups: the public name of ``hpcdist.c10d.compat.dist2``."""

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
