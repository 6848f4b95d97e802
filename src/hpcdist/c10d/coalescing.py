"""Coalesced collectives: several calls that are issued together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp

from hpcdist.core import several, world
from hpcdist.core.buffers import as_tensor_lists, as_tensors, same_dtype
from hpcdist.core.call import Call
from hpcdist.core.group import Group
from hpcdist.core.issue import issue, make_one
from hpcdist.core.reduction import canonical
from hpcdist.core.table import ALL_REDUCE, EACH
from hpcdist.core.work import DoneWork, HeldWork, Work
from hpcdist.torch_bridge.private_names import CoalescingManager


def all_reduce_coalesced(
    tensors: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    """Combine each tensor of a list over all ranks, in place, in as few calls as their sizes allow.

    Args:
        tensors: a tensor or a list of them, all of one dtype; the same sizes on all ranks.
        op: a ReduceOp; half types accumulate in float32.
        group, async_op: as for ``all_reduce``, and so is the return value.

    Raises:
        TypeError: not a list of tensors.
        ValueError: different dtypes; others as for ``all_reduce``.
    """
    if (pg := world.member_group(group, "all_reduce_coalesced")) is None:
        return None
    listed = [tensors] if isinstance(tensors, (torch.Tensor, np.ndarray)) else tensors
    listed = list(listed) if isinstance(listed, Iterable) else as_tensors(listed, "tensors")  # which raises
    if not listed:
        return DoneWork([]) if async_op else None
    if len({getattr(each, "dtype", None) for each in listed}) > 1:
        same_dtype(*as_tensors(listed, "tensors", writable=True))  # raises, unless some are complex
    with pg.grouped():
        work = issue(ALL_REDUCE, pg, listed, listed, op, None, async_op, EACH)
    return begin_or_wait(work, async_op)


def all_gather_coalesced(
    output_tensor_lists: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
) -> Work | None:
    """Gather each tensor of a list from all ranks.

    Args:
        output_tensor_lists: for each rank a list of outputs, one for each of its inputs, written in place.
        input_tensor_list: this rank's inputs; the same sizes on all ranks.
        group, async_op: as for ``all_reduce``, and so is the return value.

    Raises:
        TypeError: not a list of lists of tensors.
        ValueError: lengths, wrong sizes or dtypes.
    """
    if (pg := world.member_group(group, "all_gather_coalesced")) is None:
        return None
    inputs = as_tensors(input_tensor_list, "input_tensor_list")
    outputs = as_tensor_lists(output_tensor_lists, "output_tensor_lists", writable=True)
    with pg.grouped():
        work = several.gather_together(pg, outputs, inputs, async_op)
    return begin_or_wait(work, async_op)


@contextlib.contextmanager
def _coalescing_manager(
    group: Group | None = None, device: torch.device | None = None, async_ops: bool = False
) -> Iterator[Any]:
    """Hold back the collectives made inside and issue them together at the end (c10d's private name).

    Args:
        group: the group that all of them are on; None for the default one.
        device: accepted as in c10d; the tensors' own devices are used.
        async_ops: do not wait at the end; call ``wait()`` of the manager.

    Raises:
        ValueError: inside another manager of the same group.
    """
    pg = world.resolve(group)
    if pg.coalescing is not None:
        raise ValueError("ProcessGroup has non-empty op list at the start of coalescing: managers do not nest")
    manager = CoalescingManager()
    held: list[tuple[Call, HeldWork | None]] = []
    pg.coalescing = held
    try:
        try:
            yield manager
        finally:
            pg.coalescing = None
        with pg.grouped():
            works = [work for work in run_together(pg, held, async_ops) if work is not None]
    except BaseException as error:
        for _, own in held:
            if own is not None:
                own._drop(error)
        raise
    for work in works:
        manager.append(work)
    if not async_ops:
        manager.wait()


def run_together(pg: Group, held: list[tuple[Call, HeldWork | None]], async_ops: bool) -> Iterator[Work | None]:
    """Run or begin the calls held back; successive all_reduces with one op become one, the others go in turn."""
    for op, row in groupby(held, lambda each: common_op(each[0])):
        some = list(row)
        if op is None or len(some) == 1:
            made = [(call, [own]) for call, own in some]
        else:
            given = [call.send for call, _ in some]
            made = [(Call(ALL_REDUCE, given, given, op, None, EACH), [own for _, own in some])]
        for call, owns in made:
            work = make_one(pg, call, async_ops)
            for own in owns:
                if own is not None:
                    own._begin([] if work is None else [work])
            yield work


def common_op(call: Call) -> Any:
    """Return the op of an all_reduce with which others of the same op can be combined; None for any other call.

    A PREMUL_SUM has a factor of its rank, so no rank knows whether two of them are alike on all ranks.
    """
    if call.row is not ALL_REDUCE or call.send is not call.recv or call.finish or call.counts:
        return None
    op = canonical(call.op)
    return op if op.__class__ is ReduceOp.RedOpType else None


def begin_or_wait(work: Work | None, async_op: bool) -> Work | None:
    """Return the Work of an asynchronous call, or wait for it."""
    if async_op or work is None:
        return work
    work.wait()
    return None
