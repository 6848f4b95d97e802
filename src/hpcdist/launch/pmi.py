"""Messages to the launcher's server by PMI, with which a rank leaves the job, or ends it before MPI has started.

Ranks wait in MPI_Init for one that exits before it, and neither Hydra (MPICH's mpirun) nor srun ends the job for it.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hpcdist.core.errors import run_hook
from hpcdist.core.printing import FORWARD_SECONDS, add_hint, write_to_stderr
from hpcdist.core.world import WORLD
from hpcdist.launch import arrival, environment

ABORT_STATUS = 1
ANSWER_SECONDS = 1.0  # seconds that the server may take to answer
PMIX_PROCESS_BYTES = 512  # more than a pmix_proc_t has: a name of 256 and a rank
LENIENT = ("srun", environment.HYDRA)  # launchers that do not end the job by themselves


def send_to_pmi(command: str) -> str:
    """Send the launcher's server a command of PMI 1 on the descriptor that it gave, and return the answer, if any."""
    with suppress(OSError, ValueError), socket.socket(fileno=os.dup(int(os.environ.get("PMI_FD", "")))) as server:
        server.settimeout(ANSWER_SECONDS)
        server.sendall(f"cmd={command}\n".encode())
        return server.recv(64).decode()
    return ""


def leave_hydra() -> bool:
    """Report a normal end of this process to Hydra, and return whether it has answered.

    If a process ends without it, Hydra kills the others of its node, and takes their statuses for 0 or for 9.
    """
    return environment.HYDRAS_OWN in os.environ and send_to_pmi("finalize").startswith("cmd=finalize_ack")


def abort_by_launcher() -> None:
    """Let Hydra or srun end the job, by PMI or PMIx; srun does so by itself only with ``--kill-on-bad-exit=1``."""
    if environment.HYDRAS_OWN in os.environ:
        send_to_pmi(f"abort exitcode={ABORT_STATUS}")
    elif "PMI_FD" in os.environ:  # srun --mpi=pmi2, which speaks PMI 1 too
        send_to_pmi("init pmi_version=1 pmi_subversion=1")
        send_to_pmi(f"abort exitcode={ABORT_STATUS}")
    elif "PMIX_NAMESPACE" in os.environ:
        with suppress(Exception):  # there is no MPI library, or none with PMIx
            from mpi4py import MPI  # noqa: F401  # loads the PMIx of this MPI

            loaded = re.findall(r"/\S*/libpmix\.so\S*", Path("/proc/self/maps").read_text())
            pmix = ctypes.CDLL([*loaded, "libpmix.so.2"][0])
            if pmix.PMIx_Init(ctypes.create_string_buffer(PMIX_PROCESS_BYTES), None, 0) == 0:
                pmix.PMIx_Abort(ABORT_STATUS, b"uncaught exception", None, 0)


def end_waiting_ranks() -> None:
    """Let the launcher end the job if MPI has not started in this rank, which exits: the others wait in MPI_Init.

    Not if this process has a world without MPI, perhaps of its own, or a rank has started it.
    """
    MPI, launch = sys.modules.get("mpi4py.MPI"), environment.detect()
    if WORLD.default is not None or (MPI is not None and MPI.Is_initialized()):
        return
    if launch is not None and launch.name in LENIENT and launch.size != 1 and arrival.is_rank():
        text = f"[{launch.place}] exits before MPI has started, and the job is aborted"
        write_to_stderr(add_hint(text, "not-all-have-come") + "\n")
        time.sleep(FORWARD_SECONDS)
        abort_by_launcher()


def abort_before_mpi(before: Callable[..., Any], owner: int, *exception: Any) -> None:
    """Call the previous hook for uncaught exceptions, and end the job if MPI has not started here."""
    run_hook(before, *exception)
    if os.getpid() == owner:  # a forked child is not a rank
        end_waiting_ranks()


if getattr(environment.detect(), "name", "") in LENIENT:
    sys.excepthook = partial(abort_before_mpi, sys.excepthook, os.getpid())
