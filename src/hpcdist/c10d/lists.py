"""Collectives on lists of tensors.

Every rank of the group calls each of these, in the same order; dtypes, shapes, visibility and errors are as in
``hpcdist.c10d.collectives``.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import ReduceOp

from hpcdist.core import world
from hpcdist.core.buffers import as_tensors
from hpcdist.core.group import Group
from hpcdist.core.issue import issue
from hpcdist.core.table import ALL_GATHER, ALL_TO_ALL, GATHER, REDUCE_SCATTER, SCATTER
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
    if tensor_list.__class__ is not list:
        tensor_list = as_tensors(tensor_list, "tensor_list", writable=True)
    return issue(ALL_GATHER, group, tensor, tensor_list, None, None, async_op)


def gather(
    tensor: Any,
    gather_list: Any = None,
    dst: int | None = None,
    group: Group | None = None,
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
    if (target := rooted(group, "gather", dst, group_dst)) is None:
        return None
    pg, root = target
    recv = list_of_root(gather_list, "gather_list", "destination", pg, root, writable=True)
    return issue(GATHER, pg, tensor, recv, None, root, async_op)


def scatter(
    tensor: Any,
    scatter_list: Any = None,
    src: int | None = None,
    group: Group | None = None,
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
    if (target := rooted(group, "scatter", src, group_src)) is None:
        return None
    pg, root = target
    send = list_of_root(scatter_list, "scatter_list", "source", pg, root)
    return issue(SCATTER, pg, send, tensor, None, root, async_op)


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
    if input_list.__class__ is not list:
        input_list = as_tensors(input_list, "input_list")
    return issue(REDUCE_SCATTER, group, input_list, output, op, None, async_op)


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
    if output_tensor_list.__class__ is not list:
        output_tensor_list = as_tensors(output_tensor_list, "output_tensor_list", writable=True)
    if input_tensor_list.__class__ is not list:
        input_tensor_list = as_tensors(input_tensor_list, "input_tensor_list")
    return issue(ALL_TO_ALL, group, input_tensor_list, output_tensor_list, None, None, async_op)


def rooted(group: Any, call: str, rank: int | None, rank_in_group: int | None) -> tuple[Group, int] | None:
    """Return the group and its root, by default the group's view of global rank 0; None outside the group."""
    return world.route(group, call, 0 if rank is None and rank_in_group is None else rank, rank_in_group)


def list_of_root(given: Any, name: str, side: str, pg: Group, root: int, writable: bool = False) -> Any:
    """Return the list that only the root gives, None on other ranks; ValueError if another gives one, or it none."""
    rank = pg.rank()
    if rank != root and given:
        raise ValueError(
            f"Argument ``{name}`` must NOT be specified on non-{side} ranks: this is rank {rank} of the group, "
            f"the {side} {root}"
        )
    if rank == root and not given:
        raise ValueError(f"Argument ``{name}`` must be specified on {side} rank {root}")
    return None if rank != root else given if given.__class__ is list else as_tensors(given, name, writable)
