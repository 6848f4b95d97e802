"""What can I call on lists of tensors? Each is a row of the table on one tensor that holds all of them.

Every rank of the group calls each of these, in the same order; dtypes, shapes, visibility and errors are as
in ``hpcdist.c10d.collectives``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp

from hpcdist.core import world
from hpcdist.core.buffers import (
    as_tensor,
    as_tensors,
    check_length,
    check_sizes,
    joined,
    joint,
    same_dtype,
    scattering,
)
from hpcdist.core.group import ProcessGroup
from hpcdist.core.issue import issue_any
from hpcdist.core.table import (
    ALL_GATHER,
    ALL_GATHER_SINGLE,
    ALL_TO_ALL,
    ALL_TO_ALL_SINGLE,
    GATHER,
    REDUCE_SCATTER,
    REDUCE_SCATTER_SINGLE,
    SCATTER,
)
from hpcdist.core.work import Work


def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Work | None:
    """Gather the tensors of all ranks into a list on every rank.

    Args:
        tensor_list: one output a rank, written in place; sizes may differ from rank to rank.
        tensor: this rank's input; as many elements as every rank's output for this rank.
        group: the group; None for the default one.
        async_op: return a Work at once.

    Returns:
        The Work if ``async_op``; None otherwise and on ranks outside the group.

    Raises:
        TypeError: no list of tensors.
        ValueError: a list of another length than the group, or dtypes or sizes that do not fit.
    """
    pg = world.joined(group, "all_gather")
    if pg is None:
        return None
    outputs = as_tensors(tensor_list, "tensor_list", writable=True)
    given = as_tensor(tensor, "tensor")
    same_dtype(given, *outputs)
    check_length("all_gather", "tensor_list", outputs, pg.size())
    check_sizes("all_gather", "tensor_list", [outputs[pg.rank()]], given)
    received = [output.numel() for output in outputs]
    flat = joint(outputs, outputs[0])
    then = scattering(flat, outputs)
    if len(set(received)) == 1:
        return issue_any(ALL_GATHER_SINGLE, pg, given, flat, None, None, async_op, None, then, outputs)
    return issue_any(ALL_GATHER, pg, given, flat, None, None, async_op, ([given.numel()], received), then, outputs)


def gather(
    tensor: Any,
    gather_list: Any = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gather the tensors of all ranks into a list on one rank.

    Args:
        tensor: this rank's input; the same size on all ranks.
        gather_list: on the destination one output a rank, written in place; None elsewhere.
        dst: the destination as a global rank; rank 0 where neither this nor ``group_dst`` is given.
        group: the group; None for the default one.
        async_op: return a Work at once.
        group_dst: the destination as a rank of the group.

    Returns:
        The Work if ``async_op``; None otherwise and on ranks outside the group.

    Raises:
        TypeError: no tensor, or no list of tensors.
        ValueError: a list on another rank than the destination, none there, or one that does not fit.
    """
    way = rooted(group, "gather", dst, group_dst)
    if way is None:
        return None
    pg, root = way
    given = as_tensor(tensor, "tensor")
    if pg.rank() != root:
        if gather_list:
            raise ValueError(
                f"Argument ``gather_list`` must NOT be specified on non-destination ranks: this is rank {pg.rank()} "
                f"of the group, the destination {root}"
            )
        return issue_any(GATHER, pg, given, None, None, root, async_op)
    if not gather_list:
        raise ValueError(f"Argument ``gather_list`` must be specified on destination rank {root}")
    outputs = as_tensors(gather_list, "gather_list", writable=True)
    same_dtype(given, *outputs)
    check_length("gather", "gather_list", outputs, pg.size())
    check_sizes("gather", "gather_list", outputs, given)
    flat = joint(outputs, given)
    return issue_any(GATHER, pg, given, flat, None, root, async_op, None, scattering(flat, outputs), outputs)


def scatter(
    tensor: Any,
    scatter_list: Any = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Hand each rank its tensor of one rank's list.

    Args:
        tensor: this rank's output, written in place; the same size on all ranks.
        scatter_list: on the source one input a rank; None elsewhere.
        src: the source as a global rank; rank 0 where neither this nor ``group_src`` is given.
        group: the group; None for the default one.
        async_op: return a Work at once.
        group_src: the source as a rank of the group.

    Returns:
        The Work if ``async_op``; None otherwise and on ranks outside the group.

    Raises:
        TypeError: no tensor, or no list of tensors.
        ValueError: a list on another rank than the source, none there, or one that does not fit.
    """
    way = rooted(group, "scatter", src, group_src)
    if way is None:
        return None
    pg, root = way
    output = as_tensor(tensor, "tensor", writable=True)
    if pg.rank() != root:
        if scatter_list:
            raise ValueError(
                f"Argument ``scatter_list`` must NOT be specified on non-source ranks: this is rank {pg.rank()} "
                f"of the group, the source {root}"
            )
        return issue_any(SCATTER, pg, None, output, None, root, async_op)
    if not scatter_list:
        raise ValueError(f"Argument ``scatter_list`` must be specified on source rank {root}")
    inputs = as_tensors(scatter_list, "scatter_list")
    same_dtype(output, *inputs)
    check_length("scatter", "scatter_list", inputs, pg.size())
    check_sizes("scatter", "scatter_list", inputs, output)
    return issue_any(SCATTER, pg, in_one(pg, inputs, async_op), output, None, root, async_op)


def in_one(pg: ProcessGroup, inputs: list[torch.Tensor], async_op: bool) -> torch.Tensor:
    """Return the elements of a call's inputs one after another; of a synchronous one, once what is queued has ended."""
    if not async_op:
        pg.backend(inputs[0].device).settle()
    return joined(inputs)


def reduce_scatter(
    output: Any, input_list: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    """Combine the lists of all ranks element by element and leave each rank its entry.

    Args:
        output: this rank's entry of the result, written in place.
        input_list: one input a rank; entry r has the same size on all ranks, entries may differ in size.
        op: a ReduceOp; half types accumulate in float32.
        group: the group; None for the default one.
        async_op: return a Work at once.

    Returns:
        The Work if ``async_op``; None otherwise and on ranks outside the group.

    Raises:
        TypeError: no tensor, or no list of tensors.
        ValueError: a list of another length than the group, or dtypes or sizes that do not fit.
    """
    pg = world.joined(group, "reduce_scatter")
    if pg is None:
        return None
    target = as_tensor(output, "output", writable=True)
    inputs = as_tensors(input_list, "input_list")
    same_dtype(target, *inputs)
    check_length("reduce_scatter", "input_list", inputs, pg.size())
    check_sizes("reduce_scatter", "input_list", [inputs[pg.rank()]], target)
    sent = [tensor.numel() for tensor in inputs]
    given = in_one(pg, inputs, async_op)
    if len(set(sent)) == 1:
        return issue_any(REDUCE_SCATTER_SINGLE, pg, given, target, op, None, async_op)
    return issue_any(REDUCE_SCATTER, pg, given, target, op, None, async_op, (sent, [target.numel()]))


def all_to_all(
    output_tensor_list: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
) -> Work | None:
    """Send one tensor to every rank and receive one from each.

    Args:
        output_tensor_list: one output a rank, written in place; sizes may differ.
        input_tensor_list: one input a rank; sizes may differ.
        group: the group; None for the default one.
        async_op: return a Work at once.

    Returns:
        The Work if ``async_op``; None otherwise and on ranks outside the group.

    Raises:
        TypeError: no lists of tensors.
        ValueError: lists of another length than the group, or dtypes that differ.
    """
    pg = world.joined(group, "all_to_all")
    if pg is None:
        return None
    outputs = as_tensors(output_tensor_list, "output_tensor_list", writable=True)
    inputs = as_tensors(input_tensor_list, "input_tensor_list")
    same_dtype(*outputs, *inputs)
    check_length("all_to_all", "output_tensor_list", outputs, pg.size())
    check_length("all_to_all", "input_tensor_list", inputs, pg.size())
    counts = ([each.numel() for each in inputs], [each.numel() for each in outputs])
    flat = joint(outputs, outputs[0])
    then = scattering(flat, outputs)
    given = in_one(pg, inputs, async_op)
    if len({*counts[0], *counts[1]}) == 1:
        return issue_any(ALL_TO_ALL_SINGLE, pg, given, flat, None, None, async_op, None, then, outputs)
    return issue_any(ALL_TO_ALL, pg, given, flat, None, None, async_op, counts, then, outputs)


def rooted(group: Any, call: str, rank: int | None, rank_in_group: int | None) -> tuple[ProcessGroup, int] | None:
    """Return the group and its root, by default the group's view of global rank 0; None outside the group."""
    return world.route(group, call, 0 if rank is None and rank_in_group is None else rank, rank_in_group)
