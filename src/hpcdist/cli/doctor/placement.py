"""Placement of the ranks: nodes, cores, NUMA domains, and whether ranks share cores."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from hpcdist.cli.doctor.findings import ADVICE, NOTE, OK, Facts, Finding
from hpcdist.core.ranks import listed
from hpcdist.launch import environment

TITLE = "Where the ranks run"
NUMA = Path("/sys/devices/system/node")


def look() -> Facts:
    """Return this rank's node, cores, NUMA domains and threads."""
    cores = sorted(os.sched_getaffinity(0))
    launch = environment.detect()
    return {
        "node": environment.node_key(),
        "host": os.uname().nodename,
        "cores": cores,
        "cores_of_node": os.cpu_count(),
        "numa": numa_domains(set(cores)),
        "quota": cpu_quota(),
        "threads": torch.get_num_threads(),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "launcher_rank": launch.rank if launch else None,
        "launcher_size": launch.size if launch else None,
        "local_rank": environment.node_local_rank(),
    }


def numa_domains(cores: set[int]) -> list[int]:
    """Return the NUMA domains that have some of these cores."""
    lists = NUMA.glob("node[0-9]*/cpulist")
    return sorted(int(path.parent.name.removeprefix("node")) for path in lists if cores & cpus(path.read_text()))


def cpus(text: str) -> set[int]:
    """Return the numbers of a list such as ``0-3,8``."""
    pairs = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {cpu for first, last in pairs for cpu in range(int(first), int(last or first) + 1)}


def cpu_quota() -> float | None:
    """Return how many cores the control group allows, or None if it sets no limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) / int(period)


def judge(ranks: list[Facts]) -> list[Finding]:
    """Compare the world with the launcher's, and look for shared cores."""
    places = [facts["placement"] for facts in ranks]
    nodes: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        nodes.setdefault(place["node"], []).append(rank)
    counts = sorted({len(those) for those in nodes.values()})
    each = f"{counts[0]} each" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} each"
    findings = [Finding(OK, f"{plural(len(ranks), 'rank')} on {plural(len(nodes), 'node')}, {each}")]
    if len(counts) > 1:
        findings.append(Finding(NOTE, "the nodes have different numbers of ranks"))
    findings += judge_numbering(places)
    for node, those in nodes.items():
        findings += judge_node(node, {rank: places[rank] for rank in those})
    return merged(findings)


def judge_numbering(places: list[Facts]) -> list[Finding]:
    """Compare this world with what the launcher said."""
    sizes = {place["launcher_size"] for place in places} - {None}
    if sizes - {len(places)}:
        text = f"the launcher started {max(sizes)} ranks, this page covers {len(places)}"
        return [Finding(NOTE, text)]  # the chapter on MPI reports the cause
    wrong = [rank for rank, place in enumerate(places) if place["launcher_rank"] not in (None, rank)]
    if wrong:
        return [Finding(NOTE, f"MPI and the launcher number {listed(wrong)} differently; hpcdist uses MPI's numbers")]
    return [Finding(OK, "ranks and world size agree with the launcher")] if sizes else []


def judge_node(node: str, places: dict[int, Facts]) -> list[Finding]:
    """Check the cores of the ranks of one node."""
    sets = {rank: frozenset(place["cores"]) for rank, place in places.items()}
    together = frozenset().union(*sets.values())
    quota = max((place["quota"] or 0 for place in places.values()), default=0)
    room = min(len(together), quota or len(together))
    threads = max(place["threads"] for place in places.values())
    findings = []
    if len(places) > room:
        findings.append(
            Finding(
                ADVICE,
                f"{len(places)} ranks share {room:g} cores on {node}: results are right, but slow",
                f"mpirun -n {max(1, int(room))} …   # or: sbatch --ntasks-per-node={max(1, int(room))}",
            )
        )
    elif len(set(sets.values())) == 1 and len(places) > 1:
        findings.append(
            Finding(NOTE, f"ranks on {node} are not bound: each may use all {room:g} cores", "srun --cpu-bind=cores …")
        )
    elif len(places) > 1:
        overlapping = len(together) < sum(len(cores) for cores in sets.values())
        mend = "srun --cpu-bind=cores …   # or: mpirun --bind-to core"
        findings.append(
            Finding(ADVICE, f"bindings overlap on {node}", mend)
            if overlapping
            else Finding(OK, f"each rank on {node} has its own cores")
        )
    if len(places) * threads > max(room, len(places)):
        fitting = max(1, int(room // len(places)))
        findings.append(
            Finding(
                ADVICE,
                f"{len(places)} ranks of {threads} torch threads share {room:g} cores on {node}",
                f"export OMP_NUM_THREADS={fitting}",
            )
        )
    wide = [rank for rank, place in places.items() if len(place["numa"]) > 1]
    if wide and len(places) > 1:
        findings.append(Finding(NOTE, f"{listed(wide)} may move between NUMA domains", "srun --cpu-bind=ldoms …"))
    return findings


def plural(number: int, what: str) -> str:
    """Return a number of things as text."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def merged(findings: list[Finding]) -> list[Finding]:
    """Shorten the page of a large job: keep the first lines and all advice, count the others."""
    kept: list[Finding] = []
    left = 0
    for finding in findings:
        if finding.level in (OK, NOTE) and len(kept) >= 12:
            left += 1
        else:
            kept.append(finding)
    return [*kept, Finding(NOTE, f"and {left} more lines of this kind (--json has all)")] if left else kept
