"""This process's Slurm step: rank, size and hosts.

The step's variables take precedence over the job's, because a job of eight nodes may run a step on two of them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from hpcdist.core.printing import add_hint


class Step(NamedTuple):
    """One srun: this task's rank, the number of tasks, their hosts, and a unique identity."""

    rank: int
    size: int
    hosts: list[str]
    identity: str


# each value's variables; the first that is set is used
VARIABLES = {
    "rank": ("SLURM_PROCID",),
    "size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    "hosts": ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    "job": ("SLURM_JOB_ID", "SLURM_JOBID"),
    "step": ("SLURM_STEP_ID", "SLURM_STEPID"),
}


NUMBERS = r"\d+(?:-\d+)?"
NAME = rf"(?:[^\[\],\s]|\[{NUMBERS}(?:,{NUMBERS})*\])+"
MOST_HOSTS = 100_000


def _padded(ranges: str) -> list[str]:
    """Return the numbers of ``08-10,12``, with leading zeros."""
    ends = [(each.partition("-")[0], each.rpartition("-")[2]) for each in ranges.split(",")]
    return [f"{number:0{len(low)}}" for low, high in ends for number in range(int(low), int(high) + 1)]


def expand(names: str) -> list[str]:
    """Return the hosts of a list such as ``n[08-10,12],gpu1``, in order; leading zeros are kept.

    ``scontrol`` could do it too, but compute nodes and containers may lack it. ValueError for a malformed list, or one
    with more hosts than any cluster has.
    """
    unreadable = ValueError(
        f"cannot read the host list {names!r}; expected names and ranges such as 'n[08-10,12],gpu1'"
    )
    ends = re.findall(r"(\d+)-(\d+)", "".join(re.findall(r"\[.*?\]", names)))
    is_written_well = re.fullmatch(rf"(?:{NAME}(?:,{NAME})*)?", names)
    if not is_written_well or any(not 0 <= int(high) - int(low) < MOST_HOSTS for low, high in ends):
        raise unreadable
    hosts: list[str] = []
    for name in re.findall(NAME, names):
        # every other piece is the content of a pair of brackets
        choices = [_padded(piece) if index % 2 else [piece] for index, piece in enumerate(re.split(r"\[(.*?)\]", name))]
        if math.prod(map(len, choices)) > MOST_HOSTS:
            raise unreadable
        hosts += map("".join, itertools.product(*choices))
    return hosts


def first_host(environment: Mapping[str, str]) -> str | None:
    """Return the host of the step's rank 0, or None outside a step."""
    nodes = environment.get("SLURM_STEP_NODELIST")
    return next(iter(expand(nodes)), None) if nodes and "SLURM_PROCID" in environment else None


def step(environment: Mapping[str, str]) -> Step:
    """Return this process's step; ValueError if it was not started by srun."""
    found: dict[str, str] = {}
    for question, names in VARIABLES.items():
        value = next((environment[name] for name in names if environment.get(name)), None)
        if value is None:
            text = (
                f"Error initializing torch.distributed using slurm:// rendezvous: none of {', '.join(names)} is set; "
                "start every rank with srun"
            )
            raise ValueError(add_hint(text, "rendezvous"))
        found[question] = value
    attempt = environment.get("SLURM_RESTART_COUNT", "0")
    identity = f"{found['job']}.{found['step']}.{attempt}"
    return Step(int(found["rank"]), int(found["size"]), expand(found["hosts"]), identity)
