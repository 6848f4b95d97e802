"""Collectives of varied sizes: each rank gives its own number of rows, without knowing the others' numbers.

Every rank of the group calls each of these, in the same order. First the ranks exchange their sizes, and compare the
dtype, the device type, and the shape without the dimension that varies. A difference is one error on every rank. Each
call exchanges the sizes, because no rank knows whether another's has changed. The rows are moved by a second call
(MPI_Allgatherv, MPI_Reduce_scatter, MPI_Alltoallw; MPI 6), or with the sizes if they are few (``Slots``).

Results can be differentiated, once. The gradient of a gather is a reduce_scatter and vice versa, so all ranks must call
``backward`` through their results if one does, and a call is recorded on all ranks if the input of any rank requires
grad. A NumPy array is used like a CPU tensor on its memory, and the result is an array then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import memmove
from functools import lru_cache
from hashlib import blake2b
from math import prod
from struct import Struct
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hpcdist.beyond.gradients import WithGradient
from hpcdist.c10d.objects import all_gather_object
from hpcdist.core import table, world
from hpcdist.core.buffers import as_tensor, as_tensors, cat, for_reading, is_plain
from hpcdist.core.errors import MismatchError
from hpcdist.core.group import Group
from hpcdist.core.issue import compare, issue
from hpcdist.core.point_to_point import check_one_dense
from hpcdist.core.ranks import as_int, format_ranks, ranks_by_value
from hpcdist.core.reduction import AVG, SUM, canonical, name_of

FORMS_KEPT = 256
HEAD = Struct("4q")  # of a slot: the number of rows, the form's hash, flags, the bytes of the sender's largest part
FILLED = 2  # flag of a slot that contains its rows; flag 1: the input requires grad
LARGEST = (1 << 63) - 1
# bytes of all slots. 2 ranks, Open MPI 5.0.11, µs with slots and with two calls: all_gather_varied of 4 KiB and 8 KiB
# 22 and 35, of 16 KiB on both 32 and 24; all_to_all_varied of 4 KiB and 8 KiB 34 and 70
SLOTS_MAX = 1 << 15


def all_gather_varied(tensor: Any, dim: int = 0, group: Any = None) -> Any:
    """Gather tensors of any sizes along one dimension, concatenated in rank order, on every rank.

    Args:
        tensor: this rank's rows, of any dtype, layout and number of rows, also 0; the other dimensions and the dtype
            are the same on all ranks.
        dim: the dimension that varies.
        group: the group; None for the default one.

    Returns:
        The rows of all ranks, a contiguous tensor, and the list of the ranks' sizes along ``dim``, for
        ``split(sizes, dim)``; None on ranks outside the group.

    Raises:
        TypeError: no dense tensor.
        ValueError, RuntimeError: on every rank, dtypes or other dimensions that differ, or no dimension ``dim``.
    """
    if (pg := world.member_group(group, "all_gather_varied")) is None:
        return None
    given, dim = tensor_of(pg, tensor, "tensor"), as_int(dim, "dim")
    is_fit = has_dimension(given, dim)
    rows = given if dim == 0 or not is_fit else given.movedim(dim, 0)
    sizes, is_recorded, slots = agree(
        pg, "all_gather_varied", form_of(given, dim), is_fit, dim, [rows], is_tracked(given)
    )
    out = carry_out(
        rows,
        is_recorded,
        lambda rows: gather(rows, pg, sizes, slots),
        lambda gradient: reduce_scatter(gradient, pg, sizes, SUM),
    )
    return like(tensor, out if dim == 0 else out.movedim(0, dim)), sizes


def reduce_scatter_varied(tensor: Any, size: int, dim: int = 0, op: Any = ReduceOp.SUM, group: Any = None) -> Any:
    """Combine the tensors of all ranks; each rank gets the number of rows that it gives.

    Args:
        tensor: the rows for all ranks in rank order; the same shape and dtype on all ranks.
        size: the number of rows along ``dim`` for this rank; those of all ranks add up to ``tensor.size(dim)``.
        dim: the dimension that is divided.
        op: a ReduceOp; half types accumulate in float32. SUM and AVG have gradients.
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
    given, dim, op = tensor_of(pg, tensor, "tensor"), as_int(dim, "dim"), canonical(op)
    mine = max(-1, min(as_int(size, "size"), LARGEST))  # which no tensor has
    is_fit = has_dimension(given, dim)
    along = dim % given.dim() if is_fit else dim
    form = form_of(given, None, f" along dimension {along}, combined by {name_of(op)}")
    sizes, is_recorded, _ = agree(pg, "reduce_scatter_varied", form, is_fit, dim, [mine], is_tracked(given))
    if min(sizes) < 0 or sum(sizes) != given.size(dim):
        raise MismatchError(
            f"reduce_scatter_varied: the ranks ask for {sizes} rows; expected numbers that add up to "
            f"{given.size(dim)}, the tensor's size along dimension {dim}"
        )
    if is_recorded and op not in (SUM, AVG):
        raise RuntimeError(
            f"reduce_scatter_varied has no gradient for {op}; expected SUM or AVG, or tensors without requires_grad"
        )
    share = 1 / pg.size() if op == AVG else 1
    out = carry_out(
        given if dim == 0 else given.movedim(dim, 0),
        is_recorded,
        lambda rows: reduce_scatter(rows, pg, sizes, op),
        lambda gradient: gather(gradient, pg, sizes) * share,
    )
    return like(tensor, out if dim == 0 else out.movedim(0, dim))


def all_to_all_varied(tensors: Any, dim: int = 0, group: Any = None) -> Any:
    """Send one tensor to every rank and receive one from each, of any sizes along one dimension.

    Args:
        tensors: one tensor for each rank, in rank order, of any number of rows, also 0; the other dimensions and the
            dtype are the same in all lists.
        dim, group: as for ``all_gather_varied``.

    Returns:
        The list of the tensors that the ranks sent to this one, contiguous; None on ranks outside the group.

    Raises:
        TypeError: not a list of dense tensors.
        ValueError, RuntimeError: on every rank, lists of another length than the group, dtypes or other dimensions that
            differ, or no dimension ``dim``.
    """
    if (pg := world.member_group(group, "all_to_all_varied")) is None:
        return None
    if not isinstance(tensors, (list, tuple)):
        as_tensors(tensors, "tensors")
    given, dim = [tensor_of(pg, each, "tensors") for each in tensors], as_int(dim, "dim")
    forms = dict.fromkeys(form_of(each, dim) for each in given)
    is_fit = len(given) == pg.size() and len(forms) == 1 and has_dimension(given[0], dim)
    form = next(iter(forms)) if is_fit else f"a list of {len(given)}: {', '.join(forms)}"
    parts: list[Any] = [each if dim == 0 else each.movedim(dim, 0) for each in given] if is_fit else [0] * pg.size()
    sizes = [each.size(dim) for each in given] if is_fit else []
    received, is_recorded, slots = agree(pg, "all_to_all_varied", form, is_fit, dim, parts, is_tracked(*given))
    out = carry_out(
        cat(parts) if is_recorded else parts,
        is_recorded,
        lambda rows: exchange(rows, pg, sizes, received, slots),
        lambda gradient: exchange(gradient, pg, received, sizes),
    )
    rows = torch.split_with_sizes(out, received)
    return [like(tensors[0], part if dim == 0 else part.movedim(0, dim)) for part in rows]


# -- what the ranks exchange first -------------------------------------------------------------------------


def tensor_of(pg: Group, value: Any, name: str) -> Tensor:
    """Return a caller's tensor or array as a tensor, still in its graph; raise if the group has no backend for it."""
    tensor = value if isinstance(value, Tensor) else as_tensor(value, name)
    if not tensor.is_cpu or pg.cpu is None:
        pg.backend(tensor.device)
    return check_one_dense(tensor)


def has_dimension(tensor: Tensor, dim: int) -> bool:
    """Tell whether a tensor has a dimension."""
    return -tensor.dim() <= dim < tensor.dim()


def is_tracked(*tensors: Tensor) -> bool:
    """Tell whether a call on these tensors is recorded for their gradients."""
    for each in tensors:
        if each.requires_grad:
            return torch.is_grad_enabled()
    return False


@lru_cache(FORMS_KEPT)
def mark_of(form: str) -> int:
    """Return a hash of a form, 64 bits."""
    return int.from_bytes(blake2b(form.encode(), digest_size=8).digest(), "little", signed=True)


@lru_cache(FORMS_KEPT)
def form_like(dtype: torch.dtype, before: tuple[int, ...], after: tuple[int, ...] | None, end: str) -> str:
    """Return the form of a tensor with these sizes before and after the dimension that varies, if there is one."""
    return f"{dtype} {list(before) if after is None else [*before, 'any', *after]} on {end}"


def form_of(tensor: Tensor, dim: int | None, more: str = "") -> str:
    """Return as text all that must be the same on all ranks: not the size along a dimension, but further arguments."""
    shape: tuple[int, ...] = tensor.shape
    end = "cpu" + more if tensor.is_cpu else tensor.device.type + more
    if dim is None or not has_dimension(tensor, dim):
        return form_like(tensor.dtype, shape, None, end)
    if dim < 0:
        dim += len(shape)
    return form_like(tensor.dtype, shape[:dim], shape[dim + 1 :], end)


class Slots:
    """The first exchange of the ranks of a group: a head and, if they fit, rows, all in slots of one size.

    A slot has room for the rows of the previous call, so that a loop on small ones makes one call of the library and
    not two. Its size in bytes, a multiple of 8, follows from values that all ranks exchanged. By the row, a rank has
    one slot for all others or one for each.
    """

    def __init__(self, pg: Group, row: table.Row, nbytes: int) -> None:
        ranks, step = len(pg.ranks), HEAD.size + nbytes
        self.row, self.nbytes, self._step = row, nbytes, step
        with torch.inference_mode(False):  # it is written inside and outside of inference mode
            sent, received = (
                torch.zeros(count * step // 8, dtype=torch.int64, device="cpu")
                for count in (1 if row is table.ALL_GATHER_SINGLE else ranks, ranks)
            )
        self.sent, self.received = sent, received
        own: Any = sent.numpy()
        self._given, self._place = memoryview(own).cast("B"), sent.data_ptr() + HEAD.size
        self._source = received.data_ptr() + HEAD.size
        self._heads = received.numpy().reshape(ranks, -1)[:, :4]

    def fill(self, parts: Sequence[Any], mark: int, is_recorded: bool) -> None:
        """Write the heads, and the rows if they fit: for each slot a tensor, or a size without rows."""
        flags, at, largest = int(is_recorded), 0, 0
        for part in parts:
            if part.__class__ is int or not part.is_cpu:
                break
            if part.nbytes > largest:
                largest = part.nbytes
        else:
            if largest <= self.nbytes:
                flags += FILLED
        for part in parts:
            size = part if part.__class__ is int else len(part) if part.dim() else 0
            HEAD.pack_into(self._given, at, size, mark, flags, largest)
            if flags >= FILLED:
                rows = part if is_plain(part) else for_reading(part.detach())
                memmove(self._place + at, rows.data_ptr(), rows.nbytes)
            at += self._step

    def exchange(self, pg: Group) -> list[list[int]]:
        """Return the heads of all ranks."""
        if pg.cpu is not None:
            issue_now(self.row, pg, self.sent, self.received)
        else:
            received = self.received.to(pg.any_backend().device)
            issue_now(self.row, pg, self.sent.to(received.device), received)
            self.received.copy_(received)
        return self._heads.tolist()

    def join(self, sizes: list[int], out: Tensor) -> None:
        """Write the rows of all ranks one after another, given the number of each."""
        count, source, target = sum(sizes), self._source, out.data_ptr()
        width = out.nbytes // count if count else 0
        for size in sizes:
            memmove(target, source, size * width)
            target += size * width
            source += self._step


def agree(
    pg: Group, call: str, form: str, is_fit: bool, dim: int, parts: Sequence[Any], is_recorded: bool
) -> tuple[list[int], bool, Slots | None]:
    """Return each rank's size for this one, whether any rank's input requires grad, and the slots if they contain rows.

    Every rank calls, with the form of its input and ``parts`` for ``Slots.fill``. MismatchError unless the forms are
    equal and ``is_fit`` on all ranks; ``is_recorded``: this rank's input requires grad.
    """
    if (slots := pg.kept.get(call)) is None:
        row = table.ALL_TO_ALL_SINGLE if call == "all_to_all_varied" else table.ALL_GATHER_SINGLE
        slots = pg.kept[call] = Slots(pg, row, 0)
    if pg.cpu is not None:
        compare(pg, pg.cpu, call)
    mark = mark_of(form)
    slots.fill(parts, mark, is_recorded)
    sizes, is_known, is_joined, most = [], is_fit, True, 0
    for size, theirs, flags, largest in slots.exchange(pg):
        sizes.append(size)
        if theirs != mark:
            is_known = False
        if flags < FILLED:
            is_joined = False
        if flags & 1:
            is_recorded = True
        if largest > most:
            most = largest
    if not is_known:
        raise misfit_error(pg, call, form, dim)
    if most > slots.nbytes or 8 * most < slots.nbytes:
        is_small = 0 < most <= max(8, SLOTS_MAX // len(sizes))
        needed = max(8, 1 << (most - 1).bit_length()) if is_small else 0
        if needed != slots.nbytes:
            pg.kept[call] = Slots(pg, slots.row, needed)
    return sizes, is_recorded, slots if is_joined else None


def misfit_error(pg: Group, call: str, form: str, dim: int) -> MismatchError:
    """Return the error of ranks whose tensors differ; every rank calls."""
    texts: list[Any] = [None] * len(pg.ranks)
    all_gather_object(texts, form, pg)
    found = "; ".join(f"{text} of {format_ranks(those)}" for text, those in ranks_by_value(texts).items())
    return MismatchError(
        f"{call}: the ranks' tensors do not fit: {found}; expected a dimension {dim}, and otherwise "
        "one dtype, device type and shape"
        + (f", in lists of {len(texts)} tensors, one for each rank" if call == "all_to_all_varied" else "")
    )


def carry_out(rows: Any, is_recorded: bool, call: Callable[[Any], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """Make a call, recorded by autograd if it is on any rank: all ranks take part in its gradient."""
    if not is_recorded:
        return call(rows)
    if not rows.requires_grad and torch.is_grad_enabled():
        rows = rows.detach().requires_grad_()
    return WithGradient.apply(rows, call, back)


def like(given: Any, tensor: Tensor) -> Any:
    """Return a result as a tensor or an array, as the input was, contiguous."""
    made = tensor.contiguous()
    return made.detach().numpy() if isinstance(given, np.ndarray) else made


# -- rows between the ranks --------------------------------------------------------------------------------


def issue_now(row: table.Row, pg: Group, send: Tensor, recv: Tensor, op: Any = None, counts: Any = None) -> None:
    """Make a call at once, also inside a coalescing manager, because its result is needed now."""
    held, pg.coalescing = pg.coalescing, None
    try:
        issue(row, pg, send, recv, op, counts=counts)
    finally:
        pg.coalescing = held


def count_elements(rows: Tensor, sizes: Sequence[int]) -> list[int]:
    """Return the elements of the rows of each rank."""
    width = prod(rows.shape[1:])
    return [size * width for size in sizes]


def gather(rows: Tensor, pg: Group, sizes: list[int], slots: Slots | None = None) -> Tensor:
    """Return the rows of all ranks, which may be in slots already."""
    out = rows.new_empty((sum(sizes), *rows.shape[1:]))
    if slots is not None:
        slots.join(sizes, out)
    elif sizes.count(sizes[0]) == len(sizes):
        issue_now(table.ALL_GATHER_SINGLE, pg, rows, out)
    else:
        issue_now(table.ALL_GATHER, pg, rows, out, counts=([rows.numel()], count_elements(rows, sizes)))
    return out


def reduce_scatter(rows: Tensor, pg: Group, sizes: list[int], op: Any) -> Tensor:
    """Return this rank's rows of the result."""
    out = rows.new_empty((sizes[pg.rank()], *rows.shape[1:]))
    if len(set(sizes)) == 1:
        issue_now(table.REDUCE_SCATTER_SINGLE, pg, rows, out, op)
    else:
        issue_now(table.REDUCE_SCATTER, pg, rows, out, op, counts=(count_elements(rows, sizes), [out.numel()]))
    return out


def exchange(rows: Any, pg: Group, sent: list[int], received: list[int], slots: Slots | None = None) -> Tensor:
    """Return the rows for this rank, which may be in slots already; the input is one tensor, or one for each rank."""
    one = rows[0] if rows.__class__ is list else rows
    out: Tensor = one.new_empty((sum(received), *one.shape[1:]))
    if slots is not None:
        slots.join(received, out)
    else:
        whole = cat(rows) if rows.__class__ is list else rows
        issue_now(table.ALL_TO_ALL, pg, whole, out, counts=(count_elements(one, sent), count_elements(one, received)))
    return out
