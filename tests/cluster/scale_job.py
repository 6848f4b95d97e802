"""What N ranks cost: python scale_job.py shrink|report. Rank 0 prints a line of JSON for each step: time and memory.

shrink: in the end the last rank is left out of the group. report: it stays away from a collective, which the watchdogs
report after a timeout of SCALE_TIMEOUT seconds.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

STARTED = time.time()

import torch  # noqa: E402  # what starting costs begins here

import hpcdist as dist  # noqa: E402

KIND = sys.argv[1]
SECONDS = float(os.environ.get("SCALE_TIMEOUT", "60"))


def memory() -> float:
    """Return this process's own memory in MB: what it shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("Private_Dirty"))


def tell(what: str, seconds: float) -> None:
    """Print the slowest rank's time and the largest memory."""
    seen: list = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (seconds, memory()))
    if dist.get_rank() == 0:
        line = {"step": what, "seconds": max(each[0] for each in seen), "megabytes": max(each[1] for each in seen)}
        print(json.dumps(line), flush=True)


def timed(what: str, call, count: int = 1) -> None:
    """Time a call that all ranks make together."""
    dist.barrier()
    start = time.monotonic()
    for _ in range(count):
        call()
    tell(what, (time.monotonic() - start) / count)


imported, began = memory(), time.monotonic()
dist.init_process_group(timeout=timedelta(seconds=SECONDS))
rank, size = dist.get_rank(), dist.get_world_size()
if rank == 0:
    print(json.dumps({"step": "import", "seconds": time.time() - STARTED, "megabytes": imported}), flush=True)
tell("init_process_group", time.monotonic() - began)

small, large = torch.ones(1), torch.ones(1 << 18)
timed("all_reduce 4 B", lambda: dist.all_reduce(small), 10)
timed("all_reduce 1 MiB", lambda: dist.all_reduce(large), 3)
timed("barrier", dist.barrier, 10)
assert small.item() == size**10

everything: list = [None] * size
timed("all_gather_object", lambda: dist.all_gather_object(everything, {"rank": rank, "text": "x" * 1000}))
assert [each["rank"] for each in everything] == list(range(size))
several = [{"from": 0}] if rank == 0 else [None]
timed("broadcast_object_list", lambda: dist.broadcast_object_list(several))
assert several == [{"from": 0}]

groups: list = []
timed("new_subgroups", lambda: groups.append(dist.new_subgroups(4)[0]))
mine = torch.tensor([float(rank)])
dist.all_reduce(mine, group=groups[0])
assert mine.item() == sum(range(rank // 4 * 4, rank // 4 * 4 + 4))
timed("new_group of all", lambda: groups.append(dist.new_group()))
gathered = torch.empty(size)
timed("all_gather_into_tensor", lambda: dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)])), 3)
assert gathered.tolist() == list(range(size))

if KIND == "report":
    if rank != size - 1:
        print(f"rank {rank} waits at {time.time()}", flush=True)
        dist.all_reduce(small)
    time.sleep(SECONDS * 4)
if rank != size - 1:
    start = time.monotonic()
    dist.shrink_group([size - 1])
    tell("shrink_group", time.monotonic() - start)
    dist.all_reduce(small)
    assert small.item() == size**10 * (size - 1)
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps({"step": "all, from the start of Python", "seconds": time.time() - STARTED}), flush=True)
