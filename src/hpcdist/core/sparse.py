"""all_reduce of sparse tensors.

The ranks gather each other's nonzeros, which may lie in different places, and every rank adds them up in
rank order, so that all have bitwise the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

import torch
from torch.distributed import ReduceOp

from hpcdist.core.group import Group
from hpcdist.core.table import ALL_GATHER, ALL_GATHER_SINGLE
from hpcdist.core.work import DoneWork, Work


def all_reduce_sparse(
    issue: Callable[..., Any], pg: Group, tensor: torch.Tensor, op: Any, async_op: bool
) -> Work | None:
    """Sum a sparse COO tensor over all ranks, in place; the tensors have one shape and as many sparse dimensions.

    The call is over when it returns, with ``async_op`` too: the places of the nonzeros must be known first. ``issue``
    is ``core.issue.issue``, which calls this for sparse tensors, with the canonical op. It has to be SUM.
    """
    if op != ReduceOp.SUM:
        raise RuntimeError(f"Cannot use {op} with sparse tensors: all_reduce of a sparse COO tensor takes SUM only")
    mine = tensor.detach().coalesce()
    indices, values = mine.indices().contiguous(), mine.values().contiguous()
    size = pg.size()
    form = (tuple(tensor.shape), mine.sparse_dim())
    facts = torch.tensor([indices.size(1), crc32(repr(form).encode())], device=tensor.device)
    all_facts = torch.empty(size * facts.numel(), dtype=torch.int64, device=tensor.device)
    issue(ALL_GATHER_SINGLE, pg, facts, all_facts)
    table = all_facts.view(size, -1)
    if len(set(table[:, 1].tolist())) > 1:
        forms = pg.any_backend().objects.all_gather(form)
        raise ValueError(
            "all_reduce of sparse tensors that differ in shape or number of sparse dimensions: "
            + "; ".join(f"rank {rank}: {shape}, {dims} sparse" for rank, (shape, dims) in enumerate(forms))
        )
    counts: list[int] = table[:, 0].tolist()
    all_indices = gathered(issue, pg, indices.t().contiguous(), counts).t()
    all_values = gathered(issue, pg, values, counts)
    total = torch.sparse_coo_tensor(
        all_indices, all_values, tensor.shape, device=tensor.device, check_invariants=False
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)
    return DoneWork([tensor]) if async_op else None


def gathered(issue: Callable[..., Any], pg: Group, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Return the rows of all ranks, concatenated; rank r has ``counts[r]`` of them."""
    width = rows[0].numel() if rows.size(0) else int(torch.Size(rows.shape[1:]).numel())
    everything = torch.empty((sum(counts), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    issue(ALL_GATHER, pg, rows, everything, counts=([rows.numel()], [count * width for count in counts]))
    return everything
