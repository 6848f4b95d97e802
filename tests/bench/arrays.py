"""Subject ``arrays``: time of calls on NumPy arrays beside the same calls on tensors.

What may be added is what ``torch.from_numpy`` takes for each array, 0.6 µs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import hpcdist as dist
from hpcdist.cli.bench.timing import Bench

NBYTES = [64, 4096, 65536]


def calls(bench: Bench) -> dict[str, Callable[..., Any]]:
    """Return each call on an input, an output for all ranks, and a list of one output a rank."""
    after, before = (bench.rank + 1) % bench.size, (bench.rank - 1) % bench.size

    def messages(one: Any, _: Any, each: list[Any]) -> None:
        for work in (dist.irecv(each[0], before), dist.isend(one, after)):
            if work is not None:
                work.wait()

    return {
        "all_reduce": lambda one, _, __: dist.all_reduce(one),
        "all_reduce, async_op and wait": lambda one, _, __: dist.all_reduce(one, async_op=True).wait(),  # type: ignore[union-attr]
        "broadcast": lambda one, _, __: dist.broadcast(one, 0),
        "all_gather_into_tensor": lambda one, whole, _: dist.all_gather_into_tensor(whole, one),
        "all_gather, list": lambda one, _, each: dist.all_gather(each, one),
        "irecv and isend, and waits": messages,
    }


def measure(bench: Bench) -> None:
    """Time all calls at all sizes, each rank's array of so many bytes."""
    for nbytes in bench.options.sizes or NBYTES:
        one, whole, *each = (torch.ones(max(1, nbytes // 4) * many) for many in (1, bench.size, *[1] * bench.size))
        arrays = one.numpy(), whole.numpy(), [tensor.numpy() for tensor in each]
        for name, call in calls(bench).items():
            sides = {
                "tensors": lambda: call(one, whole, each),  # noqa: B023
                "arrays": lambda: call(*arrays),  # noqa: B023
            }
            bench.compare(name, "float32", nbytes, sides)
