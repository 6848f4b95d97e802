"""User-Level Failure Mitigation: whether this MPI survives a dead process, and which processes have died.

Open MPI 5 has MPI_Comm_revoke, _shrink and _get_failed (``MPIX_`` before MPI 5) under ``mpirun --with-ft ulfm``, and
under ``srun`` once its processes have disconnected from Slurm's PMIx. Elsewhere a dead process ends the job.
"""

from __future__ import annotations

import ctypes
import os
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

from mpi4py import MPI

from hpcdist.backends.mpi.process import silence
from hpcdist.core.waiting import wait_until

TRIALS = 100  # tests of a request on a revoked communicator (Open MPI raised in the third), or one of this process
NEWS_SECONDS = 1.0  # seconds until every rank knows of a death
QUIET_SECONDS = 0.1  # seconds without news of another death, after which there is probably none
PMIX = "libpmix.so.2"
SLURM_JOBS = "slurm.pmix."  # the beginning of PMIX_NAMESPACE under srun --mpi=pmix
ALONE: list[str] = []  # the launcher from which this process has disconnected
UNFINISHED: list[object] = []  # memory to which MPI may still write
LAUNCH_HINT = "start the job with Open MPI 5 and `mpirun --with-ft ulfm` to survive a lost rank"


@cache
def is_tolerant() -> bool:
    """Tell whether this MPI survives a dead process.

    It is tried on a communicator of this process only: without the launcher's option Open MPI has the same functions,
    but revoking does not end a pending receive.
    """
    if not hasattr(MPI.Comm, "Revoke"):
        return False
    trial = MPI.COMM_SELF.Dup()
    trial.Set_errhandler(MPI.ERRORS_RETURN)
    request = trial.Irecv([bytearray(1), MPI.BYTE], 0, 0)
    try:
        trial.Revoke()
    except (MPI.Exception, NotImplementedError):
        return False
    finally:
        revoked = end(request)
        trial.Free()
    return revoked


def end(request: MPI.Request) -> bool:
    """End a pending receive; tell whether its communicator had been revoked."""
    try:
        for _ in range(TRIALS):  # MPI notices the revocation when it makes progress, not at once
            request.Test()
        request.Cancel()
        request.Wait()
    except MPI.Exception as error:
        return error.Get_error_class() == MPI.ERR_REVOKED
    return False


def settle(request: MPI.Request, memory: object) -> None:
    """End a request that has an error, but may still be matched (MPI_ERR_PROC_FAILED_PENDING).

    Its communicator is revoked. If it does not end, its memory is kept.
    """
    for _ in range(TRIALS):
        if not request:
            return
        with suppress(MPI.Exception):
            request.Test()
    UNFINISHED.append((request, memory))


AGREED = array("i", [1])  # MPI_Comm_iagree's flag, which is not read; it must outlive the request


def is_loss(error: MPI.Exception, comm: MPI.Intracomm) -> bool:
    """Tell whether MPI reports a dead process or a revoked communicator.

    Open MPI 5.0.11 returns MPI_ERR_OTHER from a revoked barrier of 4 to 6 ranks, so the communicator is checked too.
    """
    if not is_tolerant():
        return False
    known = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
    return error.Get_error_class() in known or comm.Is_revoked() or bool(failed(comm))


def failed(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks of a communicator that MPI knows to have died."""
    if not is_tolerant() or comm == MPI.COMM_NULL:
        return []
    MPI.COMM_SELF.Iprobe(0, 0)  # MPI learns of a death when it makes progress, which Get_failed does not do
    dead, everyone = comm.Get_failed(), comm.Get_group()
    try:
        return sorted(MPI.Group.Translate_ranks(dead, None, everyone))
    finally:
        dead.Free()
        everyone.Free()


def are_dead(comm: MPI.Intracomm, ranks: Sequence[int]) -> bool:
    """Tell whether all of some ranks have died, waiting a moment for the news."""
    return is_tolerant() and wait_until(lambda: set(ranks) <= set(failed(comm)), NEWS_SECONDS)


def await_news(comm: MPI.Intracomm) -> None:
    """Wait until no further death has become known for a moment.

    The deaths of several ranks, as of a node, become known one by one, and Open MPI 5.0.11 crashes
    (``ompi_comm_revoke_local``) if it learns of one while MPI_Comm_shrink makes its communicator.
    """
    known, until = 0, time.monotonic() + QUIET_SECONDS
    while time.monotonic() < until:
        if len(found := failed(comm)) != known:
            known, until = len(found), time.monotonic() + QUIET_SECONDS
        time.sleep(0.005)


def end_creation() -> None:
    """Make the creation of communicators work again after one has failed.

    Open MPI 5.0.11 makes one communicator at a time, from older parents first, and after a failure still waits for the
    failed one: MPI_Comm_shrink of a younger communicator never ends. A complete creation resets that, here from
    MPI_COMM_SELF; only MPI_COMM_WORLD is older, and if a creation from it failed, nothing helps.
    """
    made, request = MPI.COMM_SELF.Idup()
    for _ in range(TRIALS):  # it ends in the sixth
        if request.Test():
            made.Free()
            return
    UNFINISHED.append((made, request))


def leave_launcher(comm: MPI.Intracomm) -> bool:
    """Disconnect from Slurm's PMIx, whose plugin kills the step when a rank dies; every rank of the world calls.

    MPI asks PMIx for the address of a process at the first message to it, so each first sends an empty message to every
    other one. Afterwards MPI learns of a death from broken connections: these are between nodes, so ranks of another
    node see it, and MPI informs the rest. MPI_Finalize would wait for PMIx forever, so the process ends without it.
    Returns False, and does nothing, under another launcher.
    """
    namespace = os.environ.get("PMIX_NAMESPACE", "")
    if not namespace.startswith(SLURM_JOBS):
        return False
    peers = [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
    nothing = [bytearray(), MPI.BYTE]
    MPI.Request.Waitall(
        [*(comm.Irecv(nothing, each) for each in peers), *(comm.Isend(nothing, each) for each in peers)]
    )
    comm.Barrier()
    silence.limit({port for ports in comm.allgather(silence.PORTS) for port in ports})
    leave_pmix()
    ALONE.append(namespace)
    return True


def leave_pmix() -> None:
    """Report a normal end to Open MPI's launcher, if there is one: otherwise mpirun fails a job that has ended well."""
    with suppress(OSError):  # another MPI does not load it
        ctypes.CDLL(PMIX, os.RTLD_NOW | os.RTLD_NOLOAD).PMIx_Finalize(None, 0)
