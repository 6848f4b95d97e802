"""Topologies of known machines: each file makes a folder like /sys, and says where its facts come from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hpcdist.cli.doctor.placement import in_domains
from hpcdist.launch import topology

HERE = Path(__file__).parent
GROUP = "0::/job/step"


class Machine(NamedTuple):
    """A machine of which a folder like /sys was made."""

    name: str
    root: Path
    node: topology.Topology
    gpus: list[int | None]  # the domains of its GPUs, in the order of their numbers


def make(name: str, root: Path) -> Machine:
    """Write the folder of a machine, and read it as hpcdist reads /sys."""
    addresses = []
    step = 0
    for line in (HERE / f"{name}.txt").read_text().splitlines():
        match line.split():
            case ["domain", number, "socket", socket, "cpus", cpus, "distances", *distances]:
                node = f"devices/system/node/node{number}"
                write(root, f"{node}/cpulist", cpus.strip("-"))
                write(root, f"{node}/distance", " ".join(distances))
                for cpu in topology.cpus(cpus):
                    about, first = f"devices/system/cpu/cpu{cpu}/topology", cpu % step if step else cpu
                    write(root, f"{about}/physical_package_id", socket)
                    write(root, f"{about}/thread_siblings_list", f"{first},{first + step}" if step else str(cpu))
            case ["threads", number]:  # how far the numbers of a core's two hardware threads are apart
                step = int(number)
            case ["gpu", address, domain]:
                addresses.append(address)
                write(root, f"bus/pci/devices/{address}/numa_node", domain)
            case ["card", kind, card, domain]:
                write(root, f"class/{kind}/{card}/device/numa_node", domain)
            case ["usable", cpus]:
                write(root, "fs/cgroup/job/cpuset.cpus.effective", cpus)
    read = topology.read(root, GROUP)
    return Machine(name, root, read, [topology.gpu_domain(address, read, root) for address in addresses])


def write(root: Path, name: str, content: str) -> None:
    """Write one file as the kernel would."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{content}\n")


def ranks(machine: Machine, cpus: list[str], launcher: str = "srun", gpus: bool = True, **same: object) -> list[dict]:
    """Return what the doctor's ranks find on a machine, each bound to CPUs and with the GPU of its number."""
    found = []
    for rank, text in enumerate(cpus):
        cores = sorted(topology.cpus(text))
        about = {
            "node": "n0",
            "cores": cores,
            "main": cores,
            "physical": sorted({min(topology.siblings(cpu, machine.root)) for cpu in cores}),
            "quota": None,
            "threads": 1,
            "launcher": launcher,
            "launcher_rank": rank,
            "launcher_size": len(cpus),
            "chosen": {},
            "visible": "CUDA_VISIBLE_DEVICES",
            **in_domains(
                machine.node,
                cores,
                machine.gpus if gpus else [],
                machine.gpus[rank % len(machine.gpus)] if gpus and machine.gpus else None,
            ),
        }
        found.append(about | same)
    return found
