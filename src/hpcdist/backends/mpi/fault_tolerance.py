"""Groups that lose a process, or wait for one that never comes: how their calls end, and how a smaller group is made.

User-Level Failure Mitigation (MPI_Comm_revoke, _shrink, _get_failed; ``MPIX_`` before MPI 5) answers where the MPI has
it: Open MPI 5 under ``mpirun --with-ft ulfm``. A revoked communicator raises in every rank's call on it, also the
blocked one. Elsewhere a dead process ends the job, and only a receive can be made to raise, by cancelling it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from hpcdist.backends.mpi import runtime
from hpcdist.core.errors import DistBackendError

if TYPE_CHECKING:
    from hpcdist.backends.mpi.backend import MPIBackend
    from hpcdist.core.table import Row

TRIALS = 100  # tests of a request on a revoked communicator; Open MPI raised in the third
NEWS_SECONDS = 1.0  # how long the news of a death may take to reach every rank
LAUNCH_HINT = "start the job with Open MPI 5 and `mpirun --with-ft ulfm` to survive a lost rank"


@cache
def is_tolerant() -> bool:
    """Tell whether this MPI survives a dead process.

    Found by trying on a communicator of this process alone: without the launcher's consent Open MPI has the same
    functions, but revoking does not end a pending receive.
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
        for _ in range(TRIALS):  # the revocation is noticed by MPI's progress, not at once
            request.Test()
        request.Cancel()
        request.Wait()
    except MPI.Exception as error:
        return error.Get_error_class() == MPI.ERR_REVOKED
    return False


AGREED = array("i", [1])  # MPI_Comm_iagree's flag, which nobody reads; it must outlive the request


def begin_agreement(comm: MPI.Intracomm) -> MPI.Request:
    """Begin what ends once every rank of a communicator has come here or died."""
    return comm.Iagree(AGREED)


def is_loss(error: MPI.Exception, comm: MPI.Intracomm) -> bool:
    """Tell whether MPI reports a dead process or a revoked communicator.

    Open MPI 5.0.11 gives MPI_ERR_OTHER to a barrier of 4 to 6 ranks that is revoked, so the communicator is asked too.
    """
    if not is_tolerant():
        return False
    known = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
    return error.Get_error_class() in known or comm.Is_revoked() or bool(failed(comm))


def failed(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks of a communicator that MPI knows to have died."""
    if not is_tolerant() or comm == MPI.COMM_NULL:
        return []
    MPI.COMM_SELF.Iprobe(0, 0)  # news of a death is taken in by MPI's progress, which Get_failed does not make
    dead, everyone = comm.Get_failed(), comm.Get_group()
    try:
        return sorted(MPI.Group.Translate_ranks(dead, None, everyone))
    finally:
        dead.Free()
        everyone.Free()


def failure(backend: MPIBackend, call: str, error: MPI.Exception) -> DistBackendError:
    """Return c10d's error for MPI's.

    Where a process has died the communicator is revoked first: ranks that wait for one that has just failed the same
    call would not learn of it otherwise.
    """
    where = f"{call} on rank {backend.rank} of {backend.size}"
    if not is_loss(error, backend.comm):
        return DistBackendError(f"{where} failed in MPI: {error.Get_error_string()} (class {error.Get_error_class()})")
    return lost(backend, call)


def lost(backend: MPIBackend, call: str) -> DistBackendError:
    """Revoke a group that has lost a rank or was given up, and return the error for a call on it."""
    comm = backend.comm
    revoke(backend)
    if backend.interruption is not None:
        return DistBackendError(backend.interruption)
    dead = failed(comm)
    deadline = time.monotonic() + NEWS_SECONDS / 4
    while not dead and time.monotonic() < deadline:  # the news of the death may come after that of the revocation
        time.sleep(0.005)
        dead = failed(comm)
    who = f"rank{'s' * (len(dead) > 1)} {', '.join(map(str, dead))} of the group died"
    return DistBackendError(
        f"{call} on rank {backend.rank} of {backend.size} failed: "
        f"{who if dead else 'another rank gave the group up (timeout or lost process)'}; "
        "the group takes no more calls, shrink_group makes one without the lost ranks"
    )


def interrupt(backend: MPIBackend, reason: str) -> bool:
    """Make the call that blocks on a communicator raise; called by another thread than the blocked one."""
    request = backend._receiving
    if request is not None:
        backend.interruption = reason
        with suppress(MPI.Exception):  # it may just have ended
            request.Cancel()
        return True
    if is_tolerant() and backend.comm != MPI.COMM_NULL:
        backend.interruption = reason
        revoke(backend)
        return True
    return False


def communicators(backend: MPIBackend) -> list[MPI.Comm]:
    """Return all communicators that a group's calls may block on: its own, the objects', the node's, the nodes'."""
    made = [backend.comm, backend.context, *backend.sharing.communicators]
    return [each for each in made if each is not None and each != MPI.COMM_NULL]


def revoke(backend: MPIBackend) -> None:
    """Make every call on a group's communicators raise, on all ranks (MPI_Comm_revoke)."""
    for comm in communicators(backend):
        comm.Revoke()


# the collectives that are checked after they have returned; `repeated` returns one
CHECKED = ("run", "all_gather_object", "gather_object", "broadcast_object", "scatter_object")


def check_results(backend: MPIBackend) -> None:
    """Have a backend's collectives raise if they return success although a rank has died, where this MPI is tolerant.

    Open MPI's coll/han does so (``runtime.leave_out_han``), and a program that started MPI by itself may use it. The
    check takes 0.6 µs. It sees what this rank's MPI knows, so that the news of a death may still come too late for it.
    """
    if not is_tolerant():
        return

    def check(call: str) -> None:
        comm = backend.comm
        dead = comm.Get_failed()
        count = dead.Get_size()
        dead.Free()
        if count or comm.Is_revoked():
            raise lost(backend, call)

    def checked(function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            result = function(*arguments)
            check(name or arguments[0].name)
            return result

        return run

    repeated = backend.repeated

    def repeated_and_checked(row: Row, *arguments: Any) -> Callable[..., None]:
        return checked(repeated(row, *arguments), row.name)

    for name in CHECKED:
        setattr(backend, name, checked(getattr(backend, name), "" if name == "run" else name))
    setattr(backend, "repeated", repeated_and_checked)  # noqa: B010  # mypy takes no method's place by assignment


def shrink(backend: MPIBackend, excluded: Sequence[int], name: str, aborts: bool) -> MPI.Intracomm:
    """Return a communicator without some ranks of a group; the others call.

    Dead ranks go by MPI_Comm_shrink, live ones by MPI_Comm_create_group (MPI 7.4.2), and where both kinds go, or the
    communicator was revoked because of a live one, the rest makes a new one by MPI_Comm_create_from_group (MPI 7.4.2).

    Args:
        backend: the group's.
        excluded: its ranks that do not take part.
        name: the same on all that call; keeps apart what is made at once.
        aborts: revoke the communicator first, so that calls under way on it raise.

    Raises:
        DistBackendError: MPI failed, as it does for dead ranks where it is not fault tolerant.
    """
    comm = backend.comm
    remaining = [rank for rank in range(comm.Get_size()) if rank not in set(excluded)]
    whole = comm.Get_group()
    members = whole.Incl(remaining)
    try:
        # a rank whose wait was ended may be here before the revocation by the rank that ended it; all must see alike
        if is_tolerant() and (aborts or backend.interruption is not None):
            revoke(backend)
        if not (is_tolerant() and comm.Is_revoked()):
            try:
                return comm.Create_group(members, runtime.group_tag(name))
            except MPI.Exception as error:
                if not is_loss(error, comm):
                    raise
        if are_dead(comm, excluded):
            made: MPI.Intracomm = comm.Shrink()  # type: ignore[assignment]  # the stub says Comm
            if made.Get_size() == len(remaining):
                return made
            raise DistBackendError(
                f"shrink_group: MPI counts ranks {failed(comm)} of the group as dead, more than the {list(excluded)} "
                "to exclude; call it again with all of them"
            )
        return MPI.Intracomm.Create_from_group(members, f"hpcdist-{name}", MPI.INFO_NULL, MPI.ERRORS_RETURN)
    except MPI.Exception as error:
        hint = "" if is_tolerant() else f"; this MPI cannot go on after a rank has died: {LAUNCH_HINT}"
        raise DistBackendError(
            f"shrink_group without ranks {list(excluded)} failed in MPI: {error.Get_error_string()}{hint}"
        ) from error
    finally:
        members.Free()
        whole.Free()


def are_dead(comm: MPI.Intracomm, ranks: Sequence[int]) -> bool:
    """Tell whether all of some ranks have died, waiting a moment for the news."""
    deadline = time.monotonic() + NEWS_SECONDS
    while not set(ranks) <= set(failed(comm)):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True
