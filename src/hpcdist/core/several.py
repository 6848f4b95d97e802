"""Collectives on several tensors of a rank: each a collective of its own, or all of them contributions to one.

A coalesced call is one for the caller: an all_reduce or all_gather of each tensor, made in few calls, with one Work.

c10d's methods of a group take lists of tensors too, such as one for each of a rank's devices (gloo defines what they
mean), and so did the ``*_multigpu`` functions of earlier versions of torch. There every tensor counts as a contribution
of its own: what is reduced is combined over all tensors of all ranks, and what is gathered has an entry for each. The
sizes and dtypes of the tensors and how many there are, are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from hpcdist.core import buffers, hooks, profiling, reduction, table
from hpcdist.core.call import Call
from hpcdist.core.errors import MismatchError
from hpcdist.core.group import Group
from hpcdist.core.issue import check, check_sparse, issue, issue_any
from hpcdist.core.lists import check_lengths, flatten
from hpcdist.core.ranks import as_int
from hpcdist.core.reduction import canonical, is_done_by_parts
from hpcdist.core.table import Counts, Row
from hpcdist.core.work import AllWork, Work

BUCKET_BYTES = 1 << 20  # the most that is copied into one buffer: a call costs microseconds, such a copy less
ALONE_BYTES = 1 << 18  # a tensor of this size is reduced on its own: to copy it would cost more than a call
COALESCED = "all_reduce_coalesced"

Tensors = Sequence[torch.Tensor]


def buckets(pg: Group, tensors: Sequence[torch.Tensor], op: Any) -> list[list[int]]:
    """Return which tensors are reduced by one call, as indices into the list.

    Only dtypes, device types and numbers of elements are looked at, which are the same on all ranks. Dense tensors of
    one kind that fit into one bucket go together; of more, the small ones fill buckets in their order. Complex tensors
    are of the kind of their parts if an op combines these, because another rank may give the parts. Raises what an
    all_reduce of one of them would raise before it is sent.
    """
    by_parts = is_done_by_parts(canonical(op))
    kinds: dict[tuple[torch.dtype, str], list[int]] = {}
    checked: set[tuple[torch.dtype, str]] = set()
    made: list[list[int]] = []
    for index, tensor in enumerate(tensors):
        kind = (buffers.real(tensor.dtype) if by_parts else tensor.dtype, tensor.device.type)
        if tensor.layout is not torch.strided or kind not in checked:
            check(pg, Call(table.ALL_REDUCE, tensor, tensor, op))
            checked.add(kind)
        elif not tensor.data_ptr():
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


def counts_of(sizes: list[int], itemsize: int) -> Counts | None:
    """Return the elements of several tensors of so many bytes, which a call has of them; None of a single tensor."""
    return None if len(sizes) == 1 else ([size // itemsize for size in sizes],) * 2


def bundle_of(pg: Group, tensors: list[Any]) -> tuple[list[int], Counts | None] | None:
    """Return the bytes of each tensor, and the counts of the call that reduces all, if one bucket holds them.

    None unless they are contiguous CPU tensors of one dtype.
    """
    for is_like, sizes, counts in pg.known.get(COALESCED, ()):
        if len(sizes) == len(tensors) and is_like(*tensors):
            return sizes, counts
    listed = buffers.as_list(tensors, getattr(tensors[0], "dtype", None)) if tensors else None
    if listed is None or listed.nbytes > BUCKET_BYTES:
        return None
    sizes, counts = listed.sizes, counts_of(listed.sizes, listed.itemsize)
    if hooks.likeness is not None and pg.known.is_again(COALESCED, sizes):
        pg.known.keep(COALESCED, (hooks.likeness(*tensors), sizes, counts))
    return sizes, counts


def reduce_plain(pg: Group, tensors: list[Any], op: Any) -> bool:
    """Reduce contiguous CPU tensors of one bucket at once, copied by the library; False unless they are such.

    The call is the one that ``reduce_together`` makes of the same sizes on a rank whose tensors are not contiguous.
    """
    # a library that makes many calls one needs no copies for it; an event of the profiler has the shape of each
    if pg.cpu is None or pg.cpu.has_groups or hooks.is_profiled():
        return False
    if (found := bundle_of(pg, tensors)) is None:
        return False
    sizes, counts = found
    pg.cpu.settle()  # an asynchronous call may still write what is read here
    flat, copy = pg.cpu.bundle(tensors, sizes)
    issue(table.ALL_REDUCE, pg, flat, flat, op, counts=counts)
    copy()
    return True


def reduce_together(pg: Group, tensors: list[torch.Tensor], op: Any, async_op: bool) -> Work:
    """Run or begin the all_reduces of many tensors, one for each bucket, as one Work."""
    return begin_all(pg, "all_reduce", tensors, reductions(pg, tensors, op, async_op), tensors)


def reductions(pg: Group, tensors: list[torch.Tensor], op: Any, async_op: bool) -> Iterator[Work | None]:
    for bucket in buckets(pg, tensors, op):
        together = [tensors[index] for index in bucket]
        begins = is_begun(pg, together[0], async_op)
        if len(together) == 1:
            yield issue_any(Call(table.ALL_REDUCE, together[0], together[0], op), pg, begins)
            continue
        flat = flatten(pg, together, buffers.same_dtype(*together), begins)
        counts, then = counts_of([each.nbytes for each in together], flat.itemsize), buffers.make_unpack(flat, together)
        yield issue_any(Call(table.ALL_REDUCE, flat, flat, op, None, counts, then, together), pg, begins)


def is_begun(pg: Group, tensor: Any, async_op: bool) -> bool:
    """Tell whether one of several calls is only begun, as a blocking one is if its library launches all at once.

    ``tensor`` is the call's, its list, which is on the CPU, or None for a barrier.
    """
    backend = pg.any_backend() if tensor is None else pg.backend(getattr(tensor, "device", "cpu"))
    return async_op or backend.has_groups


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
    calls = [
        Call(table.ALL_GATHER, each, list(outputs))
        for each, outputs in zip(inputs, zip(*output_lists, strict=True), strict=True)
    ]
    return begin_all(pg, "all_gather", inputs, begin_each(pg, calls, async_op), as_shown(output_lists))


def begin_each(pg: Group, calls: Sequence[Call], async_op: bool) -> Iterator[Work | None]:
    for call in calls:
        check(pg, call)
    for row, send, recv, op, *_ in calls:
        yield issue(row, pg, send, recv, op, None, is_begun(pg, send, async_op))


def as_shown(lists: Sequence[Tensors]) -> list[Any]:
    """Return the output lists of a call as the future of c10d's Work has them: one by itself, several as lists."""
    return list(lists[0]) if len(lists) == 1 else [list(each) for each in lists]


def begin_all(
    pg: Group, name: str, inputs: Sequence[torch.Tensor], calls: Iterable[Work | None], result: list[Any]
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


def check_root_tensor(call: str, index: Any, length: int) -> int:
    """Return which tensor of a list is the root's; raise c10d's error if the list has no such one."""
    if not 0 <= (index := as_int(index, "the number of the root's tensor")) < length:
        raise MismatchError(f"{call}: invalid root tensor: {index} (the list has {length} tensors)")
    return index


def check_same_kind(call: str, tensors: Tensors) -> None:
    """Raise c10d's error unless tensors have one dtype, size and layout."""
    if not tensors:
        raise MismatchError(f"{call}: requires non-empty tensor list")
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.dtype != first.dtype:
            raise MismatchError(
                f"{call}: invalid tensor type at index {index} (expected {first.dtype}, got {tensor.dtype})"
            )
        if tensor.shape != first.shape:
            raise MismatchError(
                f"{call}: invalid tensor size at index {index} (expected {tuple(first.shape)}, got "
                f"{tuple(tensor.shape)})"
            )
        if tensor.layout is not first.layout:
            raise MismatchError(
                f"{call}: invalid tensor layout at index {index} (expected {first.layout}, got {tensor.layout})"
            )
    if first.layout is not torch.sparse_coo or call != table.ALL_REDUCE.name:
        buffers.check_dense(call, *tensors)


def combined(pg: Group, row: Row, tensors: Tensors, op: Any, async_op: bool) -> torch.Tensor:
    """Return this rank's tensors combined, in memory of their own."""
    check_same_kind(row.name, tensors)
    reduction.check(row, tensors[0].dtype, op)
    is_sparse = tensors[0].layout is torch.sparse_coo
    if is_sparse:
        check_sparse(pg, Call(row, tensors[0], tensors[0], op))
    if not async_op:
        pg.backend(tensors[0].device).settle()  # what is queued may still write to them
    if len(tensors) == 1:
        return tensors[0].clone()
    local = reduction.SUM if op in (reduction.AVG, reduction.PREMUL_SUM) else op
    first = tensors[0].detach().clone()
    values = [first, *(tensor.detach().to(first.device) for tensor in tensors[1:])]
    if is_sparse:
        return sum(values[1:], first)
    wide = reduction.WIDE.get(first.dtype)
    if wide is not None:
        values = [value.to(wide) for value in values]
    total = reduction.fold([value.reshape(-1) for value in values], local).view(first.shape)
    if op == reduction.AVG:
        reduction.average(total, len(tensors))
    return total.to(first.dtype)


def put_in_all(values: torch.Tensor, tensors: Tensors) -> None:
    for tensor in tensors:
        if tensor.layout is torch.strided:
            buffers.put(values.view(tensor.shape), tensor)
        else:
            with torch.no_grad():
                tensor.copy_(values)


def all_reduce(pg: Group, tensors: Tensors, op: Any, async_op: bool) -> Work | None:
    """Combine all tensors of all ranks and write the result to each of them."""
    how = canonical(op)
    total = combined(pg, table.ALL_REDUCE, tensors, how, async_op)
    then = partial(put_in_all, total, tensors)
    return issue_any(Call(table.ALL_REDUCE, total, total, how, finish=then, result=list(tensors)), pg, async_op)


def reduce(pg: Group, tensors: Tensors, op: Any, root: int, root_tensor: int, async_op: bool) -> Work | None:
    """Combine all tensors of all ranks and write the result to one tensor of one rank."""
    how, root_tensor = canonical(op), check_root_tensor("reduce", root_tensor, len(tensors))
    total = combined(pg, table.REDUCE, tensors, how, async_op)
    recv, written = (total, [tensors[root_tensor]]) if pg.rank() == root else (None, [])
    then = partial(put_in_all, total, written)
    return issue_any(Call(table.REDUCE, total, recv, how, root, finish=then, result=list(tensors)), pg, async_op)


def broadcast(pg: Group, tensors: Tensors, root: int, root_tensor: int, async_op: bool) -> Work | None:
    """Write one tensor of one rank to all tensors of all ranks."""
    root_tensor = check_root_tensor("broadcast", root_tensor, len(tensors))
    check_same_kind("broadcast", tensors)
    flat = flatten(pg, [tensors[root_tensor]], tensors[0].dtype, async_op).clone()
    then = partial(put_in_all, flat, tensors)
    return issue_any(Call(table.BROADCAST, flat, flat, root=root, finish=then, result=list(tensors)), pg, async_op)


def all_gather(pg: Group, outputs: Sequence[Tensors], inputs: Tensors, async_op: bool) -> Work | None:
    """Gather all tensors of all ranks into each list of outputs, rank by rank."""
    check_same_kind("all_gather", [*inputs, *(tensor for each in outputs for tensor in each)])
    device = inputs[0].device
    flat = flatten(pg, [tensor.to(device) for tensor in inputs], inputs[0].dtype, async_op)
    everything = torch.empty(len(pg.ranks) * flat.numel(), dtype=flat.dtype, device=device)
    copies = [buffers.make_unpack(everything, list(each)) for each in outputs]

    def copy() -> None:
        for each in copies:
            each()

    call = Call(table.ALL_GATHER_SINGLE, flat, everything, finish=copy, result=as_shown(outputs))
    return issue_any(call, pg, async_op)


def reduce_scatter(pg: Group, outputs: Tensors, inputs: Sequence[Tensors], op: Any, async_op: bool) -> Work | None:
    """Combine the lists of all tensors of all ranks and leave each output its entry."""
    check_same_kind("reduce_scatter", [*outputs, *(tensor for each in inputs for tensor in each)])
    how, device = canonical(op), outputs[0].device
    parts = [buffers.concatenate([tensor.to(device) for tensor in each], outputs[0].dtype) for each in inputs]
    total = combined(pg, table.REDUCE_SCATTER_SINGLE, parts, how, async_op)
    mine = torch.empty(total.numel() // len(pg.ranks), dtype=total.dtype, device=device)
    then = buffers.make_unpack(mine, list(outputs))
    return issue_any(
        Call(table.REDUCE_SCATTER_SINGLE, total, mine, how, finish=then, result=list(outputs)), pg, async_op
    )
