"""Programs that tests start: their environment, mpirun's command line, and an end for each of them."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
MPIRUN = BIN / "mpirun"
OWN = os.getpid()


def at_exit(function: Callable[..., object], *args: object, **kwargs: object) -> None:
    """Call a function when this process ends; not in a fork that runs the exit functions, as the doctor's does."""
    atexit.register(lambda: os.getpid() == OWN and function(*args, **kwargs))


@cache
def temporary_folder() -> Path:
    """Return the temporary folder of all programs that this process starts.

    Open MPI's mpirun has a folder in it, named after its process id; if it is killed, the folder stays, and another
    mpirun with that id cannot start. What is in /tmp itself may belong to a job that this process cannot see, such as
    one of a container's host. It is made only when a program is started: a rank of these tests may be killed.
    """
    made = Path(tempfile.mkdtemp(prefix="hpcdist-"))
    at_exit(shutil.rmtree, made, ignore_errors=True)
    return made


# variables by which a launcher tells a process its rank: a program that a test starts must not inherit them
SET_BY_LAUNCHERS = (
    *("OMPI_COMM", "PMI_", "PMIX_", "PRTE", "SLURM_", "HYDRA_", "MPI_LOCAL"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_"),
)


def library(mpirun: Path = MPIRUN) -> tuple[str, bool]:
    """Return which MPI an environment's mpirun belongs to (openmpi, mpich, or none), and whether it has ULFM."""
    if not mpirun.exists():
        return "none", False
    text = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60).stdout.lower()
    if not any(name in text for name in ("open mpi", "openrte", "prte")):  # OpenRTE: 4.1's, by the name mpirun.openmpi
        return "mpich", False
    return "openmpi", re.search(r"\(open( mpi|rte)\) 4\.", text) is None


LIBRARY, HAS_ULFM = library()


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a program: this process's, without an outer launcher's variables."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(SET_BY_LAUNCHERS)}
    return {
        **inherited,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(temporary_folder()),
        "HPCDIST_TEST_CHILD": "1",  # for tests/conftest.py: this program is no rank of the tests' own job
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")])  # hpcdist and tests
        ),
        **variables,
    }


def resident(pid: int | str = "self") -> int:
    """Return the bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_alive(pid: int) -> bool:
    """Tell whether a process still runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def start(command: list[object], folder: Path = ROOT, **variables: str) -> subprocess.Popen[str]:
    """Start a command in a process group of its own and return its process, whose output can be read."""
    return subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(**variables),
        start_new_session=True,
    )


def output(process: subprocess.Popen[str], timeout: float) -> tuple[str, str]:
    """Wait for a process of ``start`` and return what it wrote; past the time limit its whole group is killed."""
    try:
        return process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{process.args} took more than {timeout} s\n{out}\n{err}") from None


def run(
    command: list[object], timeout: float = 60, folder: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    process = start(command, folder, **variables)
    out, err = output(process, timeout)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def mpirun_command(
    ranks: int, program: list[object], options: list[str] | None = None, python: list[str] | None = None
) -> list[str]:
    """Return the command line that starts a Python program (a path and arguments, or -c and code) on some ranks.

    Args:
        ranks: how many.
        program: what Python runs.
        options: more for mpirun.
        python: the words that start Python; this environment's if None, ``tests.forked.python()`` if its start is not
            what the test is about.
    """
    tolerant = ["--oversubscribe"] if LIBRARY == "openmpi" else []  # more ranks than cores
    return [
        str(part)
        for part in [MPIRUN, *tolerant, *(options or []), "-n", ranks, *(python or [sys.executable]), *program]
    ]


def mpirun(
    ranks: int,
    program: list[object],
    timeout: float = 60,
    options: list[str] | None = None,
    python: list[str] | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a Python program on some ranks to its end; arguments as for ``mpirun_command``."""
    return run(mpirun_command(ranks, program, options, python), timeout, **variables)
