"""Topology of a node: its NUMA domains, and the cores, GPUs and network cards of each, from /sys."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from hpcdist.core.printing import add_hint
from hpcdist.launch import environment

SYS = Path("/sys")
RDMA = ("infiniband", "cxi")  # classes of network cards in /sys: InfiniBand, Omni-Path, RoCE and EFA; Slingshot
# the number of ranks on this rank's node; Slurm's is a list for all nodes, such as 4(x2),3
LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PALS_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
)


# launchers' options that bind ranks to separate cores, spread over the NUMA domains
BINDINGS = {
    "srun": "srun --cpus-per-task={cpus} --cpu-bind=cores --distribution=block:cyclic …",
    "mpirun (Open MPI)": "mpirun --map-by ppr:{ranks}:{part}:PE={cores} --bind-to core …",
    environment.HYDRA: "mpirun -bind-to core:{cores} -map-by {part} …",
    "mpiexec (PALS)": "mpiexec --depth={cpus} --cpu-bind=depth …",
    "torchrun": "torchrun --numa-binding=node …",
}


class Room(NamedTuple):
    """The part of a node that a job may use."""

    cpus: int  # logical
    cores: int
    domains: int
    sockets: int


class Topology(NamedTuple):
    """The NUMA domains of a node; a domain is named by the kernel's number."""

    cpus: dict[int, set[int]]  # the logical CPUs of each domain; none if it is memory only, such as a GPU's
    sockets: dict[int, int]  # the socket of each domain that has CPUs
    distances: dict[int, dict[int, int]]  # distance of one domain's memory from the CPUs of another, 10 for its own
    cards: dict[str, int]  # the domain of each card that MPI, UCX or NCCL can use, by their name for it
    usable: set[int]  # the CPUs that this process's control group allows
    cores: int  # the domains of these CPUs

    def domains(self, cpus: Iterable[int]) -> list[int]:
        some = set(cpus)
        return sorted(domain for domain, own in self.cpus.items() if own & some)

    def room(self) -> Room:
        """Return the part that the job may use."""
        domains = self.domains(self.usable)
        return Room(len(self.usable), self.cores, len(domains), len({self.sockets[each] for each in domains}))

    def with_cpus(self, domain: int) -> int | None:
        """Return a device's domain, or the nearest one that has CPUs; None if the kernel does not know the domain."""
        row = self.distances.get(domain, {})
        return min((each for each in self.sockets if each in row), key=row.__getitem__, default=None)

    def distance(self, here: Iterable[int], there: int) -> int:
        """Return the distance of a domain from the nearest of others."""
        return min((self.distances.get(each, {}).get(there, 0) for each in here), default=0)


def read(root: Path = SYS, groups: str | None = None) -> Topology:
    """Return this node's topology; tests give a root in place of /sys, and the content of /proc/self/cgroup."""
    nodes = {int(path.name.removeprefix("node")): path for path in root.glob("devices/system/node/node[0-9]*")}
    domains = {domain: cpus(text(nodes[domain] / "cpulist")) for domain in sorted(nodes)}
    rows = {domain: map(int, text(nodes[domain] / "distance").split()) for domain in domains}
    about = root / "devices/system/cpu"
    sockets = {
        domain: int(text(about / f"cpu{min(own)}/topology/physical_package_id") or 0)
        for domain, own in domains.items()
        if own
    }
    everyone = set().union(*domains.values())
    cards = {
        path.parent.parent.name: int(text(path) or -1)
        for kind in RDMA
        for path in root.glob(f"class/{kind}/*/device/numa_node")
    }
    usable = (allowed(root, groups) & everyone) or everyone
    return Topology(
        domains,
        sockets,
        {domain: dict(zip(domains, row, strict=False)) for domain, row in rows.items()},
        {name: domain for name, domain in cards.items() if domain in domains},
        usable,
        len({min(siblings(cpu, root)) for cpu in usable}),
    )


def processor(info: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of this node's processor; on ARM the architecture and the numbers of its maker and its part."""
    with contextlib.suppress(OSError), info.open() as file:
        lines = itertools.takewhile(str.strip, file)  # only the first core's lines: reading all takes long
        fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        named = (fields.get("model name"), fields.get("CPU implementer"), fields.get("CPU part"))
        if found := [each for each in named if each]:
            return found[0] if named[0] else " ".join([platform.machine(), *found])
    return platform.processor() or platform.machine()


def text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def cpus(listed: str) -> set[int]:
    """Return the numbers of a list such as ``0-3,8``."""
    pairs = re.findall(r"(\d+)(?:-(\d+))?", listed)
    return {cpu for first, last in pairs for cpu in range(int(first), int(last or first) + 1)}


def siblings(cpu: int, root: Path = SYS) -> set[int]:
    return cpus(text(root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")) | {cpu}


def allowed(root: Path, groups: str | None) -> set[int]:
    """Return the CPUs of the control group (version 2) of this process, empty if none limits them."""
    sets = (cpus(text(each / "cpuset.cpus.effective")) for each in control_groups(root, groups))
    return next(filter(None, sets), set())


def control_groups(root: Path = SYS, groups: str | None = None) -> list[Path]:
    """Return the folders of this process's control group (version 2) and of its parents: each may set a limit.

    The parameters are those of ``read``.
    """
    given = text(Path("/proc/self/cgroup")) if groups is None else groups
    lines = (line.split(":", 2) for line in given.splitlines() if line.count(":") >= 2)
    own = next((path for _, names, path in lines if not names), "/")
    top = root / "fs/cgroup"
    folder = top / own.lstrip("/")
    return [folder, *(each for each in folder.parents if each.is_relative_to(top))]


def gpu_domain(address: str, topology: Topology, root: Path = SYS) -> int | None:
    """Return the NUMA domain nearest to a GPU, by its PCI address, such as ``0000:c1:00.0``."""
    return topology.with_cpus(int(text(root / f"bus/pci/devices/{address}/numa_node") or -1))


def bind(launcher: str | None, ranks: int, room: Room) -> str:
    """Return the launcher's command that gives each of a node's ranks separate cores, near to each other.

    For a launcher that is not in ``environment.LAUNCHERS`` it is srun's.
    """
    is_package = ranks < room.domains  # a rank then has more cores than a domain
    part = ("socket" if launcher and "hydra" in launcher else "package") if is_package else "numa"
    parts = max(1, room.sockets if is_package else room.domains)
    share = -(-ranks // parts)  # ranks of the fullest part, which needs cores for all of them
    return BINDINGS.get(launcher or "", BINDINGS["srun"]).format(
        cpus=max(1, room.cpus // (parts * share)), cores=max(1, room.cores // (parts * share)), ranks=share, part=part
    )


def local_size(given: Mapping[str, str]) -> int:
    """Return the number of ranks on this rank's node, given by the launcher, or 0."""
    for variable in LOCAL_SIZES:
        parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", given.get(variable, ""))
        sizes = [int(size) for size, times in parts for _ in range(int(times or 1))]
        node = environment.integer(given, "SLURM_NODEID") or 0 if len(sizes) > 1 else 0
        if node < len(sizes):
            return sizes[node]
    return 0


def warn_if_spread(root: Path = SYS, environ: Mapping[str, str] = os.environ) -> None:
    """Warn if this rank may run in more NUMA domains than its share of the node's; reads a few files."""
    ranks = local_size(environ)
    if ranks < 2 or not (root / "devices/system/node/node1").exists():
        return
    node = read(root)
    domains = node.domains(os.sched_getaffinity(0))
    if len(domains) > -(-node.room().domains // ranks):
        launch = environment.detect(environ)
        command = bind(launch.name if launch else None, ranks, node.room())
        warnings.warn(
            add_hint(
                f"rank 0 may run in {len(domains)} NUMA domains, and its node has {ranks} ranks: bind them to cores, "
                f"{command} (python -m hpcdist doctor shows where each rank runs)",
                "not-bound",
            ),
            stacklevel=3,
        )
