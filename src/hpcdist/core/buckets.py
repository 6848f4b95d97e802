"""Buckets: the all_reduces of many tensors in few calls, each on the tensors of one bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from hpcdist.core import buffers, table
from hpcdist.core.buffers import TensorList
from hpcdist.core.call import Call
from hpcdist.core.group import Group
from hpcdist.core.lists import flatten, put_back, takes_lists, takes_tensors
from hpcdist.core.reduction import PREMUL_SUM, canonical, factor_of, is_complex, is_done_by_parts
from hpcdist.core.table import scale

BUCKET_BYTES = 1 << 20  # the most that is copied into one buffer: a call costs microseconds, such a copy less
ALONE_BYTES = 1 << 18  # a tensor of this size is reduced on its own: to copy it would cost more than a call

Check = Callable[[Group, Call], None]  # raises what an all_reduce of one tensor would raise before it is sent


def buckets(pg: Group, tensors: Sequence[torch.Tensor], op: object, check: Check) -> list[list[int]]:
    """Return which tensors are reduced by one call, as indices into the list.

    Only dtypes, device types and numbers of elements are looked at, which are the same on all ranks. Dense tensors of
    one kind that fit into one bucket go together; of more, the small ones fill buckets in their order. Complex tensors
    are of the kind of their parts if an op combines these, because another rank may give the parts.
    """
    by_parts = is_done_by_parts(canonical(op))
    kinds: dict[tuple[torch.dtype, str], list[int]] = {}
    checked: set[tuple[torch.dtype, str]] = set()
    made: list[list[int]] = []
    for index, tensor in enumerate(tensors):
        kind = (buffers.real_dtype(tensor.dtype) if by_parts else tensor.dtype, tensor.device.type)
        if tensor.layout is not torch.strided or kind not in checked or tensor.is_nested:
            check(pg, Call(table.ALL_REDUCE, tensor, tensor, op))
            checked.add(kind)
        elif tensor.data_ptr() < buffers.LOWEST_PLACE:
            buffers.check_memory(tensor)
        if tensor.layout is not torch.strided or pg.backend(tensor.device).has_groups:
            made.append([index])
        else:
            kinds.setdefault(kind, []).append(index)
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


def whole(pg: Group, call: Call) -> Call | None:
    """Return an all_reduce of a list as one call of the library; None if it needs more than one, or a copy.

    That is, unless the tensors are plain ones on the CPU, of one dtype and in one bucket.
    """
    tensors = call.send
    if len(tensors) < 2 or not takes_lists(pg):
        return None
    listed = buffers.as_list(tensors, getattr(tensors[0], "dtype", None))
    if listed is None or listed.nbytes > BUCKET_BYTES:
        return None
    op = canonical(call.op)
    pg.backend("cpu").check_reduction(table.ALL_REDUCE, listed.dtype, op)
    return None if is_flattened(listed.dtype, op) else in_place(call, listed, op)


def is_flattened(dtype: torch.dtype, op: object) -> bool:
    """Tell whether an op first computes other values from the tensors, which are then one tensor."""
    return dtype.is_complex and op == PREMUL_SUM and is_complex(factor_of(op))


def in_place(call: Call, listed: TensorList, op: object) -> Call:
    """Return the all_reduce of a list where its tensors are; ranks that reduce one flat tensor make the same call."""
    width = listed.itemsize
    counts = ([size // width for size in listed.sizes],) * 2
    if listed.dtype.is_complex and is_done_by_parts(op):
        listed.dtype, counts = listed.dtype.to_real(), scale(counts, 2)
    return call._replace(send=listed, recv=listed, op=op, counts=counts, result=listed.tensors)


def in_buckets(pg: Group, call: Call, tensors: list[torch.Tensor], check: Check, async_op: bool) -> Iterator[Call]:
    """Check the all_reduce of each tensor, and return the calls that are made of them in turn."""
    op = canonical(call.op)
    for bucket in buckets(pg, tensors, op, check):
        some = [tensors[index] for index in bucket]
        if len(some) == 1:
            yield Call(table.ALL_REDUCE, some[0], some[0], op)
            continue
        dtype = buffers.same_dtype(*some)
        if not async_op:
            pg.backend(some[0].device).settle()  # what is queued may still write what is copied here
        if takes_tensors(pg, some) and not is_flattened(dtype, op):
            listed = TensorList(list(map(buffers.for_reading, some)), dtype)
            yield in_place(call, listed, op)._replace(finish=put_back(listed.tensors, some), result=some)
        else:
            flat, sizes = flatten(pg, some, dtype, True), [each.nbytes // dtype.itemsize for each in some]
            then = buffers.make_unpack(flat, some)
            yield Call(table.ALL_REDUCE, flat, flat, op, None, (sizes, sizes), then, some)
