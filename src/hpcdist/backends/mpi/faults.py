"""Ends of calls that block on an MPI communicator, and the ranks that MPI knows to have died (ULFM)."""

from __future__ import annotations

from contextlib import suppress

from mpi4py import MPI

from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.process import ulfm
from hpcdist.core.backend_parts import Faults
from hpcdist.core.unfinished import Unfinished


class MPIFaults(Faults):
    """Faults of one communicator, and of its messages under way."""

    def __init__(self, communicator: Communicator, unfinished: Unfinished) -> None:
        self._communicator, self._unfinished = communicator, unfinished

    def interrupt(self, reason: str, thread: int | None = None) -> bool:
        """Cancel a blocked receive, or revoke the communicator (ULFM); False if this MPI can do neither."""
        communicator = self._communicator
        if communicator.cancel(reason, thread):
            return True
        if not ulfm.is_tolerant() or communicator.comm == MPI.COMM_NULL:
            return False
        communicator.interruption = reason
        communicator.revoke()
        return True

    def end_receives(self, reason: str) -> None:
        """Cancel the receives that wait for a message; under a revocation they end by themselves."""
        if MPI.Is_finalized() or self._communicator.is_revoked():
            return
        self._communicator.cancel(reason)
        for work in list(self._unfinished):
            if not work.is_completed():
                with suppress(MPI.Exception):  # it has just ended
                    work._interrupt(reason)
                work.is_completed()

    def set_revoke_reason(self, reason: str) -> None:
        """Raise with this reason when the communicator is revoked (ULFM)."""
        if ulfm.is_tolerant():
            self._communicator.interruption = reason

    def revoke(self, reason: str) -> bool:
        """Revoke the group's communicators (ULFM); False if this MPI cannot."""
        self.set_revoke_reason(reason)
        self._communicator.revoke()
        return ulfm.is_tolerant()

    def is_revoked(self) -> bool:
        """Ask MPI whether the communicator is revoked."""
        return self._communicator.is_revoked()

    def interrupts_all(self) -> bool:
        """Tell whether an interrupted collective raises on all ranks: by MPI_Comm_revoke."""
        return ulfm.is_tolerant()

    def failed(self) -> list[int]:
        """Return the ranks that MPI knows to have died (ULFM's MPI_Comm_get_failed)."""
        return self._communicator.failed()

    def knows_death(self) -> bool:
        """Ask MPI for the dead of its world (ULFM)."""
        return bool(ulfm.failed(MPI.COMM_WORLD))
