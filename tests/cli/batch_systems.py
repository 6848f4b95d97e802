"""Stand-ins for the commands of PBS, LSF and Flux, which no package registry has: they read job scripts as those do.

``python batch_systems.py qsub …`` refuses options, directives and resources that the real command does not know, and
runs the job at once on this machine, with the variables that the batch system sets. Ranks are started by the real
mpiexec beside this Python. Options: qsub(1B) of OpenPBS, bsub of LSF 10.1, flux-batch(1) and flux-run(1) of 0.88.
"""

from __future__ import annotations

import argparse
import getopt
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

JOB = "1234"
HOSTS = os.environ.get("BATCH_HOSTS", socket.gethostname()).split(",")
# what a job finds in a PBS job, which gets no environment from its submission
SITE = ("HOME", "OMPI_", "PATH", "PRTE_", "PYTHONPATH")


def refuse(text: str, status: int = 2) -> NoReturn:
    """Refuse the job."""
    print(text, file=sys.stderr)
    sys.exit(status)


def host_file(counts: list[int]) -> str:
    """Write a file with a line for each rank; the hosts take turns."""
    lines = [HOSTS[node % len(HOSTS)] for node, count in enumerate(counts) for _ in range(count)]
    file = Path(f"hosts.{JOB}").absolute()
    file.write_text("".join(f"{line}\n" for line in lines))
    return str(file)


def start(script: str, output: str, folder: str, environment: dict[str, str], arguments: list[str]) -> None:
    """Run a job script to its end, and write its output to a file."""
    file = Path(f"script.{JOB}").absolute()
    file.write_text(script)
    file.chmod(0o755)
    with open(output, "w") as out:
        subprocess.run(
            [file, *arguments], cwd=folder, env=environment, stdout=out, stderr=out, check=False, timeout=100
        )


def qsub(args: list[str]) -> None:
    """Read the options of the command line and of the ``#PBS`` lines before the script's first command."""
    known = "a:A:c:C:e:fhIj:J:k:l:m:M:N:o:p:P:q:r:R:S:u:v:VW:Xz"
    try:
        given, rest = getopt.getopt(args, known)
        text = Path(rest[0]).read_text() if rest else sys.stdin.read()
        found: list[tuple[str, str]] = []
        for line in text.splitlines():
            if line.startswith("#PBS"):
                options, more = getopt.getopt(shlex.split(line[4:]), known)
                found += options
                if more:
                    refuse(f"qsub: directive error: {line}")
            elif line and not line.startswith("#"):
                break
    except getopt.GetoptError as error:
        refuse(f"qsub: {error}")
    counts, threads, variables = [1], "1", {}
    for option, value in [*found, *given]:
        if option == "-l":
            name, _, wanted = value.partition("=")
            if name == "select":
                number, *parts = wanted.split(":")
                chunk = dict(part.split("=") for part in parts)
                if unknown := chunk.keys() - {"ncpus", "mpiprocs", "ompthreads", "ngpus", "mem", "host"}:
                    refuse(f"qsub: Unknown resource {', '.join(unknown)}")
                if int(chunk["ncpus"]) < int(chunk["mpiprocs"]) * int(chunk["ompthreads"]):
                    refuse("qsub: fewer cores than threads")
                counts, threads = [int(chunk["mpiprocs"])] * int(number), chunk["ompthreads"]
            elif not (name == "walltime" and re.fullmatch(r"\d+:\d\d:\d\d", wanted)) and value != "place=scatter":
                refuse(f"qsub: Illegal attribute or resource value {value}")
        elif option == "-v":
            variables = dict(each.split("=", 1) for each in value.split(","))
    settings = dict(found) | dict(given)
    environment = {name: value for name, value in os.environ.items() if name.startswith(SITE)} | variables
    environment |= {"PBS_JOBID": f"{JOB}.server", "PBS_O_WORKDIR": os.getcwd(), "PBS_ENVIRONMENT": "PBS_BATCH"}
    environment |= {"PBS_NODEFILE": host_file(counts), "OMP_NUM_THREADS": threads}
    start(text, f"{settings.get('-N', 'STDIN')}.o{JOB}", "/", environment, [])
    print(f"{JOB}.server")


class Strict(argparse.ArgumentParser):
    """Takes whole options only."""

    def __init__(self, name: str, *options: str, flags: tuple[str, ...] = ()) -> None:
        super().__init__(prog=name, allow_abbrev=False)
        for option in options:
            self.add_argument(*option.split("|"), action="append" if option.startswith("-o|") else "store")
        for flag in flags:
            self.add_argument(*flag.split("|"), action="store_true")
        self.add_argument("command", nargs=argparse.REMAINDER)


def bsub(args: list[str]) -> None:
    """Read the options of the command line and of the ``#BSUB`` lines of a script on standard input."""
    one_dash = ("-J", "-n", "-nnodes", "-R", "-W", "-q", "-P", "-G", "-o", "-e", "-gpu", "-w", "-app", "-cwd", "-M")
    text = sys.stdin.read()
    lines = [line[5:] for line in text.splitlines() if line.startswith("#BSUB")]
    given = Strict("bsub", *one_dash, flags=("-x", "-K")).parse_args([*args, *shlex.split("\n".join(lines))])
    place = re.fullmatch(r"span\[ptile=(\d+)\] affinity\[core\((\d+)\)\]", given.R)
    if place is None or int(given.n) % int(place[1]):
        refuse(f"Bad resource requirement syntax: {given.R}. Job not submitted.", 255)
    if not re.fullmatch(r"(\d+:)?\d+", given.W):
        refuse(f"{given.W}: Bad RUNLIMIT. Job not submitted.", 255)
    if given.gpu is not None and not re.fullmatch(
        r"num=\d+(/host|/task)?(:mode=(shared|exclusive_process))?", given.gpu
    ):
        refuse(f"{given.gpu}: Bad GPU requirement. Job not submitted.", 255)
    counts = [int(place[1])] * (int(given.n) // int(place[1]))
    environment = os.environ | {"LSB_JOBID": JOB, "LSB_DJOB_NUMPROC": given.n, "LSB_DJOB_HOSTFILE": host_file(counts)}
    environment["LSB_MCPU_HOSTS"] = " ".join(f"{HOSTS[i % len(HOSTS)]} {count}" for i, count in enumerate(counts))
    start(text, given.o.replace("%J", JOB), os.getcwd(), environment, [])
    print(f"Job <{JOB}> is submitted to default queue <normal>.")


def flux(args: list[str]) -> None:
    """Do what one of Flux's commands does."""
    command, *rest = args
    common = ("-N|--nodes", "-t|--time-limit", "-q|--queue", "-B|--bank", "--job-name", "--output", "--error")
    if command == "batch":
        made = Strict("flux batch", *common, "-n|--nslots", "-c|--cores-per-slot", flags=("-x|--exclusive",))
        file = made.parse_args(rest).command
        text = Path(file[0]).read_text() if file else sys.stdin.read()
        # RFC 36: any characters but letters and digits may come before the tag
        words = [re.match(r"^[^\w]*(?:flux|FLUX):(.*)$", line) for line in text.splitlines()]
        given = made.parse_args([*shlex.split(" ".join(each[1] for each in words if each)), *rest])
        if not re.fullmatch(r"\d+(\.\d+)?[smhd]?", given.time_limit):
            refuse(f"flux batch: invalid Flux standard duration {given.time_limit}", 1)
        environment = os.environ | {"FLUX_URI": "local:///none", "BATCH_NODES": given.nodes}
        start(text, given.output.replace("{{id}}", JOB), os.getcwd(), environment, given.command[1:])
        print(f"ƒ{JOB}")
    elif command == "run":
        made = Strict("flux run", *common, "--tasks-per-node", "-o|--setopt", flags=("-x|--exclusive",))
        given = made.parse_args(rest)
        names = ("cpu-affinity", "gpu-affinity", "pmi", "exit-on-error")
        if unknown := [each for each in given.setopt if each.split("=")[0] not in names]:
            refuse(f"flux-shell: unknown shell option {unknown}")
        ranks = int(given.nodes) * int(given.tasks_per_node)
        task = "export FLUX_TASK_RANK=${PMI_RANK:-$OMPI_COMM_WORLD_RANK} "
        task += f"FLUX_JOB_SIZE={ranks}; "
        task += 'export FLUX_TASK_LOCAL_ID=$FLUX_TASK_RANK; unset MPI_LOCALRANKID; exec "$@"'
        mpiexec = str(Path(sys.executable).parent / "mpiexec")
        whole = [mpiexec, "-n", str(ranks), "bash", "-c", task, "task", *given.command]
        sys.exit(subprocess.run(whole, check=False, timeout=100).returncode)
    elif args == ["resource", "list", "-n", "-o", "{nnodes}"]:
        print(os.environ["BATCH_NODES"])
    elif args == ["getattr", "jobid"]:
        print(f"ƒ{JOB}")
    else:
        refuse(f"flux: unknown command {args}", 1)


if __name__ == "__main__":
    {"qsub": qsub, "bsub": bsub, "flux": flux}[sys.argv[1]](sys.argv[2:])
