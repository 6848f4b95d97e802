"""Collectives on tensors and lists of tensors: one function for each row of the table.

Every rank of the group calls each of these, in the same order. The semantics are those of the functions of
the same name in ``torch.distributed`` and of the collective operations of MPI 6. Tensors may be of any
dtype, strided, empty, 0-dimensional, and on any device for which the group has a backend; a NumPy array
is used like a CPU tensor on its memory. Results are visible when the call returns, or, with ``async_op``,
when ``wait()`` of the Work returns; until then neither input nor output may be touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import ReduceOp

from hpcdist.core import table, world
from hpcdist.core.buffers import as_tensor, as_tensors
from hpcdist.core.call import Call
from hpcdist.core.group import Group
from hpcdist.core.issue import dispatch, issue
from hpcdist.core.lists import splits_of
from hpcdist.core.work import NO_TIMEOUT, Work, check_timeout


def all_reduce(tensor: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Work | None:
    """Combine the tensors of all ranks and write the result to ``tensor`` on every rank, bitwise the same.

    Args:
        tensor: input and output, written in place; the same number of elements and dtype on all ranks. A sparse
            COO tensor is summed.
        op: a ReduceOp; half types accumulate in float32.
        group: the group; None for the default one.
        async_op: return a Work at once.

    Returns:
        The Work if ``async_op``; None otherwise and on ranks outside the group.

    Raises:
        ValueError: an op without meaning for complex numbers; a destroyed group.
        RuntimeError: an op without meaning for the dtype.
        TypeError: not a tensor.
    """
    return issue(table.ALL_REDUCE, group, tensor, tensor, op, None, async_op)


def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Write the tensor of one rank to ``tensor`` on every rank.

    Args:
        tensor: input on the source, output elsewhere, written in place; the same size and dtype on all ranks.
        src, group_src: the source as a global rank or as a rank of the group, one of them.
        group, async_op: as for ``all_reduce``, and so is the return value.

    Raises:
        ValueError: no source, two sources, or one outside the group.
    """
    if (target := world.route(group, "broadcast", src, group_src)) is None:
        return None
    return issue(table.BROADCAST, target[0], tensor, tensor, None, target[1], async_op)


def reduce(
    tensor: Any,
    dst: int | None = None,
    op: Any = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Combine the tensors of all ranks and write the result to ``tensor`` on one rank.

    Args:
        tensor: input; on the destination also output, written in place. Elsewhere it is not changed.
        dst, group_dst: the destination as a global rank or as a rank of the group, one of them.
        op: a ReduceOp; half types accumulate in float32.
        group, async_op: as for ``all_reduce``, and so is the return value.

    Raises:
        ValueError, RuntimeError, TypeError: as for ``all_reduce``, and for a wrong destination.
    """
    if (target := world.route(group, "reduce", dst, group_dst)) is None:
        return None
    pg, root = target
    return issue(table.REDUCE, pg, tensor, tensor if pg.rank() == root else None, op, root, async_op)


def all_gather_single(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Work | None:
    """Gather the tensors of all ranks into one tensor on every rank, in rank order.

    Args:
        output_tensor: world_size times the elements of the input, concatenated or stacked: the shape does
            not matter, the number of elements does.
        input_tensor: this rank's share; the same size on all ranks. It may be the view of the output that it fills.
        group, async_op: as for ``all_reduce``, and so is the return value.

    Raises:
        ValueError: wrong sizes or dtypes.
    """
    return issue(table.ALL_GATHER_SINGLE, group, input_tensor, output_tensor, None, None, async_op)


all_gather_into_tensor = all_gather_single  # torch's earlier name


def gather_single(
    tensor: Any,
    gather_tensor: Any = None,
    dst: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gather the tensors of all ranks into one tensor on one rank, in rank order (MPI_Gather; c10d's since torch 2.14).

    Args:
        tensor: this rank's share; the same size on all ranks.
        gather_tensor: on the destination world_size times the elements of ``tensor``; not used elsewhere.
        dst, group_dst: the destination as a global rank or as a rank of the group; rank 0 if neither is given.
        group, async_op: as for ``all_reduce``, and so is the return value.

    Raises:
        ValueError: no ``gather_tensor`` on the destination, or wrong sizes or dtypes.
    """
    if (target := resolve_root(group, "gather_single", dst, group_dst)) is None:
        return None
    pg, root = target
    if pg.rank() != root:
        return issue(table.GATHER, pg, tensor, None, None, root, async_op)
    if gather_tensor.__class__ is list:  # that is ``gather``
        as_tensor(gather_tensor, "gather_tensor")
    if gather_tensor is None:
        raise ValueError(f"gather_tensor must be specified on the destination rank, rank {root} of the group")
    return issue(table.GATHER, pg, tensor, gather_tensor, None, root, async_op)


def reduce_scatter_single(
    output: Any, input: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    """Combine the tensors of all ranks and leave each rank its share of the result.

    Args:
        output: this rank's share.
        input: world_size times the elements of the output; share r goes to rank r.
        op: a ReduceOp; half types accumulate in float32.
        group, async_op: as for ``all_reduce``, and so is the return value.

    Raises:
        ValueError: wrong sizes or dtypes, and as for ``all_reduce``.
    """
    return issue(table.REDUCE_SCATTER_SINGLE, group, input, output, op, None, async_op)


reduce_scatter_tensor = reduce_scatter_single  # torch's earlier name


def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Work | None:
    """Send a share of ``input`` to every rank and receive one from each into ``output``.

    Args:
        output: the shares received, in rank order along dimension 0.
        input: the shares to send, in rank order along dimension 0.
        output_split_sizes: rows of ``output`` from each rank; None for equal shares. Some ranks may give splits and
            others None, as long as what one rank sends another is what that one receives.
        input_split_sizes: rows of ``input`` to each rank; None for equal shares.
        group, async_op: as for ``all_reduce``, and so is the return value.

    Raises:
        RuntimeError: rows that do not divide equally, or splits that do not add up to the rows.
        ValueError: dtypes that differ.
    """
    splits = None
    if output_split_sizes is not None or input_split_sizes is not None:
        splits = splits_of(output_split_sizes, input_split_sizes)
    return issue(table.ALL_TO_ALL_SINGLE, group, input, output, None, None, async_op, splits)


def barrier(
    group: Group | None = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | None = None,
) -> Work | None:
    """Wait until every rank of the group has called this.

    Args:
        group, async_op: as for ``all_reduce``, and so is the return value.
        device_ids: a list with a GPU's number: the barrier runs on this rank's GPU, after the calls queued there.
            Without it, or if the group carries no CUDA tensors, it runs on the CPU.
        timeout: the most to wait; None for the group's own limit.

    Raises:
        TypeError: ``device_ids`` is not a list, or ``timeout`` not a timedelta.
        ValueError: a timeout below zero.
        DistBackendError: the time was over first.
    """
    if device_ids is not None and not isinstance(device_ids, list):
        raise TypeError(
            f"Invalid function argument: device_ids type should be List[int], got {type(device_ids).__name__}"
        )
    if not isinstance(timeout, float):  # seconds, as ``Work.wait`` takes them
        check_timeout(timeout, may_be_zero=True)
    if timeout is None and not device_ids:
        return issue(table.BARRIER, group, None, None, None, None, async_op)
    if (pg := world.member_group(group, "barrier")) is None:
        return None
    work: Work | None
    if device_ids and "cuda" in pg.carriers and pg.coalescing is None:
        work = dispatch(pg, pg.backend("cuda"), Call(table.BARRIER), True)
    else:
        work = issue(table.BARRIER, pg, None, None, None, None, True)
    if work is None or async_op:
        return work
    work.wait(NO_TIMEOUT if timeout is None else timeout)
    return None


# -- lists ---------------------------------------------------------------------------------------------------


def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Work | None:
    """Gather the tensors of all ranks into a list on every rank.

    Args:
        tensor_list: one output for each rank, written in place; sizes may differ from rank to rank.
        tensor: this rank's input; as many elements as every rank's output for this rank.
        group, async_op: as for ``all_reduce``, and so is the return value.

    Raises:
        TypeError: not a list of tensors.
        ValueError: a list of another length than the group, or wrong dtypes or sizes.
    """
    if tensor_list.__class__ is not list:
        tensor_list = as_tensors(tensor_list, "tensor_list", writable=True)
    return issue(table.ALL_GATHER, group, tensor, tensor_list, None, None, async_op)


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
        gather_list: on the destination one output for each rank, written in place; None elsewhere.
        dst, group_dst: the destination as a global rank or as a rank of the group; rank 0 if neither is given.
        group, async_op: as for ``all_reduce``, and so is the return value.

    Raises:
        TypeError: not a tensor, or not a list of tensors.
        ValueError: a list on another rank than the destination, none there, or a wrong one.
    """
    if (target := resolve_root(group, "gather", dst, group_dst)) is None:
        return None
    pg, root = target
    recv = list_of_root(gather_list, "gather_list", "destination", pg, root, writable=True)
    return issue(table.GATHER, pg, tensor, recv, None, root, async_op)


def scatter(
    tensor: Any,
    scatter_list: Any = None,
    src: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Send each rank its tensor of one rank's list.

    Args:
        tensor: this rank's output, written in place; the same size on all ranks.
        scatter_list: on the source one input for each rank; None elsewhere.
        src, group_src: the source as a global rank or as a rank of the group; rank 0 if neither is given.
        group, async_op: as for ``all_reduce``, and so is the return value.

    Raises:
        TypeError: not a tensor, or not a list of tensors.
        ValueError: a list on another rank than the source, none there, or a wrong one.
    """
    if (target := resolve_root(group, "scatter", src, group_src)) is None:
        return None
    pg, root = target
    send = list_of_root(scatter_list, "scatter_list", "source", pg, root)
    return issue(table.SCATTER, pg, send, tensor, None, root, async_op)


def reduce_scatter(
    output: Any, input_list: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    """Combine the lists of all ranks element by element and leave each rank its entry.

    Args:
        output: this rank's entry of the result, written in place.
        input_list: one input for each rank; entry r has the same size on all ranks, entries may differ in size.
        op: a ReduceOp; half types accumulate in float32.
        group, async_op: as for ``all_reduce``, and so is the return value.

    Raises:
        TypeError: not a tensor, or not a list of tensors.
        ValueError: a list of another length than the group, or wrong dtypes or sizes.
    """
    if input_list.__class__ is not list:
        input_list = as_tensors(input_list, "input_list")
    return issue(table.REDUCE_SCATTER, group, input_list, output, op, None, async_op)


def all_to_all(
    output_tensor_list: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
) -> Work | None:
    """Send one tensor to every rank and receive one from each.

    Args:
        output_tensor_list: one output for each rank, written in place; sizes may differ.
        input_tensor_list: one input for each rank; sizes may differ.
        group, async_op: as for ``all_reduce``, and so is the return value.

    Raises:
        TypeError: not lists of tensors.
        ValueError: lists of another length than the group, or dtypes that differ.
    """
    if output_tensor_list.__class__ is not list:
        output_tensor_list = as_tensors(output_tensor_list, "output_tensor_list", writable=True)
    if input_tensor_list.__class__ is not list:
        input_tensor_list = as_tensors(input_tensor_list, "input_tensor_list")
    return issue(table.ALL_TO_ALL, group, input_tensor_list, output_tensor_list, None, None, async_op)


def resolve_root(group: Any, call: str, rank: int | None, rank_in_group: int | None) -> tuple[Group, int] | None:
    """Return the group and its root, by default the group's view of global rank 0; None outside the group."""
    return world.route(group, call, 0 if rank is None and rank_in_group is None else rank, rank_in_group)


def check_root(given: Any, name: str, side: str, pg: Group, root: int) -> bool:
    """Tell whether this rank is the root; ValueError if the root has no list, or another rank has one."""
    rank = pg.rank()
    if rank != root and given:
        raise ValueError(
            f"Argument ``{name}`` must NOT be specified on non-{side} ranks: this is rank {rank} of the group, "
            f"the {side} {root}"
        )
    if rank == root and not given:
        raise ValueError(f"Argument ``{name}`` must be specified on {side} rank {root}")
    return rank == root


def list_of_root(given: Any, name: str, side: str, pg: Group, root: int, writable: bool = False) -> Any:
    """Return the list of tensors that only the root gives; None on other ranks."""
    if not check_root(given, name, side, pg, root):
        return None
    return given if given.__class__ is list else as_tensors(given, name, writable)
