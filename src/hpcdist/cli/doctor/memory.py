"""Memory shared within a node: its size, tested by writing to it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hpcdist.backends.mpi.node import threshold_file, thresholds
from hpcdist.cli.doctor.findings import ADVICE, NOTE, OK, PROBLEM, Facts, Finding
from hpcdist.core import memory_file
from hpcdist.core.printing import format_size
from hpcdist.core.ranks import format_count
from hpcdist.launch import environment, topology

TITLE = "Memory shared within a node"
NEED = 8 << 20  # bytes for each rank: hpcdist's window, and some for MPI itself


def look(comm: Any) -> Facts:
    found = threshold_file.find()
    setting, file, error = ("", "", str(found)) if isinstance(found, ValueError) else (*found[:2], "")
    facts: Facts = {
        "free": memory_file.free_bytes(),
        "locked": locked_limit(),
        "processor": topology.processor(),
        "thresholds": {"setting": setting, "file": file, "error": error},  # their source
        "tried": None,
        "ranks": 1,
    }
    if comm is None:
        return facts
    from hpcdist.backends.mpi.node.places import locate

    node = locate(comm, [], environment.node_key()).node
    facts.update(ranks=node.Get_size(), tried=share(node))
    node.Free()
    return facts


def share(node: Any) -> str:
    """Write to memory that the node's ranks share and read what the next rank wrote, as collectives do."""
    from hpcdist.backends.mpi.node.window import map_segments

    rank, size = node.Get_rank(), node.Get_size()
    segments, failure = map_segments(NEED, node)
    if failures := [each for each in node.allgather(failure) if each]:
        return failures[0]
    own, after = (torch.tensor([], dtype=torch.uint8).set_(segments[each]) for each in (rank, (rank + 1) % size))
    own.fill_(rank % 251)
    node.Barrier()
    return "works" if bool((after == (rank + 1) % size % 251).all()) else "wrong values"


def locked_limit() -> int | None:
    """Return the limit of locked memory in bytes, if there are an InfiniBand adapter and a limit, else None."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return soft if Path("/dev/infiniband").exists() and soft != resource.RLIM_INFINITY else None


def judge(seen: list[Facts]) -> Iterator[Finding]:
    free_bytes = min((facts["free"] for facts in seen if facts["free"] is not None), default=None)
    most = max(facts["ranks"] for facts in seen)
    tried = {facts["tried"] for facts in seen}
    failed = sorted(tried - {"works", None})
    if free_bytes is None:
        yield Finding(
            ADVICE, "there is no /dev/shm: MPI will use files or sockets instead", "mount -t tmpfs shm /dev/shm"
        )
    elif free_bytes < NEED * most and tried != {"works"}:
        text = f"/dev/shm has {format_size(free_bytes)} free, but {most} ranks a node need {format_size(NEED * most)}"
        remedy = "mount -o remount,size=50% /dev/shm   # in a container: docker run --shm-size=1g"
        yield Finding(PROBLEM, text, remedy)
    else:
        free = format_size(free_bytes) if free_bytes < memory_file.UNLIMITED else "all memory"
        yield Finding(OK, f"/dev/shm has {free} free on the fullest node")
        for text in failed:
            yield Finding(PROBLEM, f"shared memory: {text}", "df -h /dev/shm; ls -l /dev/shm")
    if not failed and "works" in tried:
        yield Finding(
            OK, f"{format_count(most, 'rank')} a node wrote and read {format_size(NEED)} of shared memory each"
        )
    yield judge_thresholds(seen[0], most)
    if locked := [facts["locked"] for facts in seen if facts["locked"] is not None]:
        text = f"only {format_size(min(locked))} of memory may be locked; InfiniBand needs this to be unlimited"
        yield Finding(ADVICE, text, "ulimit -l unlimited   # or: PropagateResourceLimitsExcept=MEMLOCK in slurm.conf")


def judge_thresholds(first: Facts, most: int) -> Finding:
    """Report which table of thresholds rank 0, and so every rank, uses for shared memory."""
    name, found = first["processor"], first["thresholds"]
    tune = f"srun --ntasks={max(most, 2)} --nodes=1 python -m hpcdist tune   # a minute, once for this processor"
    if found["error"]:
        return Finding(PROBLEM, found["error"], tune)
    if found["file"]:
        return Finding(OK, f"from which size on shared memory is used was measured on {name}: {found['file']}")
    if found["setting"] and not threshold_file.is_file(found["setting"]):
        text = f"{threshold_file.VARIABLE}={found['setting']} says from which size on shared memory is used"
        return Finding(NOTE, text)
    if name.startswith(thresholds.PROCESSORS):
        return Finding(OK, f"the built-in table says from which size on shared memory is used; it suits {name}")
    known = " and ".join(thresholds.PROCESSORS)
    return Finding(ADVICE, f"from which size on shared memory is faster was measured on {known}, not on {name}", tune)
