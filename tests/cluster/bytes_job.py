"""Job of ranks on several hosts: prints what the busiest host sends in each large collective, and the bits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import torch

import hpcdist as dist
from hpcdist.cli.bench.timing import Wire

CALLS = 3
NBYTES = 8 << 20  # of the larger buffer


def calls(whole: torch.Tensor, part: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return the calls by their names."""
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }


dist.init_process_group()
comm = dist.get_mpi_comm()
wire = Wire(comm)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    chance = torch.Generator().manual_seed(comm.rank)
    whole = torch.randn(NBYTES // dtype.itemsize, generator=chance).to(dtype)
    part = torch.randn(whole.numel() // comm.size, generator=chance).to(dtype)
    for name, call in calls(whole, part).items():
        call()
        bits = hashlib.sha256(whole.view(torch.uint8).numpy()).hexdigest()
        bits += hashlib.sha256(part.view(torch.uint8).numpy()).hexdigest()
        comm.Barrier()
        before = wire.sent()
        comm.Barrier()
        for _ in range(CALLS):
            call()
        comm.Barrier()
        sent = max(comm.allgather(wire.sent() - before)) / CALLS
        if comm.rank == 0:
            line = {"call": name, "dtype": str(dtype), "nbytes": NBYTES, "nodes": wire.nodes, "sent": sent}
            print(json.dumps({**line, "bits": bits}), flush=True)
dist.destroy_process_group()
