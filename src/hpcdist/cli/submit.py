"""The command ``submit``: submits a script to the batch system of this machine: Slurm, PBS, Flux or LSF.

``python -m hpcdist submit --nodes 4 train.py``. Slurm's jobs are made from ``cpu.sbatch`` and ``gpu.sbatch``, the
others' from ``job.pbs``, ``job.flux`` and ``job.lsf``. Those say themselves how their batch system spells a size: a
line ``# submit: TEXT`` is written in place of the line before it, if the options that it names were given; a
part in ``<>`` is left out without its option.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys

from hpcdist.cli import slurm
from hpcdist.cli.job_arguments import described

# batch system -> the command that reads a job script from its standard input
SYSTEMS = {"slurm": ["sbatch"], "pbs": ["qsub"], "flux": ["flux", "batch"], "lsf": ["bsub"]}
# what the options are called in Slurm's templates
IN_SLURM = {
    "nodes": "nodes",
    "ranks": "ntasks-per-node",
    "threads": "cpus-per-task",
    "gpus": "gpus-per-node",
    "time": "time",
    "queue": "partition",
    "account": "account",
    "name": "job-name",
}
FORMULA = re.compile(r"^# submit: (.*)$")
OPTIONAL = re.compile(r"<([^<>]*)>")
TIME = re.compile(r"(\d+):([0-5]\d):([0-5]\d)")
RANKS = 4


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m hpcdist submit",
        usage="python -m hpcdist submit [OPTION...] SCRIPT [ARGUMENT...]",
        description=described(__doc__).partition("\n")[0],
        allow_abbrev=False,
    )
    made.add_argument("--system", choices=SYSTEMS, help="the batch system; needed only if there are several")
    made.add_argument("--dry-run", action="store_true", help="print the job script instead of submitting it")
    size = made.add_argument_group("size of the job")
    size.add_argument("--nodes", type=int, default=1, help="nodes (1)")
    size.add_argument("--ranks-per-node", dest="ranks", type=int, help=f"ranks ({RANKS}, or as many as GPUs)")
    size.add_argument("--threads-per-rank", dest="threads", type=int, default=1, help="cores of each rank (1)")
    size.add_argument("--gpus-per-node", dest="gpus", type=int, help="GPUs of each node (none)")
    size.add_argument("--time", default="00:30:00", help="time limit, HH:MM:SS (00:30:00)")
    size.add_argument("--queue", help="queue, in Slurm the partition")
    size.add_argument("--account", help="account, project or bank that pays for the job")
    size.add_argument("--name", default="hpcdist", help="the job's name (hpcdist)")
    site = made.add_argument_group("settings of the site")
    site.add_argument("--python", default=sys.executable, help=f"the Python that has hpcdist ({sys.executable})")
    site.add_argument("--modules", help="modules to load, separated by spaces")
    site.add_argument(
        "--mpi",
        help="srun's --mpi= (pmix, pmi2), for Flux its -o pmi=, for PBS and LSF whose mpiexec: openmpi, hydra, pals",
    )
    made.add_argument("script", help="the Python script that every rank runs")
    made.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return made


def checked(given: argparse.Namespace) -> dict[str, str]:
    """Return the options that were given and what follows from them, as they are written to a job script.

    Raises:
        ValueError: a value that no batch system can read.
    """
    given.ranks = given.ranks or given.gpus or RANKS
    for name in ("nodes", "ranks", "threads", "gpus"):
        if (value := getattr(given, name)) is not None and value < 1:
            raise ValueError(f"{name} is {value}; expected 1 or more")
    time = TIME.fullmatch(given.time)
    if time is None:
        raise ValueError(f"--time is {given.time!r}; expected HH:MM:SS")
    hours, minutes, seconds = map(int, time.groups())
    follows = {
        "cores": given.ranks * given.threads,
        "total": given.nodes * given.ranks,
        "minutes": hours * 60 + minutes + bool(seconds),
    }
    values = {name: str(value) for name in IN_SLURM if (value := getattr(given, name)) is not None}
    for name, value in values.items():
        slurm.check_value(name, value)
    return values | {name: str(value) for name, value in follows.items()}


def job_script(system: str, values: dict[str, str], settings: dict[str, str], script: list[str]) -> str:
    """Return the job script for a batch system.

    Args:
        system: a key of ``SYSTEMS``.
        values: of ``checked``.
        settings: settings of the site by the names of the template, such as ``python``; unknown ones are left out.
        script: the script and its arguments.
    """
    if system == "slurm":
        template = slurm.template("gpu.sbatch" if "gpus" in values else "cpu.sbatch")
        sizes = {IN_SLURM[name]: value for name, value in values.items() if name in IN_SLURM}
        return slurm.fill(template, sizes | settings, script)
    lines: list[str] = []
    for line in slurm.template(f"job.{system}").splitlines():
        formula = FORMULA.match(line)
        if formula is None:
            lines.append(line)
        elif (made := written(formula[1], values)) is not None:
            lines[-1] = made
    text = "\n".join(lines)
    settings = settings | {"ranks-per-node": values["ranks"], "threads-per-rank": values["threads"]}
    known = slurm.settings(text)
    return slurm.fill(text, {name: value for name, value in settings.items() if name in known}, script)


def written(formula: str, values: dict[str, str]) -> str | None:
    """Return what a formula stands for, or None if an option that it needs was not given."""
    whole = OPTIONAL.sub(lambda part: written(part[1], values) or "", formula)
    try:
        return whole.format_map(values)
    except KeyError:
        return None


def system_here() -> str:
    """Return the batch system whose command is on the PATH.

    Raises:
        ValueError: there is none, or more than one.
    """
    found = [name for name, command in SYSTEMS.items() if shutil.which(command[0])]
    if len(found) == 1:
        return found[0]
    commands = ", ".join(command[0] for command in SYSTEMS.values())
    if not found:
        raise ValueError(f"no batch system here (looked for {commands}); --system NAME --dry-run prints a job script")
    raise ValueError(f"several batch systems here ({', '.join(found)}); choose one with --system")


def run(args: list[str]) -> int:
    """Run ``python -m hpcdist submit``.

    Returns:
        0, or the exit status of the batch system's command, or 2 for wrong arguments.
    """
    made = parser()
    given = made.parse_args(args)
    settings = {name: value for name in ("python", "modules", "mpi") if (value := getattr(given, name)) is not None}
    try:
        values = checked(given)
        system = given.system or system_here()
        filled = job_script(system, values, settings, [given.script, *given.arguments])
    except ValueError as error:
        made.error(str(error))
    if given.dry_run:
        sys.stdout.write(filled)
        return 0
    return slurm.submit_job(SYSTEMS[system], filled)
