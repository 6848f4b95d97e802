"""Job of ranks on several hosts, the last of which is late: what profile says, and what debug shows on its host."""

import subprocess
import sys
import time

import torch

import hpcdist as dist
from hpcdist.watch.watchdog import RUNNING

NAP = 0.3

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
own = RUNNING[0].channel.own
address = [f"{own.host}:{own.port}"]
dist.broadcast_object_list(address)

with dist.profile(show=False) as seen:
    if rank == size - 1:
        time.sleep(NAP)
    dist.all_reduce(torch.ones(3))
if rank == 0:
    late = max(seen.ranks(), key=lambda each: each.made_wait)
    print(f"rank {late.rank} on {late.host} made the others wait", flush=True)
    expected = NAP * (size - 1)
    assert 0.8 * expected < late.made_wait < 3 * expected, late

if rank == size - 1:
    for _ in range(2):  # rank 0 has waited for more than a second by the last one
        command = [sys.executable, "-m", "hpcdist", "debug", address[0], "--once", "--seconds", "1"]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    for line in shown.stdout.splitlines():
        if line.startswith(tuple("0123456789")):
            print(" ".join(line.split()[:3]), flush=True)
dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
