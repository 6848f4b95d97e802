"""Collectives on lists of tensors: each is one call of the library.

MPI takes the tensors of a list where they are (``TensorList``), other libraries one tensor that holds all of them.
The facade (``hpcdist.c10d``) and c10d's methods of a group call the same functions, so a rank that uses the one and a
rank that uses the other make the same MPI or NCCL call. Which call that is follows from what every rank knows: which
function was called, dtypes, and sizes that c10d makes equal on all ranks. How a tensor of one rank lies in memory
decides only how it is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcdist.core import hooks, profiling, world
from hpcdist.core.buffers import (
    PLAIN_TYPES,
    TensorList,
    as_list,
    as_splits,
    as_tensor,
    as_tensors,
    check_dense,
    check_length,
    check_sizes,
    for_reading,
    for_writing,
    is_plain,
    joined,
    joint,
    put,
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


def takes_lists(pg: Group) -> bool:
    """Tell whether the library takes a list's CPU tensors where they are, and nobody has to see one tensor of all."""
    return (
        pg.cpu is not None
        and pg.cpu.has_lists
        and hooks.compare is None
        and not hooks.reproducible
        and not hooks.has_modes()
    )


def are_taken(pg: Group, tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether a list of these goes to the library as it is, its strided tensors copied one by one."""
    return takes_lists(pg) and all(map(IS_CPU, tensors)) and not hooks.has_wrapper(tensors)


def to_read(
    pg: Group, inputs: list[torch.Tensor], dtype: torch.dtype, is_taken: bool, async_op: bool
) -> torch.Tensor | TensorList:
    """Return a call's inputs as what the library reads."""
    if not is_taken:
        return in_one(pg, inputs, dtype, async_op)
    if not async_op:
        pg.backend("cpu").settle()
    return TensorList(list(map(for_reading, inputs)), dtype)


def to_write(
    outputs: list[torch.Tensor], dtype: torch.dtype, is_taken: bool
) -> tuple[torch.Tensor | TensorList, Callable[[], None] | None]:
    """Return a call's outputs as what the library writes, and what then copies to them, if anything is to be copied."""
    if not is_taken:
        flat = joint(outputs, dtype)
        return flat, scattering(flat, outputs)
    written = list(map(for_writing, outputs))
    copied = [pair for pair in zip(written, outputs, strict=True) if pair[0] is not pair[1]]

    def copy() -> None:
        for values, target in copied:
            put(values, target)

    return TensorList(written, dtype), copy if copied else None


def check_alike(call: str, *tensors: torch.Tensor) -> torch.dtype:
    """Return the dtype that a call's tensors travel in; raise c10d's error unless they have one and are dense."""
    check_dense(call, *tensors)
    return same_dtype(*tensors)


def all_gather(pg: Group, tensor_list: Any, tensor: Any, async_op: bool) -> Work | None:
    """Gather the tensors of all ranks into a list on every rank; entry r has the size of rank r's tensor."""
    recv: Any = as_list(tensor_list, tensor.dtype) if takes_lists(pg) and is_plain(tensor) and tensor.is_cpu else None
    if recv is not None and len(recv.sizes) == len(pg.ranks) and recv.sizes[pg.rank()] == tensor.nbytes:
        send, then, sizes, outputs = tensor, None, recv.sizes, tensor_list
        dtype = send.dtype
    else:
        outputs = as_tensors(tensor_list, "tensor_list", writable=True)
        send = as_tensor(tensor, "tensor")
        check_length("all_gather", "tensor_list", outputs, len(pg.ranks))
        dtype = check_alike("all_gather", send, *outputs)
        check_sizes("all_gather", "tensor_list", [outputs[pg.rank()]], send)
        recv, then = to_write(outputs, dtype, are_taken(pg, [send, *outputs]))
        sizes = [each.nbytes for each in outputs]
    counts, row = None, ALL_GATHER
    if sizes.count(sizes[0]) < len(sizes):  # the sizes are the same on every rank
        counts = [send.nbytes // dtype.itemsize], [size // dtype.itemsize for size in sizes]
    elif not pg.backend(send.device).has_lists:
        row = ALL_GATHER_SINGLE
    return issue_any(Call(row, send, recv, counts=counts, finish=then, result=outputs), pg, async_op)


def gather(pg: Group, tensor: Any, gather_list: Any, root: int, async_op: bool) -> Work | None:
    """Gather the tensors of all ranks into a list on the root; ``gather_list`` is not looked at elsewhere."""
    if pg.rank() != root:
        return issue_any(Call(GATHER, tensor, root=root), pg, async_op)
    recv: Any = as_list(gather_list, tensor.dtype) if takes_lists(pg) and is_plain(tensor) and tensor.is_cpu else None
    if recv is not None and recv.sizes == [tensor.nbytes] * len(pg.ranks):
        return issue_any(Call(GATHER, tensor, recv, root=root, result=gather_list), pg, async_op)
    given = as_tensor(tensor, "tensor")
    outputs = as_tensors(gather_list, "gather_list", writable=True)
    check_length("gather", "gather_list", outputs, len(pg.ranks))
    dtype = check_alike("gather", given, *outputs)
    check_sizes("gather", "gather_list", outputs, given)
    recv, then = to_write(outputs, dtype, are_taken(pg, [given, *outputs]))
    return issue_any(Call(GATHER, given, recv, root=root, finish=then, result=outputs), pg, async_op)


def scatter(pg: Group, tensor: Any, scatter_list: Any, root: int, async_op: bool) -> Work | None:
    """Hand each rank its tensor of the root's list; ``scatter_list`` is not looked at elsewhere."""
    if pg.rank() != root:
        return issue_any(Call(SCATTER, None, tensor, root=root), pg, async_op)
    send: Any = as_list(scatter_list, tensor.dtype) if takes_lists(pg) and is_plain(tensor) and tensor.is_cpu else None
    if send is not None and send.sizes == [tensor.nbytes] * len(pg.ranks):
        return issue_any(Call(SCATTER, send, tensor, root=root), pg, async_op)
    output = as_tensor(tensor, "tensor", writable=True)
    inputs = as_tensors(scatter_list, "scatter_list")
    check_length("scatter", "scatter_list", inputs, len(pg.ranks))
    dtype = check_alike("scatter", output, *inputs)
    check_sizes("scatter", "scatter_list", inputs, output)
    send = to_read(pg, inputs, dtype, are_taken(pg, [output, *inputs]), async_op)
    return issue_any(Call(SCATTER, send, output, root=root), pg, async_op)


def reduce_scatter(pg: Group, output: Any, input_list: Any, op: Any, async_op: bool) -> Work | None:
    """Combine the lists of all ranks and leave each rank its entry; entry r has one size on all ranks."""
    send: Any = as_list(input_list, output.dtype) if takes_lists(pg) and is_plain(output) and output.is_cpu else None
    target = output
    if send is None or len(send.sizes) != len(pg.ranks) or send.sizes[pg.rank()] != output.nbytes:
        target = as_tensor(output, "output", writable=True)
        inputs = as_tensors(input_list, "input_list")
        check_length("reduce_scatter", "input_list", inputs, len(pg.ranks))
        dtype = check_alike("reduce_scatter", target, *inputs)
        for each in inputs:
            if each.dtype is not target.dtype:
                check_parts(REDUCE_SCATTER, op, each, target)
        check_sizes("reduce_scatter", "input_list", [inputs[pg.rank()]], target)
        sizes = [each.nbytes for each in inputs]
        send = to_read(pg, inputs, dtype, are_taken(pg, [target, *inputs]), async_op)
    else:
        dtype, sizes = output.dtype, send.sizes
    if sizes.count(sizes[0]) == len(sizes):  # the sizes are the same on every rank
        return issue_any(Call(REDUCE_SCATTER_SINGLE, send, target, op), pg, async_op)
    counts = [size // dtype.itemsize for size in sizes], [target.nbytes // dtype.itemsize]
    return issue_any(Call(REDUCE_SCATTER, send, target, op, counts=counts), pg, async_op)


def all_to_all(pg: Group, output_list: Any, input_list: Any, async_op: bool) -> Work | None:
    """Send one tensor to every rank and receive one from each; sizes may differ from rank to rank and pair to pair."""
    send: Any = None
    recv: Any = None
    if takes_lists(pg) and input_list.__class__ is list and input_list and input_list[0].__class__ in PLAIN_TYPES:
        dtype = input_list[0].dtype
        send, recv = as_list(input_list, dtype), as_list(output_list, dtype)
    if send is not None and recv is not None and len(send.sizes) == len(recv.sizes) == len(pg.ranks):
        then, outputs, sent, received = None, output_list, send.sizes, recv.sizes
    else:
        outputs = as_tensors(output_list, "output_tensor_list", writable=True)
        inputs = as_tensors(input_list, "input_tensor_list")
        check_length("all_to_all", "output_tensor_list", outputs, len(pg.ranks))
        check_length("all_to_all", "input_tensor_list", inputs, len(pg.ranks))
        dtype = check_alike("all_to_all", *outputs, *inputs)
        is_taken = are_taken(pg, [*inputs, *outputs])
        send = to_read(pg, inputs, dtype, is_taken, async_op)
        recv, then = to_write(outputs, dtype, is_taken)
        sent, received = ([each.nbytes for each in side] for side in (inputs, outputs))
    each = dtype.itemsize
    counts = [size // each for size in sent], [size // each for size in received]
    return issue_any(Call(ALL_TO_ALL, send, recv, counts=counts, finish=then, result=outputs), pg, async_op)


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
