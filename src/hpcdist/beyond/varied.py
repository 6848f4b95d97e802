"""Collectives of varied sizes: each rank gives as many rows as it has, nobody gives the sizes of the others.

Every rank of the group calls each of these, in the same order. A first small exchange tells the ranks each other's
sizes, and compares what has to be equal: dtype, device type, and the shape but for the dimension that varies. A
difference is one error on every rank. The second call moves the rows (MPI_Allgatherv, MPI_Reduce_scatter,
MPI_Alltoallw; MPI 6). The sizes are exchanged by each call: a rank could only know from the others' that it need not.

Results can be differentiated, once. The gradient of a gather is a reduce_scatter and the other way round, so each rank
has to call ``backward`` through its result if one does, and a call records this on all ranks if the input of any rank
requires grad. A NumPy array stands for a CPU tensor on its memory, and is returned for one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hpcdist.beyond.gradients import WithGradient
from hpcdist.c10d.objects import all_gather_object
from hpcdist.core import table, world
from hpcdist.core.buffers import as_tensor, as_tensors
from hpcdist.core.errors import MismatchError
from hpcdist.core.group import Group
from hpcdist.core.issue import issue
from hpcdist.core.point_to_point import dense
from hpcdist.core.ranks import by_value, listed
from hpcdist.core.reduction import AVG, SUM, canonical, name_of


def all_gather_varied(tensor: Any, dim: int = 0, group: Any = None) -> Any:
    """Gather tensors of any sizes along one dimension, concatenated in rank order, on every rank.

    Args:
        tensor: this rank's rows, of any dtype, layout and number of rows, none too; the other dimensions and the dtype
            are the same on all ranks.
        dim: the dimension that varies.
        group: the group; None for the default one.

    Returns:
        The rows of all ranks, a contiguous tensor, and the list of the ranks' sizes along ``dim``, with which
        ``split(sizes, dim)`` takes them apart; None on ranks outside the group.

    Raises:
        TypeError: no dense tensor.
        ValueError, RuntimeError: on every rank, dtypes or other dimensions that differ, or no dimension ``dim``.
    """
    if (pg := world.member_group(group, "all_gather_varied")) is None:
        return None
    given = tensor_of(tensor, "tensor")
    is_fit = has_dimension(given, dim)
    size = given.size(dim) if is_fit else 0
    sizes, is_recorded = agree(
        pg, "all_gather_varied", described(given, dim), is_fit, dim, [size], needs_gradient(given)
    )
    if dim == 0 and not is_recorded:
        return like(tensor, gather(given, pg, sizes)), sizes
    rows = WithGradient.apply(
        recorded(given, is_recorded).movedim(dim, 0),
        lambda rows: gather(rows, pg, sizes),
        lambda gradient: reduce_scatter(gradient, pg, sizes, SUM),
    )
    return like(tensor, rows.movedim(0, dim)), sizes


def reduce_scatter_varied(tensor: Any, size: int, dim: int = 0, op: Any = ReduceOp.SUM, group: Any = None) -> Any:
    """Combine the tensors of all ranks and leave each rank as many rows as it asks for.

    Args:
        tensor: the rows for all ranks in rank order; the same shape and dtype on all ranks.
        size: how many rows along ``dim`` this rank receives; those of all ranks add up to ``tensor.size(dim)``.
        dim: the dimension that is divided.
        op: a ReduceOp; half types accumulate in float32. Gradients are there for SUM and AVG.
        group: the group; None for the default one.

    Returns:
        This rank's rows of the result, a contiguous tensor; None on ranks outside the group.

    Raises:
        TypeError: no dense tensor, or a size that is not an integer.
        ValueError, RuntimeError: on every rank, dtypes or shapes that differ, no dimension ``dim``, sizes that do not
            add up, an op that has no meaning for the dtype, or none that can be differentiated.
    """
    if (pg := world.member_group(group, "reduce_scatter_varied")) is None:
        return None
    given, mine, op = tensor_of(tensor, "tensor"), operator.index(size), canonical(op)
    is_fit = has_dimension(given, dim)
    along = dim % given.dim() if is_fit else dim
    form = f"{described(given, None)} along dimension {along}, combined by {name_of(op)}"
    sizes, is_recorded = agree(pg, "reduce_scatter_varied", form, is_fit, dim, [mine], needs_gradient(given))
    if min(sizes) < 0 or sum(sizes) != given.size(dim):
        raise MismatchError(
            f"reduce_scatter_varied: the ranks ask for {sizes} rows; expected numbers that add up to "
            f"{given.size(dim)}, the tensor's size along dimension {dim}"
        )
    if dim == 0 and not is_recorded:
        return like(tensor, reduce_scatter(given, pg, sizes, op))
    if is_recorded and op not in (SUM, AVG):
        raise RuntimeError(
            f"reduce_scatter_varied has no gradient for {op}; expected SUM or AVG, or tensors without requires_grad"
        )
    share = 1 / pg.size() if op == AVG else 1
    rows = WithGradient.apply(
        recorded(given, is_recorded).movedim(dim, 0),
        lambda rows: reduce_scatter(rows, pg, sizes, op),
        lambda gradient: gather(gradient, pg, sizes) * share,
    )
    return like(tensor, rows.movedim(0, dim))


def all_to_all_varied(tensors: Any, dim: int = 0, group: Any = None) -> Any:
    """Send one tensor to every rank and receive one from each, of any sizes along one dimension.

    Args:
        tensors: one tensor a rank, in rank order, of any number of rows, none too; the other dimensions and the dtype
            are the same in all lists.
        dim: the dimension that varies.
        group: the group; None for the default one.

    Returns:
        The list of what each rank sent to this one, contiguous tensors; None on ranks outside the group.

    Raises:
        TypeError: no list of dense tensors.
        ValueError, RuntimeError: on every rank, lists of another length than the group, dtypes or other dimensions that
            differ, or no dimension ``dim``.
    """
    if (pg := world.member_group(group, "all_to_all_varied")) is None:
        return None
    if not isinstance(tensors, (list, tuple)):
        as_tensors(tensors, "tensors")
    given = [tensor_of(each, "tensors") for each in tensors]
    forms = dict.fromkeys(described(each, dim) for each in given)
    is_fit = len(given) == pg.size() and len(forms) == 1 and has_dimension(given[0], dim)
    form = ", ".join(forms) if is_fit else f"a list of {len(given)}: {', '.join(forms)}"
    sizes = [each.size(dim) for each in given] if is_fit else [0] * pg.size()
    received, is_recorded = agree(pg, "all_to_all_varied", form, is_fit, dim, sizes, needs_gradient(*given))
    if not is_recorded and dim == 0:
        rows = torch.cat(given)
        parts = torch.split_with_sizes(exchange(rows, pg, sizes, received), received)
        return [like(tensors[0], part) for part in parts]
    out = WithGradient.apply(
        torch.cat([recorded(each, is_recorded).movedim(dim, 0) for each in given]),
        lambda rows: exchange(rows, pg, sizes, received),
        lambda gradient: exchange(gradient, pg, received, sizes),
    )
    return [like(tensors[0], part.movedim(0, dim)) for part in torch.split_with_sizes(out, received)]


# -- what the ranks exchange first -------------------------------------------------------------------------


def tensor_of(value: Any, name: str) -> Tensor:
    """Return a caller's tensor or array as a tensor, still in its graph; TypeError for what is sparse."""
    return dense(value if isinstance(value, Tensor) else as_tensor(value, name))


def has_dimension(tensor: Tensor, dim: int) -> bool:
    """Tell whether a tensor has a dimension."""
    return -tensor.dim() <= dim < tensor.dim()


def needs_gradient(*tensors: Tensor) -> bool:
    """Tell whether a call on these tensors is recorded for their gradients."""
    return torch.is_grad_enabled() and any(each.requires_grad for each in tensors)


def described(tensor: Tensor, dim: int | None) -> str:
    """Return what has to be the same on all ranks, in words: all but the size along a dimension."""
    shape: list[Any] = list(tensor.shape)
    if dim is not None and has_dimension(tensor, dim):
        shape[dim] = "any"
    return f"{tensor.dtype} {shape} on {tensor.device.type}"


def agree(
    pg: Group, call: str, form: str, is_fit: bool, dim: int, sizes: list[int], is_recorded: bool
) -> tuple[list[int], bool]:
    """Return each rank's size for this rank, and whether any rank's input needs a gradient; every rank calls.

    ``form`` says in words what has to be the same, ``is_fit`` whether the call can be made with it: else MismatchError.
    ``sizes`` are this rank's one size for everyone, or one for each rank.
    """
    heads: list[Any] = [None] * pg.size()
    if len(sizes) == 1:
        all_gather_object(heads, (sizes[0], form, is_recorded), pg)
    else:  # every rank's sizes for all others would be the square of their number
        mark = crc32(form.encode())
        mine = torch.from_numpy(np.array([(size, mark, is_recorded) for size in sizes])).to(pg.any_backend().device)
        received = torch.empty_like(mine)
        issue(table.ALL_TO_ALL_SINGLE, pg, mine, received)
        heads = received.tolist()
    theirs, forms, recorded = zip(*heads, strict=True)
    if is_fit and len(set(forms)) == 1:
        return list(theirs), any(recorded)
    all_gather_object(heads, form, pg)
    found = "; ".join(f"{text} of {listed(those)}" for text, those in by_value(heads).items())
    raise MismatchError(
        f"{call}: the ranks' tensors do not fit: {found}; expected a dimension {dim}, and otherwise "
        "one dtype, device type and shape"
        + (f", in lists of {pg.size()} tensors, one for each rank" if call == "all_to_all_varied" else "")
    )


def recorded(tensor: Tensor, is_recorded: bool) -> Tensor:
    """Return a tensor whose result is part of a graph if any rank's is: all ranks take part in its gradient."""
    if is_recorded and not tensor.requires_grad and torch.is_grad_enabled():
        return tensor.detach().requires_grad_()
    return tensor


def like(given: Any, tensor: Tensor) -> Any:
    """Return a result as the caller gave the input, contiguous: a tensor or an array."""
    made = tensor.contiguous()
    return made.detach().numpy() if isinstance(given, np.ndarray) else made


# -- rows between the ranks --------------------------------------------------------------------------------


def counted(rows: Tensor, sizes: Sequence[int]) -> list[int]:
    """Return the elements of so many rows each."""
    width = prod(rows.shape[1:])
    return [size * width for size in sizes]


def gather(rows: Tensor, pg: Group, sizes: list[int]) -> Tensor:
    """Return the rows of all ranks."""
    out = rows.new_empty((sum(sizes), *rows.shape[1:]))
    if len(set(sizes)) == 1:
        issue(table.ALL_GATHER_SINGLE, pg, rows, out)
    else:
        issue(table.ALL_GATHER, pg, rows, out, counts=([rows.numel()], counted(rows, sizes)))
    return out


def reduce_scatter(rows: Tensor, pg: Group, sizes: list[int], op: Any) -> Tensor:
    """Return this rank's rows of the result."""
    out = rows.new_empty((sizes[pg.rank()], *rows.shape[1:]))
    if len(set(sizes)) == 1:
        issue(table.REDUCE_SCATTER_SINGLE, pg, rows, out, op)
    else:
        issue(table.REDUCE_SCATTER, pg, rows, out, op, counts=(counted(rows, sizes), [out.numel()]))
    return out


def exchange(rows: Tensor, pg: Group, sent: list[int], received: list[int]) -> Tensor:
    """Return the rows for this rank."""
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    issue(table.ALL_TO_ALL, pg, rows, out, counts=(counted(rows, sent), counted(rows, received)))
    return out
