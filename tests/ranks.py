"""What the tests under mpirun ask of all ranks: their values, and the sum of a number of each."""

from __future__ import annotations

from typing import Any

import torch

import hpcdist as dist


def of_all_ranks(value: object, group: Any = None) -> list[Any]:
    """Return the values of all ranks of a group, in their order."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def sum_of_ranks(value: float = 1.0, group: Any = None) -> float:
    """Return the sum of a number of each rank of a group: of ones it is the group's size, if the group is usable."""
    tensor = torch.tensor([float(value)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()
