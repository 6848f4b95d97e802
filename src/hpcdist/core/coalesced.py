"""Calls on many tensors that are one for the caller: all_reduces in few calls, and several calls as one Work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from hpcdist.core import hooks, profiling
from hpcdist.core.buffers import is_plain, make_unpack, real, same_dtype
from hpcdist.core.call import Call
from hpcdist.core.call_cache import Likeness
from hpcdist.core.errors import MismatchError
from hpcdist.core.group import Group
from hpcdist.core.issue import issue, issue_any
from hpcdist.core.lists import IS_CPU, check_lengths, flatten
from hpcdist.core.reduction import canonical, is_done_by_parts
from hpcdist.core.table import ALL_GATHER, ALL_REDUCE
from hpcdist.core.work import AllWork, Work

BUCKET_BYTES = 1 << 20  # the most that is copied into one buffer: a call costs microseconds, such a copy less
ALONE_BYTES = 1 << 18  # a tensor of this size is reduced on its own: to copy it would cost more than a call
DTYPE, NBYTES = map(attrgetter, ("dtype", "nbytes"))
COALESCED = "all_reduce_coalesced"


class Bundle(NamedTuple):
    """What a group's small tensors looked like when it saw them twice, and the bytes of each."""

    is_like: Likeness
    sizes: list[int]


def buckets(pg: Group, tensors: Sequence[torch.Tensor], op: Any) -> list[list[int]]:
    """Return which tensors are reduced by one call, as indices into the list.

    Only dtypes, device types and numbers of elements are looked at, which are the same on all ranks. Dense tensors of
    one kind that fit into one bucket go together; of more, the small ones fill buckets in their order. Complex tensors
    are of the kind of their parts if an op combines these, because another rank may give the parts.
    """
    by_parts = is_done_by_parts(canonical(op))
    kinds: dict[tuple[torch.dtype, str], list[int]] = {}
    made: list[list[int]] = []
    for index, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided or pg.backend(tensor.device).has_groups:
            made.append([index])
        else:
            kinds.setdefault((real(tensor.dtype) if by_parts else tensor.dtype, tensor.device.type), []).append(index)
    for alike in kinds.values():
        sizes = [tensors[index].nbytes for index in alike]
        if sum(sizes) <= BUCKET_BYTES:
            made.append(alike)
            continue
        bucket: list[int] = []
        filled = 0
        for index, nbytes in zip(alike, sizes, strict=True):
            if nbytes >= ALONE_BYTES:
                made.append([index])
                continue
            if filled + nbytes > BUCKET_BYTES:
                made.append(bucket)
                bucket, filled = [], 0
            bucket.append(index)
            filled += nbytes
        if bucket:
            made.append(bucket)
    return made


def sizes_of_plain(pg: Group, tensors: list[Any]) -> list[int] | None:
    """Return the bytes of each tensor; None unless they are contiguous CPU tensors of one dtype and fit one bucket."""
    for known in pg.known.get(COALESCED, ()):
        if len(known.sizes) == len(tensors) and known.is_like(*tensors):
            return known.sizes
    if not tensors or not all(map(is_plain, tensors)) or not all(map(IS_CPU, tensors)):
        return None
    if len(set(map(DTYPE, tensors))) > 1:
        return None
    sizes = list(map(NBYTES, tensors))
    if sum(sizes) > BUCKET_BYTES:
        return None
    if hooks.likeness is not None and pg.known.is_again(COALESCED, sizes):
        pg.known.keep(COALESCED, Bundle(hooks.likeness(*tensors), sizes))
    return sizes


def reduce_plain(pg: Group, tensors: list[Any], op: Any) -> bool:
    """Reduce contiguous CPU tensors of one bucket at once, copied by the library; False unless they are such.

    The call is the one that ``reduce_together`` makes of the same sizes on a rank whose tensors are not contiguous.
    """
    if pg.cpu is None or pg.cpu.has_groups:  # a library that makes many calls one needs no copies for it
        return False
    if hooks.is_profiled():  # its event has the shape of each
        return False
    if (sizes := sizes_of_plain(pg, tensors)) is None:
        return False
    pg.cpu.settle()  # an asynchronous call may still write what is read here
    flat, copy = pg.cpu.bundle(tensors, sizes)
    issue(ALL_REDUCE, pg, flat, flat, op)
    copy()
    return True


def reduce_together(pg: Group, tensors: list[torch.Tensor], op: Any, async_op: bool) -> Work:
    """Run or begin the all_reduces of many tensors, one for each bucket, as one Work."""
    return begin_all(pg, "all_reduce", tensors, reductions(pg, tensors, op, async_op), tensors)


def reductions(pg: Group, tensors: list[torch.Tensor], op: Any, async_op: bool) -> Iterator[Work | None]:
    """Run or begin the all_reduce of each bucket."""
    for bucket in buckets(pg, tensors, op):
        together = [tensors[index] for index in bucket]
        is_begun = async_op or pg.backend(together[0].device).has_groups  # such a library launches all of them at once
        if len(together) == 1:
            yield issue_any(Call(ALL_REDUCE, together[0], together[0], op), pg, is_begun)
            continue
        flat = flatten(pg, together, same_dtype(*together), is_begun)
        then = make_unpack(flat, together)
        yield issue_any(Call(ALL_REDUCE, flat, flat, op, finish=then, result=together), pg, is_begun)


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
    calls = (
        issue(ALL_GATHER, pg, each, [outputs[index] for outputs in output_lists], None, None, async_op)
        for index, each in enumerate(inputs)
    )
    return begin_all(pg, "all_gather", inputs, calls, [each for outputs in output_lists for each in outputs])


def begin_all(
    pg: Group, name: str, inputs: Sequence[torch.Tensor], calls: Iterable[Work | None], result: list[torch.Tensor]
) -> Work:
    """Make calls that are one for the caller: one Work, and one event of a profiler with the shape of each input."""
    event = None
    if inputs and hooks.is_profiled():
        event = profiling.begin(pg, pg.backend(inputs[0].device), name, inputs)
    with nullcontext() if event is None else profiling.as_one(event):
        work = AllWork([work for work in calls if work is not None], result)
    if event is not None:
        work._ends(event)
        if not work.is_completed():
            work._pursue()  # the event ends though nobody waits
    return work
