"""How does a test start a program of its own on several ranks, and never leave one behind?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
MPIRUN = BIN / "mpirun"


def is_open_mpi() -> bool:
    """Whether this environment's mpirun is Open MPI's."""
    text = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, timeout=60).stdout
    return "Open MPI" in text or "prrte" in text.lower() or "prterun" in text.lower()


def environment(**variables: str) -> dict[str, str]:
    """The environment of a program: this one, less what an outer mpirun said, and room for many ranks."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMPI_COMM", "PMI_", "PMIX_", "PRTE", "SLURM_", "HYDRA_", "MPI_LOCAL"))
    }
    return {
        **inherited,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        **variables,
    }


def run(
    command: list[str], timeout: float = 60, folder: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process group of its own; past the time limit all of it is killed."""
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(**variables),
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{command} took more than {timeout} s\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def mpirun(
    ranks: int, program: list[str], timeout: float = 60, options: list[str] | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python program (a path and arguments, or -c and code) on several ranks."""
    given = [*(["--oversubscribe"] if is_open_mpi() else []), *(options or [])]
    return run([MPIRUN, *given, "-n", str(ranks), sys.executable, *program], timeout, **variables)
