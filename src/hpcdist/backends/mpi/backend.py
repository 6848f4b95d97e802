"""MPI backend: a process group on an MPI communicator.

It is composed of the communicator, its collectives, its messages and its object calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any, ClassVar

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.call_check import SPLIT_SAID, CallCheck
from hpcdist.backends.mpi.collectives import Collectives
from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.node.threshold_file import VARIABLE
from hpcdist.backends.mpi.node.thresholds import Thresholds
from hpcdist.backends.mpi.objects import MPIObjects
from hpcdist.backends.mpi.point_to_point import PointToPoint
from hpcdist.backends.mpi.process import intel_mpi, runtime, ulfm
from hpcdist.backends.mpi.progress import PROGRESS
from hpcdist.backends.mpi.retired import keep, retire
from hpcdist.backends.mpi.windows import MPIWindows
from hpcdist.core.backend import Backend, Bootstrap
from hpcdist.core.backend_parts import Membership
from hpcdist.core.call import Call, Run, Start
from hpcdist.core.call_log import CallLog
from hpcdist.core.errors import DistBackendError, end_all
from hpcdist.core.queue import Queue
from hpcdist.core.world import WORLD
from hpcdist.launch import environment

ACCELERATORS = ("cuda", "xpu")  # GPUs, whose tensors MPI takes directly or through host memory


class MPIBackend(Backend):
    """An MPI communicator of one process group, with MPI.ERRORS_RETURN; ``close`` frees it.

    The thresholds, and whether calls are checked, are the same on all ranks.
    """

    name: ClassVar[str] = "mpi"
    has_lists: ClassVar[bool] = True
    begins_at_once: ClassVar[bool] = True
    objects: MPIObjects
    windows: MPIWindows
    # each backend has its own parts
    run: Any = None
    check_reduction: Any = None
    send: Any = None
    recv: Any = None
    isend: Any = None
    irecv: Any = None
    between: Any = None
    compare: Any = None

    def __init__(self, comm: MPI.Intracomm, thresholds: Thresholds, checks_calls: bool = True) -> None:
        self.communicator = self.faults = Communicator(comm)
        self.comm, self.unfinished = comm, self.communicator.unfinished
        self.communicator.is_background = self._is_background
        self.rank, self.size = self.communicator.rank, self.communicator.size
        self.has_threads = bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)  # else MPI makes progress only inside calls
        self.collectives = Collectives(self.communicator, thresholds)
        self.point_to_point = PointToPoint(self.communicator)
        self.objects = MPIObjects(self.communicator)
        ways = self.collectives.carry_out, self.objects.stand_in
        self.objects.check = self.check = CallCheck(self.communicator, *ways, checks_calls)
        self.collectives.check = self.check if self.size > 1 else None
        self.membership = MPIMembership(self.communicator, self.over)
        self.windows = MPIWindows(self.communicator, self.objects)
        self._is_closed = False
        # the parts' own methods, without a hop
        self.run = self.collectives.run
        self.check_reduction = self.collectives.plans.of
        self.send, self.recv = self.point_to_point.send, self.point_to_point.recv
        self.isend, self.irecv = self.point_to_point.isend, self.point_to_point.irecv
        self.between = self.point_to_point.between
        self.compare = self.check.compare

    @classmethod
    def connect(cls, bootstrap: Bootstrap) -> MPIBackend:
        """Duplicate the user's communicator, or the world (MPI 7.4.2)."""
        given = bootstrap.comm if bootstrap.comm is not None else runtime.world(bootstrap.timeout)
        comm = runtime.duplicate(given, bootstrap.timeout)
        end_before_mpi()
        ulfm.is_tolerant()  # found out now, while no call is stuck
        return cls(comm, Thresholds.of_rank_0(comm), environment.is_on(environment.CHECK_CALLS))

    def settings(self) -> dict[str, str]:
        """Return this rank's settings for node-shared memory, and whether calls are checked."""
        checks = "1" if self.check.is_asked_for else "0"
        return {VARIABLE: os.environ.get(VARIABLE, "").strip().lower(), environment.CHECK_CALLS: checks}

    # -- calls ---------------------------------------------------------------------------------------

    def prepare(self, call: Call) -> tuple[Run, Start | None]:
        """Return a function that runs a collective again, by MPI's call alone if possible."""
        return self.collectives.prepare(call), None

    def worker(self) -> Queue:
        """Start the thread that carries out asynchronous calls."""
        intel_mpi.warn_once(MPI.get_vendor()[0])
        return super().worker()

    def _is_background(self) -> bool:
        return self.queue is not None and self.queue.running is not None

    def on(self, device_type: str) -> Backend:
        """Return the backend of a device type's tensors: of a GPU's directly or through host memory."""
        if device_type == "cpu":
            return self
        from hpcdist.backends.mpi.cuda import StagedBackend

        if device_type not in ACCELERATORS:
            raise ValueError(f"backend 'mpi' carries cpu, {', '.join(ACCELERATORS)}; got device {device_type}")
        return StagedBackend(self, self.collectives.is_shared, getattr(torch, device_type))

    def call_log(self) -> CallLog | None:
        return self.check.log

    def leave(self) -> None:
        """Compare the number of this rank's calls with the others'."""
        self.check.leave()

    def end_job(self, status: int) -> None:
        runtime.abort(status)

    # -- groups --------------------------------------------------------------------------------------

    def split(self, subgroups: Sequence[Sequence[int]], names: Sequence[str], timeout: timedelta) -> MPIBackend | None:
        self.settle()
        made = self.check.make(SPLIT_SAID, 0, lambda: self.communicator.split(subgroups))
        return None if made is None else self.over(made)

    def create_group(self, ranks: Sequence[int], name: str, timeout: timedelta) -> MPIBackend:
        self.settle()
        return self.over(self.communicator.create_group(ranks, name))

    def shrink(self, excluded: Sequence[int], name: str, aborts: bool) -> MPIBackend:
        return self.over(self.communicator.shrink(excluded, name, aborts))

    def over(self, comm: MPI.Intracomm) -> MPIBackend:
        """Return a backend like this one on another communicator."""
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        return type(self)(comm, self.collectives.plans.thresholds, self.check.is_wanted)

    def abort(self, reason: str) -> None:
        """End the queue, and receives that wait for a message; the communicator stays."""
        super().abort(reason)
        self.faults.end_receives(reason)
        self.communicator.receives.close()
        keep(self.unfinished)

    def close(self) -> None:
        """Free the objects that the group's calls have made, and later the communicator (MPI 7.4.3, ``retired``)."""
        steps: list[Callable[[], object]] = [super().close]
        if not self._is_closed and not MPI.Is_finalized():
            self._is_closed = True
            steps += [self.check.leave, self.check.close, lambda: self.windows.close(self.check.has_failed)]
            steps += [self.collectives.close, self.communicator.receives.close]
            if not self.communicator.is_revoked():  # freeing would wait for dead ranks
                steps.append(self.communicator.close_private)
            if not self.unfinished:  # else MPI is driven until they have ended
                steps.append(partial(PROGRESS.leave, self.communicator))
            steps.append(partial(retire, self.comm, self.unfinished))
        end_all(steps)


@cache
def end_before_mpi() -> None:
    """Let the groups over MPI end when MPI_Finalize begins, which deletes this attribute first (MPI 11.2.4).

    A program that started MPI may finalize it before its last call, which would end the process inside of MPI.
    """
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=end_groups), None)


def end_groups(*_: object) -> None:
    """End this rank's groups over MPI, so that their later calls, and waits for earlier ones, raise."""
    reason = "MPI was finalized by the program"
    for group in list(WORLD.groups.values()):
        ours = [each for each in group.backends.values() if isinstance(each, MPIBackend)]
        if ours:
            with suppress(Exception):  # no caller could catch it
                group.abort(reason, ends_calls=False)
        for work in [work for each in ours for work in each.pending()]:
            work._finish(DistBackendError(reason))


class MPIMembership(Membership):
    """Membership of the job, on a communicator of all its ranks; ``over`` makes a backend of another communicator."""

    def __init__(self, communicator: Communicator, over: Callable[[MPI.Intracomm], Backend]) -> None:
        self._communicator, self._over = communicator, over

    def survivors(self) -> Backend:
        """Make a communicator of the ranks that live (MPI_Comm_shrink).

        Not by MPI_Comm_ishrink, whose wait could be ended: in Open MPI 5.0.11 it returns MPI_ERR_INTERN. All ranks have
        the new communicator when this returns: Open MPI crashes if one is revoked while a rank is still making it.
        """
        ulfm.await_news(self._communicator.comm)
        try:
            made: MPI.Intracomm = self._communicator.comm.Shrink()  # type: ignore[assignment]  # the stub says Comm
        except MPI.Exception as error:
            raise DistBackendError(f"MPI_Comm_shrink failed: {error.Get_error_string()}") from error
        self.agree(True)
        return self._over(made)

    def agree(self, flag: bool) -> bool:
        """Return the conjunction of the living ranks' flags (MPI_Comm_agree); False if one has just died."""
        try:
            return bool(self._communicator.comm.Agree(int(flag)))
        except MPI.Exception:
            return False

    def leave_launcher(self) -> bool:
        """Leave Slurm's PMIx, if hpcdist started MPI and so ends it."""
        return bool(runtime.OWNED) and ulfm.leave_launcher(self._communicator.comm)

    def exit_barrier(self) -> Callable[[], bool] | None:
        return runtime.exit_barrier()

    def all_finalize(self, finalizes: bool) -> bool:
        """Return whether all ranks finalize MPI."""
        return runtime.all_finalize(finalizes)

    def skip_finalize(self, seconds: float | None = None, ends_well: bool = False) -> None:
        """Exit without MPI_Finalize, which waits for all ranks, and in which a call of another thread crashes."""
        runtime.skip_finalize()
        if ends_well:
            ulfm.leave_pmix()
        if seconds is not None:
            runtime.limit_end(seconds)
