"""Results and speed: sums of several dtypes, then latency and bandwidth at two sizes, with a verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

import hpcdist as dist
from hpcdist.cli.bench.p2p import ping_pong
from hpcdist.cli.doctor.findings import ADVICE, NOTE, OK, PROBLEM, Facts, Finding
from hpcdist.core.printing import format_size, format_time
from hpcdist.core.ranks import format_count
from hpcdist.launch import environment

TITLE = "Results and speed"
SMALL, LARGE = 8, 4 << 20  # bytes
SECONDS = 0.5  # seconds at most, for one measurement

# The highest latency and lowest bandwidth that are good, and the usual cause of a worse figure. Shared memory on one
# node takes a few microseconds, and so does a cluster's network between nodes; TCP over Ethernet takes tens of
# microseconds and reaches about 1 GB/s.
LIMITS = {
    "within a node": (50e-6, 0.5e9, "there are more ranks than cores, or MPI does not use shared memory"),
    "between nodes": (30e-6, 1.0e9, "MPI uses TCP instead of the cluster's fast network"),
}
FIXES = {
    "within a node": "srun --cpu-bind=cores …   # one rank on each core; see also /dev/shm above",
    "between nodes": "export UCX_NET_DEVICES=mlx5_0:1   # Open MPI, MPICH on UCX; FI_PROVIDER=… on libfabric",
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64)


def look() -> Facts:
    """Check sums over all ranks, then measure; every rank calls this."""
    rank, size = dist.get_rank(), dist.get_world_size()
    facts: Facts = {"backend": str(dist.get_backend()), "wrong": [], "all_reduce": {}, "pairs": {}}
    for dtype in DTYPES:
        tensor = addends(rank, size).to(dtype)
        dist.all_reduce(tensor)
        if not bool((tensor == expected_sums(size).to(dtype)).all()):
            facts["wrong"].append(str(dtype))
    for count in (SMALL, LARGE):
        tensor = torch.zeros(count // 4)
        facts["all_reduce"][count] = seconds_of(lambda tensor=tensor: dist.all_reduce(tensor))  # type: ignore[misc]
    keys: list[str] = [""] * size
    dist.all_gather_object(keys, environment.node_key())
    for where, is_here in (("within a node", True), ("between nodes", False)):
        if partners := [other for other in range(1, size) if (keys[other] == keys[0]) is is_here]:
            facts["pairs"][where] = {count: seconds_of_message(count, partners[0]) for count in (SMALL, LARGE)}
    return facts


def addends(rank: int, size: int) -> torch.Tensor:
    """Return a rank's addends: 1 to 3 in two of ``size`` elements, so that no sum of any number of ranks overflows."""
    places = torch.arange(max(1000, size))
    return (places % 3 + 1) * (((places - rank) % size == 0) | ((places - rank + 1) % size == 0))


def expected_sums(size: int) -> torch.Tensor:
    return (torch.arange(max(1000, size)) % 3 + 1) * min(size, 2)


def seconds_of(call: Callable[[], object]) -> float:
    """Return the median time of a call; all ranks make it the same number of times."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(3):
        call()
    once = torch.tensor([(time.perf_counter() - start) / 3], dtype=torch.float64)
    dist.all_reduce(once, dist.ReduceOp.MAX)
    times = []
    for _ in range(max(5, min(1000, int(SECONDS / max(once.item(), 1e-7))))):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def seconds_of_message(nbytes: int, partner: int) -> float:
    """Return the time of one message between rank 0 and a partner, half of a round trip."""
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    return seconds_of(ping_pong(partial(dist.send, tensor), partial(dist.recv, tensor), partner)) / 2


def judge(seen: list[Facts]) -> Iterator[Finding]:
    wrong = sorted({dtype for facts in seen for dtype in facts["wrong"]})
    first, count = seen[0], len(seen)
    backend = first["backend"]
    if wrong:
        remedy = "python -m hpcdist doctor --json   # report this bug, with the name of your MPI"
        yield Finding(PROBLEM, f"all_reduce gave wrong sums of {', '.join(wrong)}", remedy)
        return
    yield Finding(OK, f"all_reduce over {backend} is right for {len(DTYPES)} dtypes on {format_count(count, 'rank')}")
    if count == 1:
        return
    small, large = first["all_reduce"][SMALL], first["all_reduce"][LARGE]
    yield Finding(
        OK, f"all_reduce takes {format_time(small)} at {SMALL} B, {format_time(large)} at {format_size(LARGE)}"
    )
    for where, times in first["pairs"].items():
        latency, speed = times[SMALL], LARGE / times[LARGE]
        slowest, least, meaning = LIMITS[where]
        bandwidth = f"{speed / 1e9:.2f} GB/s at {format_size(LARGE)}"
        text = f"a message {where} takes {format_time(latency)} at {SMALL} B, {bandwidth}"
        if backend != "mpi":
            yield Finding(NOTE, f"{text}, over {backend}'s sockets")
        elif latency > slowest or speed < least:
            limits = f"expected under {format_time(slowest)} and above {least / 1e9:g} GB/s"
            yield Finding(ADVICE, f"{text}: slow ({limits}): {meaning}", FIXES[where])
        else:
            yield Finding(OK, f"{text}: good")
