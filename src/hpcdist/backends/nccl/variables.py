"""``TORCH_NCCL_*``: variables for torch's own NCCL backend, which are followed here, or cause one warning.

A script that sets such a variable relies on it: if it were ignored silently, users would notice only when a job hangs.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

PREFIX = "TORCH_NCCL_"
BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
# torch's ways to handle an error: 0 ignore it, 1 abort the communicators and end the process, 2 abort them only, 3 end
# the process only. Here they are aborted and the error is raised, which ends a process that does not catch it; torchrun
# sets 1 for every job.
FOLLOWED_ERROR_HANDLING = ("1", "2")
READ_ELSEWHERE = {"TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}  # used by the flight recorder

WARNED: set[str] = set()  # each once in a process


def blocks_in_wait(given: Mapping[str, str] = os.environ) -> bool:
    """Tell whether ``wait()`` blocks the host until the call has ended (``TORCH_NCCL_BLOCKING_WAIT=1``)."""
    return any(given.get(name, "0") not in ("", "0") for name in BLOCKING_WAIT)


def refused(given: Mapping[str, str]) -> list[str]:
    """Return the variables that are set and cannot be followed, as ``NAME=value``."""
    read = {*BLOCKING_WAIT, *ERROR_HANDLING, *READ_ELSEWHERE}
    found = [name for name in given if name.startswith(PREFIX) and name not in read]
    found += [name for name in ERROR_HANDLING if given.get(name, "2") not in FOLLOWED_ERROR_HANDLING]
    return [f"{name}={given[name]}" for name in sorted(found)]


def warn(given: Mapping[str, str] = os.environ) -> None:
    """Warn, once, of variables for torch's NCCL backend without an effect on this one."""
    new = [each for each in refused(given) if each not in WARNED]
    if not new:
        return
    WARNED.update(new)
    warnings.warn(
        f"{', '.join(new)}: set for torch's own NCCL backend, and without effect on hpcdist's. A call that is past the "
        "group's timeout, or an error of NCCL, aborts the group's communicators and raises DistBackendError "
        f"({ERROR_HANDLING[0]}=2); the limit is init_process_group's timeout=",
        stacklevel=2,
    )
