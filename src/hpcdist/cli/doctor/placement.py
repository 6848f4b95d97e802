"""Placement of the ranks: nodes, cores, NUMA domains; whether ranks share cores or are far from their GPU or card."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import torch

from hpcdist.cli.doctor import devices
from hpcdist.cli.doctor.findings import ADVICE, NOTE, OK, Facts, Finding
from hpcdist.core.ranks import format_count, format_ranks, ranks_by_value
from hpcdist.launch import environment, topology

TITLE = "Where the ranks run"
CARDS = ("UCX_NET_DEVICES", "NCCL_IB_HCA")  # the variables that choose network cards
MOST_LINES = 12  # beside advice
CRAY_CARDS = "MPICH_OFI_NIC_POLICY"


def look() -> Facts:
    torch.ones(1 << 20).sum()  # starts OpenMP's threads, which OMP_PROC_BIND binds, each to a place of its own
    threads = [int(thread) for thread in os.listdir("/proc/self/task")]
    cores = sorted(set().union(*map(os.sched_getaffinity, threads)))
    node, launch = topology.read(), environment.detect()
    gpus = [topology.gpu_domain(address(index), node) for index in range(torch.cuda.device_count())]
    return {
        "node": environment.node_key(),
        "host": os.uname().nodename,
        "cores": cores,
        "main": sorted(os.sched_getaffinity(0)),  # of the main thread
        "physical": sorted({min(topology.siblings(cpu)) for cpu in cores}),
        "cores_of_node": os.cpu_count(),
        "quota": cpu_quota(),
        "threads": torch.get_num_threads(),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "launcher": launch.name if launch else None,
        "launcher_rank": launch.rank if launch else None,
        "launcher_size": (launch.size or None) if launch else None,
        "local_rank": environment.node_local_rank(),
        "chosen": {name: os.environ[name] for name in (*CARDS, CRAY_CARDS, "OMP_PROC_BIND") if name in os.environ},
        "visible": "ROCR_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES",
        **in_domains(node, cores, gpus, gpus[devices.own()] if gpus else None),
    }


def address(index: int) -> str:
    about: Any = torch.cuda.get_device_properties(index)  # the stub lacks these
    return f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"


def in_domains(node: topology.Topology, cores: list[int], gpus: list[int | None], gpu: int | None) -> Facts:
    """Return a rank's place on its node: its logical CPUs and their NUMA domains, and those of its GPUs."""
    domains = node.domains(cores)
    here = domains if gpu is None else [gpu]
    return {
        "numa": domains,
        "sockets": sorted({node.sockets[domain] for domain in domains}),
        "available": node.domains(node.usable),
        "room": node.room(),
        "gpus": gpus,
        "gpu": gpu,
        "cards": {name: node.distance(here, domain) for name, domain in node.cards.items()},
    }


def cpu_quota() -> float | None:
    """Return the number of cores that the job's control group, or a parent of it, allows, or None without a limit."""
    said = [topology.text(each / "cpu.max").split() for each in topology.control_groups()]
    return min((int(each[0]) / int(each[1]) for each in said if len(each) == 2 and each[0] != "max"), default=None)


def judge(places: list[Facts]) -> list[Finding]:
    nodes = ranks_by_value(place["node"] for place in places)
    counts = sorted({len(those) for those in nodes.values()})
    each = f"{counts[0]} each" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} each"
    findings = [Finding(OK, f"{format_count(len(places), 'rank')} on {format_count(len(nodes), 'node')}, {each}")]
    if len(counts) > 1:
        findings.append(Finding(NOTE, "the nodes have different numbers of ranks"))
    findings += judge_numbering(places)
    for node, those in nodes.items():
        findings += judge_node(node, {rank: places[rank] for rank in those})
    return merge(findings)


def judge_numbering(places: list[Facts]) -> list[Finding]:
    sizes = {place["launcher_size"] for place in places} - {None}
    if sizes - {len(places)}:
        text = f"the launcher started {max(sizes)} ranks, this page covers {len(places)}"
        return [Finding(NOTE, text)]  # the chapter on MPI reports the cause
    wrong = [rank for rank, place in enumerate(places) if place["launcher_rank"] not in (None, rank)]
    if wrong:
        return [
            Finding(NOTE, f"MPI and the launcher number {format_ranks(wrong)} differently; hpcdist uses MPI's numbers")
        ]
    return [Finding(OK, "ranks and world size agree with the launcher")] if sizes else []


def judge_node(node: str, places: dict[int, Facts]) -> Iterator[Finding]:
    some = next(iter(places.values()))
    available = sorted(set().union(*(place["available"] for place in places.values())))
    fix = topology.bind(some["launcher"], len(places), some["room"])
    yield from judge_cores(node, places, fix)
    yield from judge_domains(node, places, available, fix)
    yield from judge_gpus(node, places, fix)
    yield from judge_cards(node, places)


def judge_cores(node: str, places: dict[int, Facts], fix: str) -> Iterator[Finding]:
    sets = {rank: frozenset(place["cores"]) for rank, place in places.items()}
    together, different = frozenset().union(*sets.values()), set(sets.values())
    quota = max((place["quota"] or 0 for place in places.values()), default=0)
    room = min(len(together), quota or len(together))
    threads = max(place["threads"] for place in places.values())
    some = next(iter(places.values()))
    if len(places) > room:
        text, remedy = f"{len(places)} ranks share {room:g} cores on {node}", f"mpirun -n {max(1, int(room))} …"
        if len(together) < len(places) <= min(some["room"].cpus, quota or some["room"].cpus):
            text, remedy = f"{text}, and the job may use {some['room'].cpus}", fix
        else:
            remedy += f"   # or: sbatch --ntasks-per-node={max(1, int(room))}"
        yield Finding(ADVICE, f"{text}: results are right, but slow", remedy)
    elif len(different) == 1 and len(places) > 1:
        wide = len(some["numa"])
        text = f"ranks on {node} are not bound: each may use all {room:g} cores"
        yield Finding(ADVICE, f"{text}, of {wide} NUMA domains", fix) if wide > 1 else Finding(NOTE, text, fix)
    elif len(places) > 1:
        physical = [set(place["physical"]) for place in places.values()]
        if sum(map(len, different)) > len(together):
            yield Finding(ADVICE, f"bindings overlap on {node}", fix)
        elif len(different) < len(places):
            yield judge_shared(node, places, sets, fix)
        elif sum(map(len, physical)) > len(set().union(*physical)):
            text = f"ranks on {node} run on hardware threads of the same cores"
            yield Finding(ADVICE, text, fix.replace("srun", "srun --threads-per-core=1"))
        else:
            yield Finding(OK, f"each rank on {node} has its own cores")
    mains = {tuple(place["main"]) for place in places.values()}
    if len(places) > 1 and len(mains) == 1 and len(min(mains)) == 1 < len(together):
        value, core = some["chosen"].get("OMP_PROC_BIND"), some["main"][0]
        text = f"OMP_PROC_BIND={value} binds the main threads of all ranks on {node} to core {core}"
        yield Finding(ADVICE, text, f"unset OMP_PROC_BIND   # or bind the ranks first: {fix}")
    if len(places) * threads > max(room, len(places)):
        text = f"{len(places)} ranks of {threads} torch threads share {room:g} cores on {node}"
        yield Finding(ADVICE, text, f"export OMP_NUM_THREADS={max(1, int(room // len(places)))}")


def judge_shared(node: str, places: dict[int, Facts], sets: dict[int, frozenset[int]], fix: str) -> Finding:
    """Check ranks that are bound to the same cores: there may be enough cores or not."""
    for cores in set(sets.values()):
        those = [rank for rank in places if sets[rank] == cores]
        if sum(places[rank]["threads"] for rank in those) > len(cores):
            return Finding(
                ADVICE, f"{format_ranks(those)} on {node} are bound to the same {format_count(len(cores), 'core')}", fix
            )
    return Finding(OK, f"ranks on {node} that are bound to the same cores have one for each of their threads")


def judge_domains(node: str, places: dict[int, Facts], available: list[int], fix: str) -> Iterator[Finding]:
    """Check the NUMA domains of one node's ranks: a rank should run in one, and no domain should be idle."""
    used = sorted(set().union(*(place["numa"] for place in places.values())))
    idle = sorted(set(available) - set(used))
    if idle and len(places) > max(1, len(used)):
        text = f"all {len(places)} ranks on {node} run in NUMA {domains(used)}; the job may use {domains(idle)} too"
        yield Finding(ADVICE, text, fix)
    if len({tuple(place["cores"]) for place in places.values()}) == 1:
        return  # unbound ranks are reported already
    share = -(-len(available) // len(places))
    wide = [rank for rank, place in places.items() if len(place["numa"]) > share]
    across = [rank for rank in wide if len(places[rank]["sockets"]) > 1 and places[rank]["threads"] > 1]
    if across:
        yield Finding(ADVICE, f"threads of {format_ranks(across)} on {node} run in several sockets", fix)
    elif wide:
        yield Finding(NOTE, f"{format_ranks(wide)} may move between NUMA domains", fix)


def judge_gpus(node: str, places: dict[int, Facts], fix: str) -> Iterator[Finding]:
    """Check whether each rank's cores are in the NUMA domain of its GPU; if not, find an order that fits."""
    far = [rank for rank, place in places.items() if place["gpu"] is not None and place["gpu"] not in place["numa"]]
    if not far:
        return
    some = places[far[0]]
    text = (
        f"{format_ranks(far)} on {node}: the GPU is in another NUMA domain than the cores, for rank {far[0]} in "
        f"{domains([some['gpu']])}, and the cores in {domains(some['numa'])}"
    )
    order: list[int] = []  # an order of the GPUs, each near to its rank
    for place in places.values():
        near = (index for index, gpu in enumerate(some["gpus"]) if gpu in place["numa"] and index not in order)
        order += [index for index in [next(near, None)] if index is not None]
    if some["launcher"] in (None, "srun"):
        numbers = ",".join(str(place["gpu"]) for place in places.values())
        remedy = f"srun --cpu-bind=map_ldom:{numbers} …   # or: --gpus-per-task=1 --gpu-bind=closest"
    elif len(order) == len(places):
        remedy = f"export {some['visible']}={','.join(map(str, order))}"
    else:
        remedy = f"{fix}   # then look again: the order of the GPUs follows from that of the cores"
    yield Finding(ADVICE, text, remedy)


def judge_cards(node: str, places: dict[int, Facts]) -> Iterator[Finding]:
    """Check whether a variable excludes the network card nearest to a rank's GPU, or else to its cores."""
    for variable in CARDS:
        far: dict[int, str] = {}  # rank -> its nearest card
        for rank, place in places.items():
            kept = [place["cards"][name] for name in chosen(place["chosen"].get(variable, ""), place["cards"])]
            nearest = min(place["cards"], key=place["cards"].__getitem__, default="")
            if kept and min(kept) > place["cards"][nearest]:
                far[rank] = nearest
        if far:
            rank, card = next(iter(far.items()))
            value = places[rank]["chosen"][variable]
            text = f"{variable}={value} keeps {format_ranks(list(far))} on {node} from nearer cards"
            remedy = f"unset {variable}   # the nearest is chosen by itself; for rank {rank} it is {card}"
            yield Finding(ADVICE, text, remedy)
    some = next(iter(places.values()))
    is_slingshot = any(name.startswith("cxi") for name in some["cards"])
    if is_slingshot and len(set(some["cards"].values())) > 1 and CRAY_CARDS not in some["chosen"]:
        text = f"Cray MPICH gives the ranks on {node} cards in blocks, not the nearest"
        yield Finding(NOTE, text, f"export {CRAY_CARDS}={'NUMA' if some['gpu'] is None else 'GPU'}")


def chosen(value: str, cards: dict[str, int]) -> list[str]:
    """Return the cards that a variable allows: ``mlx5_0:1,mlx5_1:1``; NCCL's ``=`` is exact, ``^`` means all others."""
    is_exact, names = "=" in value[:2] or ":" in value, re.findall(r"[a-z]\w*", re.sub(r":\d+", "", value))
    named = [card for card in cards if any(card == name if is_exact else card.startswith(name) for name in names)]
    return [card for card in cards if card not in named] if value.startswith("^") else named


def domains(numbers: list[int]) -> str:
    return f"domain{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def merge(findings: list[Finding]) -> list[Finding]:
    """Shorten the page of a large job: keep the first lines and all advice, and count the rest."""
    kept = [*findings[:MOST_LINES], *(each for each in findings[MOST_LINES:] if each.level == ADVICE)]
    left = len(findings) - len(kept)
    return [*kept, Finding(NOTE, f"and {left} more lines of this kind (--json has all)")] if left else kept
