"""User-Level Failure Mitigation: whether this MPI survives a dead process, and which processes have died.

MPI_Comm_revoke, _shrink and _get_failed (``MPIX_`` before MPI 5) are there in Open MPI 5 under ``mpirun --with-ft
ulfm``, and under ``srun`` once its processes have left Slurm's PMIx. Elsewhere a dead process ends the job.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from errno import EBADF
from functools import cache
from stat import S_ISSOCK
from threading import Thread

from mpi4py import MPI

from hpcdist.core.waiting import wait_until

TRIALS = 100  # tests of a request on a revoked communicator (Open MPI raised in the third) or of this process only
NEWS_SECONDS = 1.0  # how long the news of a death may take to reach every rank
QUIET_SECONDS = 0.1  # without news of another death, after which it is likely that there is none
PMIX = "libpmix.so.2"
SLURM_JOBS = "slurm.pmix."  # what PMIX_NAMESPACE begins with under srun --mpi=pmix
# a host that has answered nothing for about 15 s is lost; a stopped process's kernel goes on answering
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 2}  # s, s, of an idle connection
UNANSWERED_MILLISECONDS = 15_000  # of one that sends
# in Linux's struct tcp_info: retransmissions, and probes of a closed window, since the last answer
UNANSWERED = slice(2, 4)
ALONE: list[str] = []  # the launcher that this process has left
UNFINISHED: list[object] = []  # what MPI may still write to
LAUNCH_HINT = "start the job with Open MPI 5 and `mpirun --with-ft ulfm` to survive a lost rank"


@cache
def is_tolerant() -> bool:
    """Tell whether this MPI survives a dead process.

    Found by trying on a communicator of this process only: without the launcher's consent Open MPI has the same
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


def settle(request: MPI.Request, memory: object) -> None:
    """End a request for which MPI has given an error, but which may still match (MPI_ERR_PROC_FAILED_PENDING).

    Its communicator is revoked. If it does not end, its memory is kept.
    """
    for _ in range(TRIALS):
        if not request:
            return
        with suppress(MPI.Exception):
            request.Test()
    UNFINISHED.append((request, memory))


def test_some(requests: Sequence[MPI.Request]) -> Sequence[int] | None:
    """Return the indices of the requests that have ended (MPI_Testsome).

    Where ULFM is on they are tested one by one: on a revoked communicator Open MPI 5.0.11's Testsome, Testany and
    Waitall free a request whose message is still on its way, and when that ends with an error Open MPI aborts the job
    ("Send error after request freed").
    """
    if is_tolerant():
        return [index for index, request in enumerate(requests) if request.Test()]
    return MPI.Request.Testsome(requests)


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


def are_dead(comm: MPI.Intracomm, ranks: Sequence[int]) -> bool:
    """Tell whether all of some ranks have died, waiting a moment for the news."""
    return wait_until(lambda: set(ranks) <= set(failed(comm)), NEWS_SECONDS)


def await_news(comm: MPI.Intracomm) -> None:
    """Return when no more deaths have become known for a moment.

    Those of several ranks, as of a node, are not learnt of at once, and Open MPI 5.0.11 crashes
    (``ompi_comm_revoke_local``) if it learns of one while MPI_Comm_shrink makes its communicator.
    """
    known, until = 0, time.monotonic() + QUIET_SECONDS
    while time.monotonic() < until:
        if len(found := failed(comm)) != known:
            known, until = len(found), time.monotonic() + QUIET_SECONDS
        time.sleep(0.005)


def end_creation() -> None:
    """Let communicators be made again after a call that makes one has failed.

    Open MPI 5.0.11 makes one communicator at a time, those of older ones first, and after a failure goes on to wait for
    the failed one: MPI_Comm_shrink of a younger communicator never ends. A complete creation resets that, and only
    MPI_COMM_WORLD is older than MPI_COMM_SELF; if it is that one which failed, nothing helps.
    """
    made, request = MPI.COMM_SELF.Idup()
    for _ in range(TRIALS):  # it ends in the sixth
        if request.Test():
            made.Free()
            return
    UNFINISHED.append((made, request))


def leave_launcher(comm: MPI.Intracomm) -> bool:
    """Leave Slurm's PMIx, whose plugin kills the step when a rank dies; every rank of the world calls.

    MPI asks PMIx for the address of a process that it meets for the first time, so each sends an empty message to every
    other one before. Afterwards it learns of a death from its broken connections: those are between nodes, so ranks of
    another node see it, and MPI tells the rest. MPI_Finalize would wait for PMIx for ever: the process ends without.

    Returns:
        Whether this was done; not under another launcher.
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
    limit_silence()
    leave_pmix()
    ALONE.append(namespace)
    return True


def leave_pmix() -> None:
    """Tell Open MPI's launcher that this process ends well, if there is one: else mpirun fails a job that has ended."""
    with suppress(OSError):  # another MPI does not load it
        ctypes.CDLL(PMIX, os.RTLD_NOW | os.RTLD_NOLOAD).PMIx_Finalize(None, 0)


def limit_silence() -> None:
    """Have the kernel end TCP connections of MPI and its launcher whose other host is silent: lost power, a lost link.

    They are those that are open when MPI starts, without a limit of their owner's.
    """
    found = []
    for each in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError), duplicate(each) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                if not is_untouched(connection):
                    continue
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in KEEP_ALIVE.items():
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
                found.append((each, os.fstat(each).st_ino))
    Thread(target=limit_silence_of_receivers, args=(found,), name="hpcdist silence", daemon=True).start()


def is_untouched(connection: socket.socket) -> bool:
    """Tell whether nobody has limited a connection's silence: another library's settings stay as they are."""
    return not connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and not connection.getsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
    )


def duplicate(number: int, inode: int | None = None) -> socket.socket:
    """Return a socket of this process by its descriptor, and raise OSError if it is not a socket, or another one."""
    status = os.fstat(number)
    if not S_ISSOCK(status.st_mode) or inode not in (None, status.st_ino):
        raise OSError(EBADF, os.strerror(EBADF))
    return socket.socket(fileno=os.dup(number))


def limit_silence_of_receivers(sockets: list[tuple[int, int]]) -> None:
    """Look once a second at which connections get no answer to what they send, and limit the time of those.

    A limit for all would end those too whose other side does not read for so long, though its kernel answers: a rank
    that computes, or is stopped, while others send to it (tcp(7), TCP_USER_TIMEOUT).

    Args:
        sockets: their descriptors and inodes; MPI may close one, and another file get its number.
    """
    limits = dict.fromkeys(sockets, 0)
    while True:
        for (number, inode), before in limits.items():
            with suppress(OSError), duplicate(number, inode) as connection:
                tried = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, UNANSWERED.stop)[UNANSWERED]
                limit = UNANSWERED_MILLISECONDS if max(tried) > 1 else 0
                if limit != before:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
                    limits[number, inode] = limit
        time.sleep(1)
