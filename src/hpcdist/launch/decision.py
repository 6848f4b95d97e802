"""Decision which launcher started this process, for a new world: contradictions are errors.

It is apart from ``environment``, which commands use without torch: the errors are torch's classes.
"""

from __future__ import annotations

import os

from hpcdist.core.errors import DistBackendError, add_hint
from hpcdist.launch import environment


def find_launch() -> environment.Launch | None:
    """Return how this process was started, for a new world; ValueError if the variables contradict each other."""
    launch = environment.detect()
    if launch is not None and launch.conflict:
        text = f"who started this process is contradictory: {launch.conflict}"
        raise ValueError(add_hint(text, "launchers-disagree"))
    return launch


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
