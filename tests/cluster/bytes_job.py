"""Job of ranks on several hosts: prints the bytes that the busiest host sends in one call of each large collective."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

import hpcdist as dist
from hpcdist.cli.bench.wire import Wire

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
    whole = torch.ones(NBYTES // dtype.itemsize, dtype=dtype)
    part = torch.ones(whole.numel() // comm.size, dtype=dtype)
    for name, call in calls(whole, part).items():
        call()
        comm.Barrier()
        before = wire.sent()
        comm.Barrier()
        for _ in range(CALLS):
            call()
        comm.Barrier()
        sent = max(comm.allgather(wire.sent() - before)) / CALLS
        if comm.rank == 0:
            line = {"call": name, "dtype": str(dtype), "nbytes": NBYTES, "nodes": wire.nodes, "sent": sent}
            print(json.dumps(line), flush=True)
dist.destroy_process_group()
