"""Slurm: whether there is one, and whether its srun offers the PMI that this MPI needs."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator

from hpcdist.cli.doctor.findings import NOTE, OK, PROBLEM, Facts, Finding
from hpcdist.cli.doctor.mpi_library import family, output_of

TITLE = "Slurm"


def look() -> Facts:
    """List srun's PMIs, and ping the controller."""
    srun = shutil.which("srun")
    facts: Facts = {
        "srun": srun,
        "job": os.environ.get("SLURM_JOB_ID"),
        "step": os.environ.get("SLURM_STEP_ID"),
        "nodes": os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST"),
        "tasks": os.environ.get("SLURM_STEP_NUM_TASKS"),
        "mpi": os.environ.get("SLURM_MPI_TYPE"),
        "pmis": None,
        "answers": None,
    }
    if srun is None:
        return facts
    _, said = output_of([srun, "--mpi=list"], 20)
    facts["pmis"] = sorted(set(re.findall(r"\b(pmix(?:_v\d+)?|pmi2|cray_shasta|none)\b", said)))
    scontrol = shutil.which("scontrol")
    if scontrol is not None:
        facts["answers"] = " is UP" in output_of([scontrol, "ping"], 20)[1]
    return facts


def judge(ranks: list[Facts]) -> Iterator[Finding]:
    """Report whether srun can start this MPI."""
    first = ranks[0]["slurm"]
    library = ranks[0]["mpi_library"].get("library")
    if first["srun"] is None and first["job"] is None:
        yield Finding(NOTE, "no Slurm here")
        return
    if first["job"] is None:
        yield Finding(NOTE, "not inside a job", "srun --mpi=pmix -n 4 python -m hpcdist doctor")
    else:
        where = f"step {first['job']}.{first['step']}" if first["step"] else f"job {first['job']}"
        how = f", started with --mpi={first['mpi']}" if first["mpi"] else ""
        yield Finding(OK, f"{where} on {first['nodes']}, {first['tasks'] or 'no'} tasks in the step{how}")
    if first["answers"]:
        yield Finding(OK, "Slurm answers")
    elif first["answers"] is False and first["job"] is not None:
        yield Finding(PROBLEM, "the Slurm controller does not answer", "scontrol ping")
    elif first["answers"] is False:
        yield Finding(NOTE, "Slurm is installed, but no controller answers")
    if library is None or not first["pmis"]:
        return
    name, needed, _ = family(library)
    if any(pmi.startswith(needed) for pmi in first["pmis"]):
        yield Finding(OK, f"srun has {needed}, which {name} needs: srun --mpi={needed}")
    elif first["answers"] or first["job"] is not None:
        yield Finding(
            PROBLEM,
            f"{name} needs {needed}, but this srun has only {', '.join(first['pmis'])}",
            'mpirun …   # inside the allocation; or without MPI: init_process_group(init_method="slurm://")',
        )
