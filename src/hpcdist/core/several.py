"""Collectives to which each rank brings several tensors, such as one for each of its devices.

Every tensor counts as a contribution of its own: what is reduced is combined over all tensors of all ranks, and what is
gathered has an entry for each. c10d's methods of a group take such lists (gloo defines what they mean), and so did the
``*_multigpu`` functions of earlier versions of torch. The sizes and dtypes of the tensors and how many there are, are
the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from hpcdist.core import reduction
from hpcdist.core.buffers import check_dense, concatenate, make_unpack, put
from hpcdist.core.call import Call
from hpcdist.core.errors import MismatchError
from hpcdist.core.group import Group
from hpcdist.core.issue import issue_any
from hpcdist.core.lists import flatten
from hpcdist.core.reduction import canonical
from hpcdist.core.table import ALL_GATHER_SINGLE, ALL_REDUCE, BROADCAST, REDUCE, REDUCE_SCATTER_SINGLE, Row
from hpcdist.core.work import Work

Tensors = Sequence[torch.Tensor]


def check_same_kind(call: str, tensors: Tensors) -> None:
    """Raise c10d's error unless tensors have one dtype, size and layout."""
    if not tensors:
        raise MismatchError(f"{call}: requires non-empty tensor list")
    check_dense(call, *tensors)
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.dtype != first.dtype:
            raise MismatchError(
                f"{call}: invalid tensor type at index {index} (expected {first.dtype}, got {tensor.dtype})"
            )
        if tensor.shape != first.shape:
            raise MismatchError(
                f"{call}: invalid tensor size at index {index} (expected {tuple(first.shape)}, got "
                f"{tuple(tensor.shape)})"
            )


def combined(pg: Group, row: Row, tensors: Tensors, op: Any, async_op: bool) -> torch.Tensor:
    """Return this rank's tensors combined, in memory of their own."""
    check_same_kind(row.name, tensors)
    reduction.check(row, tensors[0].dtype, op)
    if not async_op:
        pg.backend(tensors[0].device).settle()  # what is queued may still write to them
    if len(tensors) == 1:
        return tensors[0].clone()
    local = reduction.SUM if op in (reduction.AVG, reduction.PREMUL_SUM) else op
    first = tensors[0].detach().clone()
    values = [first, *(tensor.detach().to(first.device) for tensor in tensors[1:])]
    wide = reduction.WIDE.get(first.dtype)
    if wide is not None:
        values = [value.to(wide) for value in values]
    total = reduction.fold([value.reshape(-1) for value in values], local).view(first.shape)
    if op == reduction.AVG:
        reduction.average(total, len(tensors))
    return total.to(first.dtype)


def put_in_all(values: torch.Tensor, tensors: Tensors) -> None:
    """Copy values to each of some tensors."""
    for tensor in tensors:
        put(values.view(tensor.shape), tensor.detach())


def all_reduce(pg: Group, tensors: Tensors, op: Any, async_op: bool) -> Work | None:
    """Combine all tensors of all ranks and write the result to each of them."""
    how = canonical(op)
    total = combined(pg, ALL_REDUCE, tensors, how, async_op)
    then = partial(put_in_all, total, tensors)
    return issue_any(Call(ALL_REDUCE, total, total, how, finish=then, result=list(tensors)), pg, async_op)


def reduce(pg: Group, tensors: Tensors, op: Any, root: int, root_tensor: int, async_op: bool) -> Work | None:
    """Combine all tensors of all ranks and write the result to one tensor of one rank."""
    how = canonical(op)
    total = combined(pg, REDUCE, tensors, how, async_op)
    recv, written = (total, [tensors[root_tensor]]) if pg.rank() == root else (None, [])
    then = partial(put_in_all, total, written)
    return issue_any(Call(REDUCE, total, recv, how, root, finish=then, result=list(tensors)), pg, async_op)


def broadcast(pg: Group, tensors: Tensors, root: int, root_tensor: int, async_op: bool) -> Work | None:
    """Write one tensor of one rank to all tensors of all ranks."""
    check_same_kind("broadcast", tensors)
    flat = flatten(pg, [tensors[root_tensor]], tensors[0].dtype, async_op).clone()
    then = partial(put_in_all, flat, tensors)
    return issue_any(Call(BROADCAST, flat, flat, root=root, finish=then, result=list(tensors)), pg, async_op)


def all_gather(pg: Group, outputs: Sequence[Tensors], inputs: Tensors, async_op: bool) -> Work | None:
    """Gather all tensors of all ranks into each list of outputs, rank by rank."""
    result = [tensor for each in outputs for tensor in each]
    check_same_kind("all_gather", [*inputs, *result])
    device = inputs[0].device
    flat = flatten(pg, [tensor.to(device) for tensor in inputs], inputs[0].dtype, async_op)
    everything = torch.empty(len(pg.ranks) * flat.numel(), dtype=flat.dtype, device=device)
    copies = [make_unpack(everything, list(each)) for each in outputs]

    def copy() -> None:
        for each in copies:
            each()

    return issue_any(Call(ALL_GATHER_SINGLE, flat, everything, finish=copy, result=result), pg, async_op)


def reduce_scatter(pg: Group, outputs: Tensors, inputs: Sequence[Tensors], op: Any, async_op: bool) -> Work | None:
    """Combine the lists of all tensors of all ranks and leave each output its entry."""
    check_same_kind("reduce_scatter", [*outputs, *(tensor for each in inputs for tensor in each)])
    how, device = canonical(op), outputs[0].device
    parts = [concatenate([tensor.to(device) for tensor in each], outputs[0].dtype) for each in inputs]
    total = combined(pg, REDUCE_SCATTER_SINGLE, parts, how, async_op)
    mine = torch.empty(total.numel() // len(pg.ranks), dtype=total.dtype, device=device)
    then = make_unpack(mine, list(outputs))
    return issue_any(Call(REDUCE_SCATTER_SINGLE, total, mine, how, finish=then, result=list(outputs)), pg, async_op)
