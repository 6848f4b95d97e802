"""Ranks of several hosts that find each other: python meeting_job.py KIND.

env, gloo: one all_reduce over gloo, found by ``env://`` or through the store that MPI's ranks open.
late, message: the last rank never comes to an all_reduce over MPI, or sends nothing to rank 0, which waits for it.
"""

import sys
import time
from datetime import timedelta

import torch

import hpcdist as dist

KIND = sys.argv[1]
SECONDS = 3
limit = timedelta(seconds=SECONDS if KIND in ("late", "message") else 30)
dist.init_process_group("gloo" if KIND == "env" else None, timeout=limit)
rank, size = dist.get_rank(), dist.get_world_size()
if KIND in ("env", "gloo"):
    group = dist.new_group(backend="gloo") if KIND == "gloo" else None
    tensor = torch.full((1000,), float(rank + 1))
    dist.all_reduce(tensor, group=group)
    assert tensor.eq(size * (size + 1) / 2).all()
    sys.stdout.write(f"rank {rank} of {size}: {dist.get_backend(group)}\n")  # at once, so that lines do not mix
    dist.destroy_process_group()
else:
    dist.all_reduce(torch.ones(1))
    time.sleep(1.5)  # the watchdogs have greeted each other
    if rank == size - 1:
        time.sleep(60)
    if KIND == "late":
        dist.all_reduce(torch.ones(1))
    elif rank == 0:
        dist.recv(torch.ones(1), size - 1)
