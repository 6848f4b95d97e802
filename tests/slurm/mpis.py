"""The MPI that a Python has, and how srun starts it."""

from __future__ import annotations

import subprocess

ASK = "from mpi4py import MPI; print(MPI.Get_library_version())"
# srun's --mpi= for each MPI, and what its version begins with
MPIS = {"Open MPI": "pmix", "MPICH": "pmi2", "Intel(R) MPI": "pmi2"}


def mpi_of(*python: str) -> str | None:
    """Name the MPI that a Python has, of those above; the command may enter a container first."""
    asked = subprocess.run([*python, "-c", ASK], capture_output=True, text=True, timeout=60, check=False)
    return next((name for name in MPIS if asked.stdout.startswith(name)), None)
