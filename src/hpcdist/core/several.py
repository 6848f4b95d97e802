"""Collectives on several tensors of a rank: each its own collective, or all of them contributions to one.

A coalesced call, such as an all_gather of each tensor, is one call for the caller, with one Work.

c10d's methods of a group also take lists of tensors, such as one for each of a rank's devices (gloo defines their
meaning), and so did the ``*_multigpu`` functions of earlier versions of torch. There every tensor is a contribution of
its own: a reduction combines all tensors of all ranks, and a gather has an entry for each. The number of tensors, their
sizes and dtypes are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from hpcdist.core import buffers, reduction, table
from hpcdist.core.call import Call
from hpcdist.core.errors import MismatchError
from hpcdist.core.group import Group
from hpcdist.core.issue import begin_all, check, check_sparse, issue_any, make_one
from hpcdist.core.lists import check_lengths, flatten
from hpcdist.core.ranks import as_int
from hpcdist.core.reduction import canonical
from hpcdist.core.table import Row
from hpcdist.core.work import Work

Tensors = Sequence[torch.Tensor]


def gather_together(
    pg: Group, output_lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], async_op: bool
) -> Work:
    """Run or begin the all_gather of each tensor as one Work; ``output_lists`` has for each rank a list of outputs."""
    if len(output_lists) != len(pg.ranks):
        raise MismatchError(
            f"allgather_coalesced: output lists should be equal to world size: {len(output_lists)} lists given, the "
            f"group has {len(pg.ranks)} ranks"
        )
    check_lengths("allgather_coalesced", "output", output_lists, len(inputs))
    calls = [
        Call(table.ALL_GATHER, each, list(outputs))
        for each, outputs in zip(inputs, zip(*output_lists, strict=True), strict=True)
    ]
    return begin_all(pg, "all_gather", inputs, begin_each(pg, calls, async_op), as_result(output_lists))


def begin_each(pg: Group, calls: Sequence[Call], async_op: bool) -> Iterator[Work | None]:
    for call in calls:
        check(pg, call)
    for call in calls:
        yield make_one(pg, call, async_op)


def as_result(lists: Sequence[Tensors]) -> list[Any]:
    """Return the output lists of a call in the form of a Work's future: one list by itself, several as lists."""
    return list(lists[0]) if len(lists) == 1 else [list(each) for each in lists]


def check_root_tensor(call: str, index: Any, length: int) -> int:
    """Return the index of the root's tensor in a list; raise c10d's error if the list is too short."""
    if not 0 <= (index := as_int(index, "the number of the root's tensor")) < length:
        raise MismatchError(f"{call}: invalid root tensor: {index} (the list has {length} tensors)")
    return index


def check_same_kind(call: str, tensors: Tensors) -> None:
    """Raise c10d's error unless tensors have one dtype, size and layout."""
    if not tensors:
        raise MismatchError(f"{call}: requires non-empty tensor list")
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.layout is not first.layout:
            raise MismatchError(
                f"{call}: invalid tensor layout at index {index} (expected {first.layout}, got {tensor.layout})"
            )
        if tensor.dtype != first.dtype:
            raise MismatchError(
                f"{call}: invalid tensor type at index {index} (expected {first.dtype}, got {tensor.dtype})"
            )
        if tensor.shape != first.shape:
            raise MismatchError(
                f"{call}: invalid tensor size at index {index} (expected {tuple(first.shape)}, got "
                f"{tuple(tensor.shape)})"
            )
    if first.layout is not torch.sparse_coo or call != table.ALL_REDUCE.name:
        buffers.check_dense(call, *tensors)


def combine(pg: Group, row: Row, tensors: Tensors, op: Any, async_op: bool) -> torch.Tensor:
    """Return this rank's tensors combined, in memory of their own."""
    check_same_kind(row.name, tensors)
    reduction.check(row, tensors[0].dtype, op)
    is_sparse = tensors[0].layout is torch.sparse_coo
    if is_sparse:
        check_sparse(pg, Call(row, tensors[0], tensors[0], op))
    if not async_op:
        pg.backend(tensors[0].device).settle()  # queued calls may still write to them
    if len(tensors) == 1:
        return tensors[0].clone()
    local = reduction.SUM if op in (reduction.AVG, reduction.PREMUL_SUM) else op
    first = tensors[0].detach().clone()
    values = [first, *(tensor.detach().to(first.device) for tensor in tensors[1:])]
    if is_sparse:
        return sum(values[1:], first)
    wide = reduction.WIDE.get(first.dtype)
    if wide is not None:
        values = [value.to(wide) for value in values]
    total = reduction.fold([value.reshape(-1) for value in values], local).view(first.shape)
    if op == reduction.AVG:
        reduction.average(total, len(tensors))
    return total.to(first.dtype)


def put_in_all(values: torch.Tensor, tensors: Tensors) -> None:
    for tensor in tensors:
        if tensor.layout is torch.strided:
            buffers.copy_into(values.view(tensor.shape), tensor)
        else:
            with torch.no_grad():
                tensor.copy_(values)


def all_reduce(pg: Group, tensors: Tensors, op: Any, async_op: bool) -> Work | None:
    """Combine all tensors of all ranks and write the result to each of them."""
    how = canonical(op)
    total = combine(pg, table.ALL_REDUCE, tensors, how, async_op)
    then = partial(put_in_all, total, tensors)
    return issue_any(Call(table.ALL_REDUCE, total, total, how, finish=then, result=list(tensors)), pg, async_op)


def reduce(pg: Group, tensors: Tensors, op: Any, root: int, root_tensor: int, async_op: bool) -> Work | None:
    """Combine all tensors of all ranks and write the result to one tensor of one rank."""
    how, root_tensor = canonical(op), check_root_tensor("reduce", root_tensor, len(tensors))
    total = combine(pg, table.REDUCE, tensors, how, async_op)
    recv, written = (total, [tensors[root_tensor]]) if pg.rank() == root else (None, [])
    then = partial(put_in_all, total, written)
    return issue_any(Call(table.REDUCE, total, recv, how, root, finish=then, result=list(tensors)), pg, async_op)


def broadcast(pg: Group, tensors: Tensors, root: int, root_tensor: int, async_op: bool) -> Work | None:
    """Write one tensor of one rank to all tensors of all ranks."""
    root_tensor = check_root_tensor("broadcast", root_tensor, len(tensors))
    check_same_kind("broadcast", tensors)
    flat = flatten(pg, [tensors[root_tensor]], tensors[0].dtype, async_op).clone()
    then = partial(put_in_all, flat, tensors)
    return issue_any(Call(table.BROADCAST, flat, flat, root=root, finish=then, result=list(tensors)), pg, async_op)


def all_gather(pg: Group, outputs: Sequence[Tensors], inputs: Tensors, async_op: bool) -> Work | None:
    """Gather all tensors of all ranks into each list of outputs, rank by rank."""
    check_same_kind("all_gather", [*inputs, *(tensor for each in outputs for tensor in each)])
    device = inputs[0].device
    flat = flatten(pg, [tensor.to(device) for tensor in inputs], inputs[0].dtype, async_op)
    everything = torch.empty(len(pg.ranks) * flat.numel(), dtype=flat.dtype, device=device)
    copies = [buffers.make_unpack(everything, list(each)) for each in outputs]

    def copy() -> None:
        for each in copies:
            each()

    call = Call(table.ALL_GATHER_SINGLE, flat, everything, finish=copy, result=as_result(outputs))
    return issue_any(call, pg, async_op)


def reduce_scatter(pg: Group, outputs: Tensors, inputs: Sequence[Tensors], op: Any, async_op: bool) -> Work | None:
    """Combine the lists of all tensors of all ranks and leave each output its entry."""
    check_same_kind("reduce_scatter", [*outputs, *(tensor for each in inputs for tensor in each)])
    how, device = canonical(op), outputs[0].device
    parts = [buffers.concatenate([tensor.to(device) for tensor in each], outputs[0].dtype) for each in inputs]
    total = combine(pg, table.REDUCE_SCATTER_SINGLE, parts, how, async_op)
    mine = torch.empty(total.numel() // len(pg.ranks), dtype=total.dtype, device=device)
    then = buffers.make_unpack(mine, list(outputs))
    return issue_any(
        Call(table.REDUCE_SCATTER_SINGLE, total, mine, how, finish=then, result=list(outputs)), pg, async_op
    )
