"""What could PyTorch 1.6 call on a list of tensors, one for each device of a process?

Every tensor counts as a rank: what is reduced is combined over all tensors of all ranks, what is gathered has an
entry for each. torch dropped these names in 2.0; they say so and still work, on the CPU too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp
from typing_extensions import deprecated

from hpcdist.c10d.names import Backend
from hpcdist.core import reduction, world
from hpcdist.core.buffers import as_tensors, joined, same_dtype, scattering
from hpcdist.core.issue import canonical, issue_any
from hpcdist.core.table import ALL_GATHER_SINGLE, ALL_REDUCE, BROADCAST, REDUCE, REDUCE_SCATTER_SINGLE
from hpcdist.core.work import Work

dist_backend = Backend  # what the names of backends were found under before torch 1.0

INSTEAD = "torch dropped the functions on one tensor a device; use one process a device and `{}`"


def combined(tensors: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """Return this process's tensors combined, in memory of their own."""
    same_dtype(*tensors)
    local = op if op not in (ReduceOp.AVG, ReduceOp.PREMUL_SUM) else ReduceOp.SUM
    first = tensors[0].clone()
    values = [first, *(tensor.to(first.device) for tensor in tensors[1:])]
    wide = reduction.WIDE.get(first.dtype)
    if wide is not None:
        values = [value.to(wide) for value in values]
    total = reduction.fold([value.reshape(-1) for value in values], local).view(first.shape)
    if op == ReduceOp.AVG:
        reduction.average(total, len(tensors))
    return total.to(first.dtype)


def checked(call: str, tensors: Any, name: str) -> list[torch.Tensor]:
    """Return a list of tensors that has at least one."""
    given = as_tensors(tensors, name, writable=True)
    if not given:
        raise ValueError(f"{call}: `{name}` is empty; expected one tensor for each device of this process")
    return given


@deprecated(INSTEAD.format("broadcast"), category=FutureWarning)
def broadcast_multigpu(
    tensor_list: Any, src: int, group: Any = None, async_op: bool = False, src_tensor: int = 0
) -> Work | None:
    """Write one tensor of one rank to all tensors of all ranks.

    Args:
        tensor_list: one tensor a device, written in place.
        src: the source as a global rank.
        group: the group; None for the default one.
        async_op: return a Work at once.
        src_tensor: which tensor of the source's list.

    Returns:
        The Work if ``async_op``; None otherwise and on ranks outside the group.
    """
    pg = world.joined(group, "broadcast_multigpu")
    if pg is None:
        return None
    given = checked("broadcast_multigpu", tensor_list, "tensor_list")
    flat = given[src_tensor].clone()

    def copy() -> None:
        for tensor in given:
            tensor.copy_(flat)

    return issue_any(BROADCAST, pg, flat, flat, None, world.group_rank(pg, src, None), async_op, None, copy, given)


@deprecated(INSTEAD.format("all_reduce"), category=FutureWarning)
def all_reduce_multigpu(
    tensor_list: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    """Combine all tensors of all ranks and write the result to each of them.

    Args:
        tensor_list: one tensor a device, written in place; as many on every rank.
        op: a ReduceOp.
        group: the group; None for the default one.
        async_op: return a Work at once.

    Returns:
        The Work if ``async_op``; None otherwise and on ranks outside the group.
    """
    pg = world.joined(group, "all_reduce_multigpu")
    if pg is None:
        return None
    given, how = checked("all_reduce_multigpu", tensor_list, "tensor_list"), canonical(op)
    total = combined(given, how)

    def copy() -> None:
        for tensor in given:
            tensor.copy_(total)

    return issue_any(ALL_REDUCE, pg, total, total, how, None, async_op, None, copy, given)


@deprecated(INSTEAD.format("reduce"), category=FutureWarning)
def reduce_multigpu(
    tensor_list: Any, dst: int, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False, dst_tensor: int = 0
) -> Work | None:
    """Combine all tensors of all ranks and write the result to one tensor of one rank.

    Args:
        tensor_list: one tensor a device; as many on every rank.
        dst: the destination as a global rank.
        op: a ReduceOp.
        group: the group; None for the default one.
        async_op: return a Work at once.
        dst_tensor: which tensor of the destination's list is written in place.

    Returns:
        The Work if ``async_op``; None otherwise and on ranks outside the group.
    """
    pg = world.joined(group, "reduce_multigpu")
    if pg is None:
        return None
    root = world.group_rank(pg, dst, None)
    given, how = checked("reduce_multigpu", tensor_list, "tensor_list"), canonical(op)
    total = combined(given, how)
    recv = total if pg.rank() == root else None

    def copy() -> None:
        if recv is not None:
            given[dst_tensor].copy_(recv)

    return issue_any(REDUCE, pg, total, recv, how, root, async_op, None, copy, given)


@deprecated(INSTEAD.format("all_gather"), category=FutureWarning)
def all_gather_multigpu(
    output_tensor_lists: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
) -> Work | None:
    """Gather all tensors of all ranks into a list for every device.

    Args:
        output_tensor_lists: for each device a list of one output for every tensor of every rank, rank by rank.
        input_tensor_list: one tensor a device; all of one size.
        group: the group; None for the default one.
        async_op: return a Work at once.

    Returns:
        The Work if ``async_op``; None otherwise and on ranks outside the group.

    Raises:
        ValueError: a list of another length.
    """
    pg = world.joined(group, "all_gather_multigpu")
    if pg is None:
        return None
    given = checked("all_gather_multigpu", input_tensor_list, "input_tensor_list")
    outputs = [as_tensors(each, "output_tensor_lists", writable=True) for each in output_tensor_lists]
    expected = pg.size() * len(given)
    if len(outputs) != len(given) or any(len(each) != expected for each in outputs):
        raise ValueError(
            f"all_gather_multigpu: `output_tensor_lists` has lengths {[len(each) for each in outputs]}; expected "
            f"{len(given)} lists of {expected} tensors"
        )
    flat = joined([tensor.to(given[0].device) for tensor in given])
    everything = torch.empty(pg.size() * flat.numel(), dtype=flat.dtype, device=flat.device)
    copies = [scattering(everything, each) for each in outputs]

    def copy() -> None:
        for each in copies:
            each()

    result = [tensor for each in outputs for tensor in each]
    return issue_any(ALL_GATHER_SINGLE, pg, flat, everything, None, None, async_op, None, copy, result)


@deprecated(INSTEAD.format("reduce_scatter"), category=FutureWarning)
def reduce_scatter_multigpu(
    output_tensor_list: Any, input_tensor_lists: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    """Combine the lists of all devices of all ranks and leave each device its entry.

    Args:
        output_tensor_list: one output a device, written in place; all of one size.
        input_tensor_lists: for each device a list of one input for every output of every rank, rank by rank.
        op: a ReduceOp.
        group: the group; None for the default one.
        async_op: return a Work at once.

    Returns:
        The Work if ``async_op``; None otherwise and on ranks outside the group.

    Raises:
        ValueError: a list of another length.
    """
    pg = world.joined(group, "reduce_scatter_multigpu")
    if pg is None:
        return None
    how = canonical(op)
    outputs = checked("reduce_scatter_multigpu", output_tensor_list, "output_tensor_list")
    inputs = [as_tensors(each, "input_tensor_lists") for each in input_tensor_lists]
    expected = pg.size() * len(outputs)
    if len(inputs) != len(outputs) or any(len(each) != expected for each in inputs):
        raise ValueError(
            f"reduce_scatter_multigpu: `input_tensor_lists` has lengths {[len(each) for each in inputs]}; expected "
            f"{len(outputs)} lists of {expected} tensors"
        )
    device = outputs[0].device
    total = combined([joined([tensor.to(device) for tensor in each]) for each in inputs], how)
    mine = torch.empty(total.numel() // pg.size(), dtype=total.dtype, device=device)
    copy = scattering(mine, outputs)
    return issue_any(REDUCE_SCATTER_SINGLE, pg, total, mine, how, None, async_op, None, copy, outputs)
