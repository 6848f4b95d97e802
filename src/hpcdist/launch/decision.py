"""Decision which launcher started this process, for a new world: contradictions are errors.

It is apart from ``environment``, which commands use without torch: the errors are torch's classes.
"""

from __future__ import annotations

import os
import warnings

from torch.distributed import default_pg_timeout

from hpcdist.core import registry
from hpcdist.core.backend import Bootstrap
from hpcdist.core.errors import DistBackendError
from hpcdist.core.printing import add_hint
from hpcdist.launch import environment

SIZE: list[int] = []  # MPI's, after the first question


def find_launch(size: int = environment.UNKNOWN) -> environment.Launch | None:
    """Return how this process was started, for a new world; ValueError if the variables contradict each other.

    ``size`` is MPI's, for a launcher that sets no variable of it.
    """
    launch = environment.detect(size=size)
    if launch is not None and launch.conflict:
        text = f"who started this process is contradictory: {launch.conflict}"
        raise ValueError(add_hint(text, "launchers-disagree"))
    return launch


def with_size(launch: environment.Launch | None) -> environment.Launch | None:
    """Return a launch with MPI's size if no variable of the launcher says it; then every rank makes the first call."""
    if launch is None or launch.size != environment.UNKNOWN:
        return launch
    if not SIZE:
        carrier = registry.connect("mpi", Bootstrap(-1, -1, default_pg_timeout))
        carrier.close()
        SIZE.append(carrier.size)
    return find_launch(SIZE[0])


def check_size(launch: environment.Launch | None, size: int) -> None:
    """Raise if RANK and WORLD_SIZE contradict MPI's size, for a launcher that sets no variable of it."""
    if launch is None or launch.size != environment.UNKNOWN:
        return
    counted = find_launch(size)
    if counted is not None and counted.size != size:  # of processes that the launcher's only rank has started
        text = (
            f"who started this process is contradictory: {launch.name} started {size} rank, RANK and WORLD_SIZE say "
            f"{counted.place}. Unset RANK and WORLD_SIZE, or choose them: {environment.RANKS_FROM}=env"
        )
        raise ValueError(add_hint(text, "launchers-disagree"))


TASKS = "SLURM_NTASKS"  # LSF's LSB_DJOB_NUMPROC and Torque's PBS_NP count cores, also those of one process's threads


def warn_if_alone() -> None:
    """Warn if this process, which no launcher has started, is one in a job of several tasks."""
    if (count := environment.integer(os.environ, TASKS) or 0) > 1:
        text = (
            f"no launcher started this process, and it is a world of its own in a job of {count} tasks "
            f"({TASKS}): start the ranks with srun or mpiexec, or give world_size=1"
        )
        warnings.warn(add_hint(text, "no-launcher"), stacklevel=4)


def check_mpi(launch: environment.Launch | None, size: int = -1) -> None:
    """Raise if "mpi" would make a world of one in each of several processes without an MPI launcher.

    ``size`` is the caller's number of processes, if it gave one.
    """
    if launch is not None and launch.starts_mpi:
        return
    who, others = (launch.name, launch.size) if launch is not None else ("no MPI launcher", size)
    if others <= 1 and not (launch is None and environment.names_others()):
        return
    count = max(others, environment.integer(os.environ, "WORLD_SIZE") or 0)
    text = (
        f"backend 'mpi': {who} started this process, one of {count}, and MPI would make a world of one of each. Start "
        "them with mpirun or srun, or use backend 'gloo'; where an MPI launcher's variables are set too, "
        f"{environment.RANKS_FROM}=mpi chooses them"
    )
    raise DistBackendError(add_hint(text, "no-mpi-launcher"))
