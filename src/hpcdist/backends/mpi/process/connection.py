"""Connection of this process to its launcher, by which MPI_Init finds the other ranks: who has it, and is it open.

Its variables outlive it: in a shell that was a task of a Slurm step, in a process that a rank has started, or after the
program before, which has ended it. MPI_Init would then end this process, or end it at its exit.
"""

from __future__ import annotations

import os
import re
import socket
import stat

from hpcdist.core.errors import DistBackendError
from hpcdist.core.printing import add_hint
from hpcdist.launch.environment import UNKNOWN, Launch

PROCESS = "HPCDIST_MPI_PROCESS"  # a process of the job and its connection, for processes that it starts
NAMESPACE, DESCRIPTOR = "PMIX_NAMESPACE", "PMI_FD"  # of Open MPI's launchers, of those of MPICH and Intel MPI
PMIX = (NAMESPACE, "PMIX_RANK")  # MPICH 5 looks at both
PMI = (DESCRIPTOR, "PMI_RANK", "PMI_SIZE")
SERVER, FOLDER = "PMIX_SERVER_URI", "PMIX_SERVER_TMPDIR"  # its address, and its files


def identity() -> str:
    """Return the launcher's connection of this process, different in each start; empty without a launcher."""
    if namespace := os.environ.get(NAMESPACE):
        return namespace
    try:
        found = os.fstat(int(os.environ[DESCRIPTOR]))
    except (KeyError, ValueError, OSError):  # no launcher, or a child process, which does not inherit descriptors
        return ""
    return str(found.st_ino) if stat.S_ISSOCK(found.st_mode) else ""


def check_process() -> None:
    """Raise in a child of a process of the job: it has the variables of that process, which has started MPI.

    In Open MPI 5.0.11 MPI_Init would wait forever, and the job would not end; in MPICH it ends the child.
    """
    owner, _, joined = os.environ.get(PROCESS, "").partition(" ")
    own = identity()
    if owner in ("", str(os.getpid())) or (own != joined if own else DESCRIPTOR not in os.environ):
        return
    text = (
        f"process {os.getpid()} was started by process {owner} of an MPI job and is not one of its ranks. Start it "
        "with mpirun to give it a world of its own, or use no MPI in it: backend 'gloo' with init_method, or "
        "'loopback' with world_size=1"
    )
    raise DistBackendError(add_hint(text, "child-process"))


def is_open() -> bool:
    """Tell whether the launcher holds the other end of this process's connection by PMI (``DESCRIPTOR``)."""
    try:
        with socket.socket(fileno=os.dup(int(os.environ[DESCRIPTOR]))) as found:
            return bool(found.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except (ValueError, OSError):
        return False


def drop_closed(launch: Launch | None) -> None:
    """Unset the variables of a connection by PMI that is closed, if the launcher has started one process; else raise.

    MPICH 5.0.2 would end this process in MPI_Init; without these variables it makes a world of one.
    """
    if DESCRIPTOR not in os.environ or is_open():
        return
    if launch is not None and launch.starts_mpi and (launch.size > 1 or launch.size == UNKNOWN):
        text = (
            f"{launch.account}, and this process has no open connection to it (PMI_FD={os.environ[DESCRIPTOR]}), "
            "by which MPI_Init finds the other ranks: it would end this process. If a Python program started this one, "
            "it can keep the connection open: subprocess.run(…, close_fds=False). If an earlier program of this shell "
            "used MPI, it has closed the connection: start each program with srun or mpirun. "
            f"If no launcher started this process, unset {', '.join(PMI)} and "
            f"{launch.variable}, which are left from another job"
        )
        raise DistBackendError(add_hint(text, "closed-connection"))
    for name in PMI:
        os.environ.pop(name, None)


def drop_ended_server() -> None:
    """Unset PMIx's variables if its server has ended: Open MPI 5.0.11 would crash in MPI_Finalize, a world of one."""
    folder = os.environ.get(FOLDER)
    if folder is None or os.path.exists(folder):
        return
    for name, value in os.environ.items():
        if (found := re.search(r";tcp[46]://(.+):(\d+)$", value)) and name.startswith(SERVER):
            try:
                socket.create_connection((found[1].strip("[]"), int(found[2])), timeout=1).close()
            except OSError:
                continue
            return  # a container that does not show the folder
    for name in PMIX:
        os.environ.pop(name, None)
