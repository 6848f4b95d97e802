"""Job of four ranks that prints a digest of its sums, which is the same wherever the ranks run and on any MPI."""

import hashlib

import numpy as np
import torch

import hpcdist as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
made = np.random.default_rng(rank)


def values(count: int) -> torch.Tensor:
    """Return numbers of very different size, whose sum depends on the order in which they are added."""
    return torch.from_numpy(np.ldexp(made.integers(-(2**30), 2**30, count).astype(float), made.integers(-40, 0, count)))


digest = hashlib.sha256()
with dist.reproducible():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for count in (7, 5000, 400_000):
            whole = values(count).to(dtype)
            dist.all_reduce(whole)
            parts = torch.empty(count, dtype=dtype)
            dist.reduce_scatter_single(parts, values(count * size).to(dtype))
            gathered = torch.empty(count * size, dtype=dtype)
            dist.all_gather_single(gathered, parts)
            for tensor in (whole, gathered):
                digest.update(tensor.view(torch.uint8).numpy().tobytes())
found: list = [None] * size
dist.all_gather_object(found, digest.hexdigest())
assert len(set(found)) == 1, found
if rank == 0:
    print(f"rank order: {digest.hexdigest()[:16]}", flush=True)
dist.destroy_process_group()
