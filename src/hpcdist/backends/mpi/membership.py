"""Membership of an MPI job: the ranks that live go on without the dead (ULFM), and a rank may leave without all."""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI

from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.process import runtime, ulfm
from hpcdist.core.backend import Backend
from hpcdist.core.backend_parts import Membership


class MPIMembership(Membership):
    """Membership of the job, by a communicator of all its ranks; ``over`` makes the backend of another communicator."""

    def __init__(self, communicator: Communicator, over: Callable[[MPI.Intracomm], Backend]) -> None:
        self._communicator, self._over = communicator, over

    def survivors(self) -> Backend:
        """Make a communicator of the ranks that live (MPI_Comm_shrink)."""
        return self._over(self._communicator.survivors())

    def agree(self, flag: bool) -> bool:
        """Agree by MPI_Comm_agree."""
        return self._communicator.agree(flag)

    def leave_launcher(self) -> bool:
        """Leave Slurm's PMIx, if hpcdist started MPI and so ends it."""
        return bool(runtime.OWNED) and ulfm.leave_launcher(self._communicator.comm)

    def exit_barrier(self) -> Callable[[], bool] | None:
        """Begin the exit barrier."""
        return runtime.exit_barrier()

    def skip_finalize(self, seconds: float | None = None, ends_well: bool = False) -> None:
        """Leave without MPI_Finalize, which waits for all ranks, and under which a call of another thread crashes."""
        runtime.skip_finalize()
        if ends_well:
            ulfm.leave_pmix()
        if seconds is not None:
            runtime.limit_end(seconds)
