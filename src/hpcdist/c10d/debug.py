"""Debugging of a job: debug level, breakpoint, stop; the monitored barrier is in ``c10d.monitored``."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed
from torch.distributed.distributed_c10d import DebugLevel, get_debug_level

from hpcdist.c10d import fingerprints, nan_check
from hpcdist.core import hooks, world
from hpcdist.core.backend import Backend
from hpcdist.core.group import Group
from hpcdist.core.issue import issue
from hpcdist.core.reduction import MAX
from hpcdist.core.table import ALL_REDUCE, BARRIER
from hpcdist.watch.watchdog import RUNNING

c10d: Any = torch.distributed  # its own level is set; the stubs leave the setters out


def set_debug_level(level: DebugLevel) -> None:
    """Set the debug level; every rank sets the same.

    Args:
        level: with ``DebugLevel.DETAIL`` each collective is compared with the other ranks' before it runs.
    """
    c10d.set_debug_level(level)
    scrutinise(level)


def set_debug_level_from_env() -> None:
    """Set the debug level from TORCH_DISTRIBUTED_DEBUG (OFF, INFO or DETAIL)."""
    c10d.set_debug_level_from_env()
    scrutinise(get_debug_level())


def scrutinise(level: DebugLevel) -> None:
    """Switch the comparison of calls on all groups, and the check for NaN, on or off."""
    is_nan_checked, is_compared = os.environ.get(nan_check.VARIABLE, "0") == "1", level == DebugLevel.DETAIL
    hooks.compare = fingerprints.check if is_compared else None
    hooks.check_message = nan_check.check_message if is_nan_checked else None
    if is_nan_checked:
        hooks.compare = check_both if is_compared else nan_check.check


def check_both(pg: Group, backend: Backend, call: Any) -> None:
    """Look for NaN, then compare the call with the other ranks'."""
    nan_check.check(pg, backend, call)
    fingerprints.check(pg, backend, call)


SKIPPED: dict[tuple[str, int], int] = {}  # how often each breakpoint was passed, by its line


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float | None = 3600) -> None:
    """Open pdb on one rank while the others wait; every rank of the default group calls this.

    ``continue`` lets all go on, ``next`` and ``step`` then stop at this rank's next line, ``quit`` ends the job.

    Args:
        rank: the rank whose terminal is used. Launchers forward the keyboard to rank 0 by default; others: Open MPI by
            ``mpirun --stdin RANK``; srun forwards to all; MPICH's mpirun to rank 0 only.
        skip: how often to pass the breakpoint first.
        timeout_s: no call times out for this time, in seconds; None leaves the timeouts as they are.

    Raises:
        ValueError: not a rank of the default group, or that is not initialized.
        bdb.BdbQuit: ``quit``, on the rank that ran pdb.
    """
    from hpcdist.c10d.debugger import RankDebugger  # imported here, because pdb may look for a terminal

    caller = sys._getframe(1)
    default = world.default_group()
    if rank not in default.ranks:
        raise ValueError(f"breakpoint on rank {rank}: the default group has ranks 0 to {default.size() - 1}")
    here = (caller.f_code.co_filename, caller.f_lineno)
    SKIPPED[here] = SKIPPED.get(here, 0) + 1
    if SKIPPED[here] <= skip:
        return
    if timeout_s is not None and RUNNING:
        RUNNING[0].waits_until = time.monotonic() + timeout_s
    debugger = RankDebugger(rank) if default.ranks[default.rank()] == rank else None
    if debugger is not None:
        debugger.open(caller)
    issue(BARRIER, default, None, None)
    if timeout_s is not None and RUNNING:
        RUNNING[0].waits_until = 0.0
    if debugger is not None:
        debugger.go_on(caller)


def stop_requested(group: Group | None = None) -> bool:
    """Tell, on all ranks alike, whether SIGTERM or SIGUSR1 has reached any of them.

    Every rank of the group calls this at the same step, for instance once an iteration, to write a checkpoint
    and exit before the time limit of the job (Slurm's ``--signal``). SIGTERM no longer ends a program that
    calls it.

    Args:
        group: the group whose ranks agree; None for the default one.
    """
    pg = world.resolve(group)
    mine = 0
    if RUNNING:
        signals = RUNNING[0].signals
        signals.ask()
        mine = int(bool(signals.received))
    flag: Any = torch.tensor([mine], dtype=torch.int32, device=pg.any_backend().device)
    issue(ALL_REDUCE, pg, flag, flag, MAX)
    return bool(flag)
