"""Debugging of a job: debug level, monitored barrier, breakpoint, stop."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed.distributed_c10d import DebugLevel, get_debug_level

from hpcdist.core import hooks, world
from hpcdist.core.backend import Backend
from hpcdist.core.errors import DistBackendError
from hpcdist.core.group import Group
from hpcdist.core.issue import issue
from hpcdist.core.naps import nap
from hpcdist.core.ranks import listed
from hpcdist.core.reduction import MAX
from hpcdist.core.table import ALL_REDUCE, BARRIER
from hpcdist.core.work import Work
from hpcdist.watch import fingerprints, nan_check, report
from hpcdist.watch.debugger import RankDebugger
from hpcdist.watch.watchdog import RUNNING

BARRIER_TAG = 32_701  # under the least MPI_TAG_UB (MPI 9.1.2); users' tags are rarely this high

c10d: Any = torch.distributed  # its own level is set; the stubs leave the setters out

__all__ = [
    "DebugLevel",
    "breakpoint",
    "get_debug_level",
    "monitored_barrier",
    "set_debug_level",
    "set_debug_level_from_env",
    "stop_requested",
]


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
    """Have the calls on all groups compared, and looked at for NaN, or not."""
    is_nan_checked, is_compared = nan_check.is_asked_for(), level == DebugLevel.DETAIL
    hooks.compare = fingerprints.check if is_compared else None
    hooks.check_message = nan_check.check_message if is_nan_checked else None
    if is_nan_checked:
        hooks.compare = check_both if is_compared else nan_check.check


def check_both(pg: Group, backend: Backend, call: Any) -> None:
    """Look for NaN, then compare the call with the other ranks'."""
    nan_check.check(pg, backend, call)
    fingerprints.check(pg, backend, call)


def monitored_barrier(
    group: Group | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait until every rank of a group is here, or say which are not.

    Rank 0 of the group hears from each rank and answers it; every rank of the group calls this. Unlike c10d's
    it works on every backend that carries CPU tensors.

    Args:
        group: the group; None for the default one.
        timeout: how long to wait; None for the group's.
        wait_all_ranks: name all ranks that did not come, not only the first.

    Raises:
        DistBackendError: a rank did not come in time; on rank 0 it says which.
    """
    pg = world.joined(group, "monitored_barrier")
    if pg is None:
        return
    limit = timeout if timeout is not None else pg.timeout
    seconds = limit.total_seconds() if isinstance(limit, timedelta) else float(limit)
    backend = pg.any_backend()
    backend.settle()
    with own_limit(pg, "monitored_barrier"):
        if backend.monitored_barrier(timedelta(seconds=seconds), wait_all_ranks):
            return
        number = torch.tensor([pg.journal.sequence], device=backend.device)
        deadline = time.monotonic() + seconds
        if pg.rank() == 0:
            hear_all(pg, number, deadline, seconds, wait_all_ranks)
        else:
            report_to_first(pg, number, deadline)


def of_group(self: Group, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
    """Wait as ``monitored_barrier`` does: c10d's method of a group, which torch's own ``monitored_barrier`` calls."""
    monitored_barrier(self, timeout, wait_all_ranks)


setattr(Group, "monitored_barrier", of_group)  # noqa: B010  # core knows no c10d


@contextmanager
def own_limit(pg: Group, name: str) -> Iterator[None]:
    """Mark a call that keeps a limit of its own, so that the watchdog leaves it alone.

    It is not counted: ranks that miss a barrier are still in step with those that gave it up.
    """
    journal = pg.journal
    with journal.begin((journal, journal.sequence, name, None, None, None), limit=0.0):
        yield


def is_in_time(work: Work, deadline: float) -> bool:
    """Wait for a message, looking at it again and again; False when the time is over first."""
    began = time.monotonic()
    while not work.is_completed():
        if (now := time.monotonic()) >= deadline:
            return False
        nap(now - began)
    return work.exception() is None


def hear_all(pg: Group, number: torch.Tensor, deadline: float, seconds: float, wait_all_ranks: bool) -> None:
    """Hear from every other rank, then let them go; the part of rank 0."""
    if seconds <= 0 and pg.size() > 1:  # no rank had time to be late
        raise DistBackendError(f"[Rank {pg.ranks[0]}]: Rank {pg.ranks[0]} timed out in monitoredBarrier after 0 ms")
    backend, missing = pg.any_backend(), []
    heard = {rank: torch.zeros_like(number) for rank in range(1, pg.size())}
    works = {rank: backend.irecv(tensor, rank, BARRIER_TAG, None) for rank, tensor in heard.items()}
    for rank, tensor in heard.items():
        while is_in_time(works[rank], deadline):
            if int(tensor) >= int(number):
                break
            # a word that came too late for an earlier barrier
            works[rank] = backend.irecv(tensor, rank, BARRIER_TAG, None)
        else:
            missing.append(rank)
            if not wait_all_ranks:
                break
    if missing:
        for rank, work in works.items():
            if not work.is_completed():
                work._interrupt(f"monitored_barrier: rank {rank} did not come")
                is_in_time(work, time.monotonic() + 1.0)
        ranks = ", ".join(str(pg.ranks[rank]) for rank in missing)
        raise DistBackendError(
            f"[Rank {pg.ranks[0]}]: Rank{'s' * (len(missing) > 1)} {ranks} failed to pass monitoredBarrier in "
            f"{seconds * 1000:.0f} ms{whereabouts_of(pg, missing)}"
        )
    for rank in heard:
        backend.isend(number, rank, BARRIER_TAG)


def report_to_first(pg: Group, number: torch.Tensor, deadline: float) -> None:
    """Tell rank 0 that this rank is here, and wait for its word; the part of the others."""
    backend, answer = pg.any_backend(), torch.zeros_like(number)
    sent = backend.isend(number, 0, BARRIER_TAG)
    work = backend.irecv(answer, 0, BARRIER_TAG, None)
    while is_in_time(work, deadline):
        if int(answer) >= int(number):
            is_in_time(sent, deadline)
            return
        work = backend.irecv(answer, 0, BARRIER_TAG, None)
    if not work.is_completed():
        work._interrupt("monitored_barrier: rank 0 did not answer")
        is_in_time(work, time.monotonic() + 1.0)
    first = pg.ranks[0]
    raise DistBackendError(
        f"Rank {pg.ranks[pg.rank()]} successfully reached monitoredBarrier, but received errors while waiting for "
        f"send/recv from rank {first}. Please check rank {first} logs for faulty rank.{whereabouts_of(pg, [0])}"
    )


def whereabouts_of(pg: Group, ranks: list[int]) -> str:
    """Return where ranks of a group are, as they say themselves."""
    if not RUNNING:
        return ""
    asked = [pg.ranks[rank] for rank in ranks]
    answers = RUNNING[0].ask(asked, pg.group_name, 0.5)
    said = [
        f"{listed([rank])} is {report.place(answers[rank], pg.group_name)}"
        if rank in answers
        else f"{listed([rank])}: {RUNNING[0].channel.judge(rank)}"
        for rank in asked
    ]
    return f" ({'; '.join(said)})"


SKIPPED: dict[tuple[str, int], int] = {}  # how often each line with a breakpoint was passed


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float | None = 3600) -> None:
    """Open pdb on one rank while the others wait; every rank of the default group calls this.

    ``continue`` lets all go on, ``next`` and ``step`` then stop at this rank's next line, ``quit`` ends the job.

    Args:
        rank: which rank's terminal. Launchers forward what is typed to rank 0, unless told otherwise: Open MPI by
            ``mpirun --stdin RANK``; srun forwards to all; MPICH's mpirun to rank 0 alone.
        skip: pass the breakpoint so many times first.
        timeout_s: no call times out for so many seconds; None leaves the timeouts as they are.

    Raises:
        ValueError: no rank of the default group, or it is not initialised.
        bdb.BdbQuit: pdb was told to quit; on the rank it was opened on.
    """
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

    Every rank of the group calls this at the same step, for instance once an iteration: to write a checkpoint
    and leave before the time limit of the job (Slurm's ``--signal``). A program that calls it is no longer
    ended by SIGTERM.

    Args:
        group: the group that is to agree; None for the default one.
    """
    pg = world.resolve(group)
    mine = 0
    if RUNNING:
        signals = RUNNING[0].signals
        signals.is_asked = True
        mine = int(bool(signals.received))
    flag: Any = torch.tensor([mine], dtype=torch.int32, device=pg.any_backend().device)
    issue(ALL_REDUCE, pg, flag, flag, MAX)
    return bool(flag)
