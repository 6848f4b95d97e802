"""Fit a linear model to mini-batches of a dataset of which each node has one copy.

    mpirun -n 4 python train_shared.py --mib 1024      # or srun, or torchrun --nproc-per-node 4

One rank of each node makes the samples in the node's memory (``hpcdist.node_shared``). All ranks, and the workers of
their DataLoaders, read them there. At the end each rank prints what it has of that memory, by the kernel's count.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import hpcdist as dist

FEATURES = 127
ROW_BYTES = 4 * (FEATURES + 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64, help="size of the dataset")
    parser.add_argument("--batch", type=int, default=256, help="samples a step and rank")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2, help="processes of a rank that put batches together")
    parser.add_argument("--learning-rate", type=float, default=0.5)
    return parser.parse_args()


def make_samples(table: torch.Tensor) -> None:
    """Write features, and in the last column what they add up to by the weights; the same on all nodes."""
    generator = torch.Generator().manual_seed(0)
    for rows in table.split(1 << 14):
        rows.normal_(generator=generator)
        torch.mv(rows[:, :FEATURES], weights(), out=rows[:, FEATURES])


def weights() -> torch.Tensor:
    """Return the weights that are to be found."""
    return torch.linspace(-1, 1, FEATURES)


class Samples(Dataset):
    """Rows of the shared table."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitems__(self, rows: list[int]) -> torch.Tensor:
        return self.table[rows]  # the batch is the only copy


def batches(loader: DataLoader, sampler: DistributedSampler) -> Iterator[torch.Tensor]:
    """Yield batches of one epoch after the other, each in another order."""
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader


def held() -> float:
    """Return the MiB of shared tensors that the kernel counts as this process's: a page's size over its users."""
    parts = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    own = [re.search(r"(?m)^Pss: +(\d+)", part) for part in parts if "/dev/shm/hpcdist-" in part]
    return sum(int(match[1]) for match in own if match) / 1024


def main() -> None:
    options = arguments()
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    table = dist.node_shared((options.mib * (1 << 20) // ROW_BYTES, FEATURES + 1), fill=make_samples)
    sampler = DistributedSampler(Samples(table), size, rank, seed=0)
    loader = DataLoader(
        Samples(table), options.batch, sampler=sampler, num_workers=options.workers, collate_fn=lambda x: x
    )
    model = torch.zeros(FEATURES)
    for _, batch in zip(range(options.steps), batches(loader, sampler), strict=False):
        features, targets = batch[:, :FEATURES], batch[:, FEATURES]
        gradient = features.t() @ (features @ model - targets) / len(batch)
        dist.all_reduce(gradient, dist.ReduceOp.AVG)
        model -= options.learning_rate * gradient
    table.sum()  # every rank has now touched all of it
    dist.barrier()
    mine = held()
    dist.barrier()
    print(f"rank {rank} of {size}: holds {mine:.1f} MiB of the {options.mib} MiB", flush=True)
    if rank == 0:
        error = (model - weights()).abs().max()
        print(f"largest error of a weight after {options.steps} steps: {error:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
