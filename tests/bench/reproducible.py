"""Subject ``reproducible``: what all_reduce costs if its result must not depend on sizes, libraries and nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import hpcdist as dist
from hpcdist.cli.bench.collectives import sizes
from hpcdist.cli.bench.timing import Bench
from hpcdist.core.call import Call
from hpcdist.core.reproducible import Reproducible
from hpcdist.core.table import ALL_REDUCE


def measure(bench: Bench) -> None:
    """Time sums in rank order beside the library's, and beside what one writes with mpi4py."""
    world = dist.group.WORLD
    assert world is not None
    made = np.random.default_rng(bench.comm.rank)
    for nbytes in sizes(bench):
        tensor = torch.from_numpy(made.standard_normal(max(1, nbytes // 4)).astype(np.float32))
        total = torch.empty_like(tensor)
        array, gathered = tensor.numpy(), np.empty((bench.size, tensor.numel()), np.float32)

        def in_order(send: torch.Tensor = tensor, recv: torch.Tensor = total) -> None:
            Reproducible(world.any_backend()).run(Call(ALL_REDUCE, send, recv, dist.ReduceOp.SUM))

        def by_hand(send: Any = array, gathered: Any = gathered) -> None:
            bench.comm.Allgather(send, gathered)
            gathered.sum(axis=0)

        def plain(recv: torch.Tensor = total) -> None:
            dist.all_reduce(recv.zero_())

        calls: dict[str, Any] = {"hpcdist": plain, "in rank order": in_order, "gather and add": by_hand}
        bench.compare("all_reduce, reproducible", "float32", nbytes, calls)
