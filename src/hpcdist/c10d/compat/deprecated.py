"""Names that torch renamed or dropped: they still work, and each warns once with the name to use.

PyTorch 1.6 had functions on a list of tensors, one for each device of a process, which torch dropped in 2.0. They work
on the CPU too; ``hpcdist.core.several`` explains what they compute.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import ReduceOp
from typing_extensions import deprecated

from hpcdist.c10d.collectives import all_gather_single, gather_single, reduce_scatter_single
from hpcdist.c10d.names import Backend
from hpcdist.core import several, world
from hpcdist.core.buffers import as_tensor_lists, as_tensors
from hpcdist.core.group import Group
from hpcdist.core.lists import check_lengths, check_pairs
from hpcdist.core.work import Work

dist_backend = Backend  # the class of backends' names before torch 1.0


@deprecated("`_all_gather_base` is a private function; use `all_gather_single` instead", category=FutureWarning)
def _all_gather_base(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Work | None:
    """Gather into one tensor: the private name of ``all_gather_single`` before torch 1.13."""
    return all_gather_single(output_tensor, input_tensor, group, async_op)


@deprecated("`_reduce_scatter_base` is a private function; use `reduce_scatter_single` instead", category=FutureWarning)
def _reduce_scatter_base(
    output: Any, input: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    """Combine and scatter one tensor: the private name of ``reduce_scatter_single`` before torch 1.13."""
    return reduce_scatter_single(output, input, op, group, async_op)


@deprecated("`gather_into_tensor` is deprecated; use `gather_single` instead", category=FutureWarning)
def gather_into_tensor(
    tensor: Any,
    gather_tensor: Any = None,
    dst: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gather into one tensor on one rank: an earlier name of ``gather_single`` in torch 2.14."""
    return gather_single(tensor, gather_tensor, dst, group, async_op, group_dst)


# -- one tensor for each device of a process ---------------------------------------------------------------


INSTEAD = "torch dropped the functions on one tensor a device; use one process a device and `{}`"


@deprecated(INSTEAD.format("broadcast"), category=FutureWarning)
def broadcast_multigpu(
    tensor_list: Any, src: int, group: Any = None, async_op: bool = False, src_tensor: int = 0
) -> Work | None:
    """Write one tensor of one rank to all tensors of all ranks.

    Args:
        tensor_list: one tensor for each device, written in place.
        src: the source as a global rank.
        group, async_op: as for ``broadcast``, and so is the return value.
        src_tensor: which tensor of the source's list.
    """
    if (pg := world.member_group(group, "broadcast_multigpu")) is None:
        return None
    given = as_tensors(tensor_list, "tensor_list", writable=True)
    return several.broadcast(pg, given, world.group_rank(pg, src, None), src_tensor, async_op)


@deprecated(INSTEAD.format("all_reduce"), category=FutureWarning)
def all_reduce_multigpu(
    tensor_list: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    """Combine all tensors of all ranks and write the result to each of them.

    Args:
        tensor_list: one tensor for each device, written in place; as many on every rank.
        op, group, async_op: as for ``all_reduce``, and so is the return value.
    """
    if (pg := world.member_group(group, "all_reduce_multigpu")) is None:
        return None
    return several.all_reduce(pg, as_tensors(tensor_list, "tensor_list", writable=True), op, async_op)


@deprecated(INSTEAD.format("reduce"), category=FutureWarning)
def reduce_multigpu(
    tensor_list: Any, dst: int, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False, dst_tensor: int = 0
) -> Work | None:
    """Combine all tensors of all ranks and write the result to one tensor of one rank.

    Args:
        tensor_list: one tensor for each device; as many on every rank.
        dst: the destination as a global rank.
        op, group, async_op: as for ``reduce``, and so is the return value.
        dst_tensor: which tensor of the destination's list is written in place.
    """
    if (pg := world.member_group(group, "reduce_multigpu")) is None:
        return None
    given = as_tensors(tensor_list, "tensor_list", writable=True)
    return several.reduce(pg, given, op, world.group_rank(pg, dst, None), dst_tensor, async_op)


@deprecated(INSTEAD.format("all_gather"), category=FutureWarning)
def all_gather_multigpu(
    output_tensor_lists: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
) -> Work | None:
    """Gather all tensors of all ranks into a list for every device.

    Args:
        output_tensor_lists: for each device a list of one output for every tensor of every rank, rank by rank.
        input_tensor_list: one tensor for each device; all of one size.
        group, async_op: as for ``all_gather``, and so is the return value.

    Raises:
        ValueError: a list of another length.
    """
    if (pg := world.member_group(group, "all_gather_multigpu")) is None:
        return None
    given = as_tensors(input_tensor_list, "input_tensor_list")
    outputs = as_tensor_lists(output_tensor_lists, "output_tensor_lists", writable=True)
    check_pairs("all_gather_multigpu", outputs, given)
    check_lengths("all_gather_multigpu", "output", outputs, pg.size() * len(given))
    return several.all_gather(pg, outputs, given, async_op)


@deprecated(INSTEAD.format("reduce_scatter"), category=FutureWarning)
def reduce_scatter_multigpu(
    output_tensor_list: Any, input_tensor_lists: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    """Combine the lists of all devices of all ranks and leave each device its entry.

    Args:
        output_tensor_list: one output a device, written in place; all of one size.
        input_tensor_lists: for each device a list of one input for every output of every rank, rank by rank.
        op, group, async_op: as for ``reduce_scatter``, and so is the return value.

    Raises:
        ValueError: a list of another length.
    """
    if (pg := world.member_group(group, "reduce_scatter_multigpu")) is None:
        return None
    outputs = as_tensors(output_tensor_list, "output_tensor_list", writable=True)
    inputs = as_tensor_lists(input_tensor_lists, "input_tensor_lists")
    check_pairs("reduce_scatter_multigpu", outputs, inputs)
    check_lengths("reduce_scatter_multigpu", "input", inputs, pg.size() * len(outputs))
    return several.reduce_scatter(pg, outputs, inputs, op, async_op)
