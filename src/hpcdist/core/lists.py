"""Collectives on lists of tensors: each becomes one collective on one tensor that holds all of them.

The facade (``hpcdist.c10d``) and c10d's methods of a group call the same functions, so a rank that uses the one and a
rank that uses the other make the same MPI or NCCL call. Which call that is follows from what every rank knows: which
function was called, dtypes, and sizes that c10d makes equal on all ranks. How a tensor of one rank lies in memory
decides only how it is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcdist.core import hooks, profiling, world
from hpcdist.core.buffers import (
    as_splits,
    as_tensor,
    as_tensors,
    check_dense,
    check_length,
    check_sizes,
    counts_in,
    is_plain,
    joined,
    joint,
    real,
    rows_of,
    same_dtype,
    scattering,
)
from hpcdist.core.call import Call
from hpcdist.core.call_cache import Likeness
from hpcdist.core.group import Group
from hpcdist.core.issue import canonical, check_parts, is_done_by_parts, issue, issue_any
from hpcdist.core.table import (
    ALL_GATHER,
    ALL_GATHER_SINGLE,
    ALL_REDUCE,
    ALL_TO_ALL,
    ALL_TO_ALL_SINGLE,
    GATHER,
    REDUCE_SCATTER,
    REDUCE_SCATTER_SINGLE,
    SCATTER,
)
from hpcdist.core.work import AllWork, Work

BUCKET_BYTES = 1 << 20  # the most that is copied into one buffer: a call costs microseconds, such a copy less
ALONE_BYTES = 1 << 18  # a tensor of this size is reduced on its own: to copy it would cost more than a call
DTYPE, NBYTES, IS_CPU = map(attrgetter, ("dtype", "nbytes", "is_cpu"))


def in_one(pg: Group, inputs: list[torch.Tensor], dtype: torch.dtype, async_op: bool) -> torch.Tensor:
    """Return the elements of a call's inputs one after another, in the dtype that all its tensors travel in.

    A synchronous call first waits for what is queued, which may still write to its inputs.
    """
    if not async_op:
        pg.backend(inputs[0].device).settle()
    return joined(inputs, dtype)


def check_alike(call: str, *tensors: torch.Tensor) -> torch.dtype:
    """Return the dtype that a call's tensors travel in; raise c10d's error unless they have one and are dense."""
    check_dense(call, *tensors)
    return same_dtype(*tensors)


def all_gather(pg: Group, tensor_list: Any, tensor: Any, async_op: bool) -> Work | None:
    """Gather the tensors of all ranks into a list on every rank; entry r has the size of rank r's tensor."""
    outputs = as_tensors(tensor_list, "tensor_list", writable=True)
    given = as_tensor(tensor, "tensor")
    check_length("all_gather", "tensor_list", outputs, len(pg.ranks))
    dtype = check_alike("all_gather", given, *outputs)
    check_sizes("all_gather", "tensor_list", [outputs[pg.rank()]], given)
    received = counts_in(dtype, outputs)  # the same list on every rank
    flat = joint(outputs, dtype)
    then = scattering(flat, outputs)
    if len(set(received)) == 1:
        return issue_any(Call(ALL_GATHER_SINGLE, given, flat, finish=then, result=outputs), pg, async_op)
    counts = counts_in(dtype, [given]), received
    return issue_any(Call(ALL_GATHER, given, flat, counts=counts, finish=then, result=outputs), pg, async_op)


def gather(pg: Group, tensor: Any, gather_list: Any, root: int, async_op: bool) -> Work | None:
    """Gather the tensors of all ranks into a list on the root; ``gather_list`` is not looked at elsewhere."""
    given = as_tensor(tensor, "tensor")
    if pg.rank() != root:
        return issue_any(Call(GATHER, given, root=root), pg, async_op)
    outputs = as_tensors(gather_list, "gather_list", writable=True)
    check_length("gather", "gather_list", outputs, len(pg.ranks))
    dtype = check_alike("gather", given, *outputs)
    check_sizes("gather", "gather_list", outputs, given)
    flat = joint(outputs, dtype)
    return issue_any(
        Call(GATHER, given, flat, root=root, finish=scattering(flat, outputs), result=outputs), pg, async_op
    )


def scatter(pg: Group, tensor: Any, scatter_list: Any, root: int, async_op: bool) -> Work | None:
    """Hand each rank its tensor of the root's list; ``scatter_list`` is not looked at elsewhere."""
    output = as_tensor(tensor, "tensor", writable=True)
    if pg.rank() != root:
        return issue_any(Call(SCATTER, None, output, root=root), pg, async_op)
    inputs = as_tensors(scatter_list, "scatter_list")
    check_length("scatter", "scatter_list", inputs, len(pg.ranks))
    dtype = check_alike("scatter", output, *inputs)
    check_sizes("scatter", "scatter_list", inputs, output)
    return issue_any(Call(SCATTER, in_one(pg, inputs, dtype, async_op), output, root=root), pg, async_op)


def reduce_scatter(pg: Group, output: Any, input_list: Any, op: Any, async_op: bool) -> Work | None:
    """Combine the lists of all ranks and leave each rank its entry; entry r has one size on all ranks."""
    target = as_tensor(output, "output", writable=True)
    inputs = as_tensors(input_list, "input_list")
    check_length("reduce_scatter", "input_list", inputs, len(pg.ranks))
    dtype = check_alike("reduce_scatter", target, *inputs)
    for each in inputs:
        if each.dtype is not target.dtype:
            check_parts(REDUCE_SCATTER, op, each, target)
    check_sizes("reduce_scatter", "input_list", [inputs[pg.rank()]], target)
    sent = counts_in(dtype, inputs)  # the same list on every rank
    given = in_one(pg, inputs, dtype, async_op)
    if len(set(sent)) == 1:
        return issue_any(Call(REDUCE_SCATTER_SINGLE, given, target, op), pg, async_op)
    counts = sent, counts_in(dtype, [target])
    return issue_any(Call(REDUCE_SCATTER, given, target, op, counts=counts), pg, async_op)


def all_to_all(pg: Group, output_list: Any, input_list: Any, async_op: bool) -> Work | None:
    """Send one tensor to every rank and receive one from each; sizes may differ from rank to rank and pair to pair."""
    outputs = as_tensors(output_list, "output_tensor_list", writable=True)
    inputs = as_tensors(input_list, "input_tensor_list")
    check_length("all_to_all", "output_tensor_list", outputs, len(pg.ranks))
    check_length("all_to_all", "input_tensor_list", inputs, len(pg.ranks))
    dtype = check_alike("all_to_all", *outputs, *inputs)
    counts = counts_in(dtype, inputs), counts_in(dtype, outputs)
    given, flat = in_one(pg, inputs, dtype, async_op), joint(outputs, dtype)
    then = scattering(flat, outputs)
    return issue_any(Call(ALL_TO_ALL, given, flat, counts=counts, finish=then, result=outputs), pg, async_op)


def all_to_all_single(
    group: Any, output: Any, input: Any, output_splits: Any, input_splits: Any, async_op: bool
) -> Work | None:
    """Send a share of one tensor to every rank and receive one from each.

    Splits are rows of dimension 0, None or empty for equal shares. Some ranks may give them and others not: the same
    call of the library carries both.
    """
    if (
        output_splits is None
        and input_splits is None
        and output.__class__ is input.__class__ is Tensor
        and output.dim() == input.dim() == 1
    ):  # elements are rows, which ``issue`` counts
        return issue(ALL_TO_ALL_SINGLE, group, input, output, None, None, async_op)
    pg = world.joined(group, "all_to_all_single")
    if pg is None:
        return None
    size = len(pg.ranks)
    output_splits, input_splits = as_splits(output_splits), as_splits(input_splits)
    given, target = as_tensor(input, "input"), as_tensor(output, "output")
    width = check_alike("all_to_all_single", given, target).itemsize  # counts are of the dtype that both travel in
    sent = [each * given.itemsize // width for each in rows_of(given, input_splits, size, "input")]
    received = [each * target.itemsize // width for each in rows_of(target, output_splits, size, "output")]
    counts = (sent, received) if output_splits or input_splits else None
    return issue(ALL_TO_ALL_SINGLE, pg, input, output, None, None, async_op, counts)


# -- many small all_reduces in few calls -----------------------------------------------------------------


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
    known = pg.known.get("all_reduce_coalesced")
    if known.__class__ is Bundle and len(known.sizes) == len(tensors) and known.is_like(*tensors):
        sizes: list[int] = known.sizes
        return sizes
    if not tensors or not all(map(is_plain, tensors)) or not all(map(IS_CPU, tensors)):
        return None
    if len(set(map(DTYPE, tensors))) > 1:
        return None
    sizes = list(map(NBYTES, tensors))
    if sum(sizes) > BUCKET_BYTES:
        return None
    if known != sizes:
        pg.known["all_reduce_coalesced"] = sizes
    elif hooks.likeness is not None:
        pg.known["all_reduce_coalesced"] = Bundle(hooks.likeness(*tensors), sizes)
    return sizes


def reduce_plain(pg: Group, tensors: list[Any], op: Any) -> bool:
    """Reduce contiguous CPU tensors of one bucket at once, copied by the library; False unless they are such.

    The call is the one that ``reduce_together`` makes of the same sizes on a rank whose tensors are not contiguous.
    """
    if pg.cpu is None or pg.cpu.has_groups:  # a library that makes many calls one needs no copies for it
        return False
    if hooks.is_profiled():  # its event has the shape of each
        return False
    sizes = sizes_of_plain(pg, tensors)
    if sizes is None:
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
        flat = in_one(pg, together, same_dtype(*together), is_begun)
        then = scattering(flat, together)
        yield issue_any(Call(ALL_REDUCE, flat, flat, op, finish=then, result=together), pg, is_begun)


def gather_together(
    pg: Group, output_lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], async_op: bool
) -> Work:
    """Run or begin the all_gather of each tensor as one Work; ``output_lists`` has for each rank a list of outputs."""
    calls = (
        all_gather(pg, [outputs[index] for outputs in output_lists], each, async_op)
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
    with nullcontext() if event is None else profiling.joined(event):
        work = AllWork([work for work in calls if work is not None], result)
    if event is not None:
        work._ends(event)
        if not work.is_completed():
            work._pursue()  # the event ends though nobody waits
    return work
