"""Slurm: whether there is one, and whether its srun offers the PMI that this MPI needs."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

from hpcdist.backends.mpi.process import runtime
from hpcdist.cli.doctor.findings import NOTE, OK, PROBLEM, Facts, Finding
from hpcdist.cli.doctor.mpi_library import family, output_of
from hpcdist.core.errors import DistBackendError
from hpcdist.launch import environment

TITLE = "Slurm"


def look() -> Facts:
    srun, scontrol, launch = shutil.which("srun"), shutil.which("scontrol"), environment.detect()
    if launch is not None and launch.rank > 0:  # rank 0 asks Slurm for all
        srun = None
    config = output_of([scontrol, "show", "config"], 20)[1] if srun and scontrol else ""
    default = re.search(r"^MpiDefault\s*= (\S+)", config, re.MULTILINE)
    return {
        "library": library(),
        "srun": srun,
        "job": os.environ.get("SLURM_JOB_ID"),
        "step": os.environ.get("SLURM_STEP_ID"),
        "nodes": os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST"),
        "tasks": os.environ.get("SLURM_STEP_NUM_TASKS"),
        "mpi": os.environ.get("SLURM_MPI_TYPE"),
        "pmis": offered(srun) if srun else None,
        "default": default[1] if default else None,
        "answers": " is UP" in output_of([scontrol, "ping"], 20)[1] if srun and scontrol else None,
    }


def library() -> str:
    """Return the name of the MPI library; empty without one."""
    with suppress(DistBackendError):
        return runtime.short_name(runtime.load())
    return ""


def offered(srun: str) -> list[str]:
    said = output_of([srun, "--mpi=list"], 20)[1]
    return sorted(set(re.findall(r"\b(pmix(?:_v\d+)?|pmi2|cray_shasta|none)\b", said)))


def find_pmi(library: str, pmis: Sequence[str]) -> str | None:
    """Return the PMI of srun for a library; None if none fits, or there is no library."""
    needed = family(library)[1] if library else ()
    return next((pmi for pmi in needed if any(each.startswith(pmi) for each in pmis)), None)


def whole_allocation(ranks: int | None = None) -> list[str]:
    """Return the srun command that starts ranks on all of this allocation, by default as many as it has tasks.

    Empty outside an allocation, if srun cannot start this MPI, and in a rank that a launcher has started. A command at
    the shell of ``srun --pty`` or ``salloc`` has that step's variables and is not a rank.
    """
    launch = environment.detect()
    is_typed = sys.stdin is not None and sys.stdin.isatty() and os.environ.get("SLURM_TASK_PID") != str(os.getpid())
    is_rank = launch is not None and not (launch.name == "srun" and is_typed)
    job, srun, scontrol = os.environ.get("SLURM_JOB_ID"), shutil.which("srun"), shutil.which("scontrol")
    if job is None or srun is None or scontrol is None or is_rank:
        return []
    pmi = find_pmi(library(), offered(srun))
    sizes = dict(re.findall(r"\b(NumNodes|NumTasks)=(\d+)", output_of([scontrol, "show", "job", job], 20)[1]))
    if pmi is None or len(sizes) < 2:
        return []
    tasks = ranks or int(sizes["NumTasks"])
    overlap = ["--overlap"] if "SLURM_STEP_ID" in os.environ else []  # with the shell's own step
    cpus = os.environ.get("SLURM_CPUS_PER_TASK")  # srun does not inherit it from sbatch
    each = [f"--cpus-per-task={cpus}"] if cpus and ranks is None and not overlap else []
    return [srun, *overlap, *each, f"--nodes={min(int(sizes['NumNodes']), tasks)}", f"--ntasks={tasks}", f"--mpi={pmi}"]


def judge(seen: list[Facts]) -> Iterator[Finding]:
    first = seen[0]
    pmi = find_pmi(first["library"], first["pmis"] or ())
    if first["srun"] is None and first["job"] is None:
        yield Finding(NOTE, "no Slurm here")
        return
    if first["job"] is None:
        option = f"--mpi={pmi} " if pmi else ""
        yield Finding(NOTE, "not inside a job", f"srun {option}-n 4 python -m hpcdist doctor")
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
    if not first["library"] or not first["pmis"]:
        return
    name, needed, _ = family(first["library"])
    if pmi is not None and find_pmi(first["library"], [first["default"] or ""]) is not None:
        yield Finding(OK, f"srun's default, {first['default']}, is a PMI of {name}: no --mpi is needed")
    elif pmi is not None:
        yield Finding(OK, f"srun has {pmi}, which {name} needs: srun --mpi={pmi}")
    elif first["answers"] or first["job"] is not None:
        text = f"{name} needs {' or '.join(needed)}, but this srun has only {', '.join(first['pmis'])}"
        remedy = 'mpirun …   # inside the allocation; or without MPI: init_process_group(init_method="slurm://")'
        yield Finding(PROBLEM, text, remedy)
