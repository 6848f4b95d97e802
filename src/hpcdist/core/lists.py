"""Collectives on lists of tensors: each is one call of the library.

MPI takes the tensors of a list where they are (``TensorList``), other libraries take one tensor that holds all of them.
The choice follows from facts that every rank knows: the function, dtypes, and sizes that c10d makes equal on all ranks.
The layout of one rank's tensor decides only how it is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from hpcdist.core import buffers, hooks, table
from hpcdist.core.buffers import PLAIN_TYPES, TensorList
from hpcdist.core.call import Call, chain
from hpcdist.core.errors import MismatchError
from hpcdist.core.group import Group
from hpcdist.core.reduction import PREMUL_SUM, canonical, factor_of, is_complex, is_done_by_parts
from hpcdist.core.table import Counts, Row, scale

IS_CPU = attrgetter("is_cpu")


def flatten(pg: Group, inputs: list[torch.Tensor], dtype: torch.dtype, async_op: bool) -> torch.Tensor:
    """Return the elements of a call's inputs one after another, in the dtype that all its tensors travel in.

    A synchronous call first waits for queued calls, which may still write to its inputs.
    """
    if not async_op:
        pg.backend(inputs[0].device).settle()
    return buffers.concatenate(inputs, dtype)


def takes_lists(pg: Group) -> bool:
    """Tell whether the library takes a list's CPU tensors where they are, and no hook needs one tensor of all."""
    return pg.cpu is not None and pg.cpu.has_lists and hooks.compare is None and not hooks.reproducible


def takes_tensors(pg: Group, tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether these tensors go to the library as a list, strided ones as copies."""
    return takes_lists(pg) and all(map(IS_CPU, tensors))


def to_read(
    pg: Group, inputs: list[torch.Tensor], dtype: torch.dtype, is_taken: bool, async_op: bool
) -> torch.Tensor | TensorList:
    if not is_taken:
        return flatten(pg, inputs, dtype, async_op)
    if not async_op:
        pg.backend("cpu").settle()
    return TensorList(list(map(buffers.for_reading, inputs)), dtype)


def to_write(
    outputs: list[torch.Tensor], dtype: torch.dtype, is_taken: bool
) -> tuple[torch.Tensor | TensorList, Callable[[], None] | None]:
    """Return the library's output for a call's outputs, and a function that copies it to them, None if not needed."""
    if not is_taken:
        flat = buffers.allocate_flat(outputs, dtype)
        return flat, buffers.make_unpack(flat, outputs)
    written = list(map(buffers.for_writing, outputs))
    return TensorList(written, dtype), put_back(written, outputs)


def put_back(written: list[torch.Tensor], outputs: list[torch.Tensor]) -> Callable[[], None] | None:
    """Return a function that copies a call's results to its outputs, where other tensors stood in; None if none did."""
    copied = [pair for pair in zip(written, outputs, strict=True) if pair[0] is not pair[1]]

    def copy() -> None:
        for values, target in copied:
            buffers.copy_into(values, target)

    return copy if copied else None


def common_dtype(call: str, *tensors: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a call's tensors travel; raise c10d's error unless they have one and are dense."""
    buffers.check_dense(call, *tensors)
    buffers.check_memory(*tensors)
    return buffers.same_dtype(*tensors)


def with_list(pg: Group, call: Call, async_op: bool) -> Call:
    """Check a call of one tensor and a list with one for each rank, and return it on buffers for the library.

    The choice follows from the sizes of the list's entries, which are the same on all ranks.
    """
    row, send, recv, op, root, *_ = call
    is_written, rank, then = recv.__class__ is list, pg.rank(), None
    one, many = (send, recv) if is_written else (recv, send)
    listed: Any = buffers.as_list(many, one.dtype) if takes_lists(pg) and buffers.is_plain(one) and one.is_cpu else None
    if listed is not None and (
        len(listed.sizes) != len(pg.ranks)
        or listed.sizes[rank] != one.nbytes
        or (row.rooted and listed.sizes.count(one.nbytes) < len(listed.sizes))
    ):
        listed = None
    if listed is not None:
        many, sizes = listed.tensors, listed.sizes
    else:
        name, list_name = ARRANGED[row]
        one = buffers.as_tensor(one, name, writable=not is_written)
        many = buffers.as_tensors(many, list_name, writable=is_written)
        buffers.check_length(row.name, list_name, many, len(pg.ranks))
        dtype = common_dtype(row.name, one, *many)
        for each in many if row.reduces else ():
            if each.dtype is not one.dtype:
                buffers.check_parts(row, op, each, one)
        buffers.check_sizes(row.name, list_name, many if row.rooted else [many[rank]], one)
        is_taken, sizes = takes_tensors(pg, [one, *many]), [each.nbytes for each in many]
        if is_written:
            listed, then = to_write(many, dtype, is_taken)
        else:
            listed = to_read(pg, many, dtype, is_taken, async_op)
    counts, width = None, listed.dtype.itemsize
    if not row.rooted and sizes.count(sizes[0]) < len(sizes):
        counts = [one.nbytes // width], [size // width for size in sizes]
    elif row is table.REDUCE_SCATTER:
        row = table.REDUCE_SCATTER_SINGLE
    elif row is table.ALL_GATHER and not pg.backend(one.device).has_lists:
        row = table.ALL_GATHER_SINGLE
    if is_written:
        return Call(row, one, listed, op, root, counts, then, many)
    return Call(row, listed, one, op, root, counts and counts[::-1])


def all_to_all(pg: Group, call: Call, async_op: bool) -> Call:
    """Check an exchange of one tensor with every rank; sizes may differ from rank to rank and pair to pair."""
    input_list, output_list = call.send, call.recv
    send: Any = None
    recv: Any = None
    if takes_lists(pg) and input_list.__class__ is list and input_list and input_list[0].__class__ in PLAIN_TYPES:
        dtype = input_list[0].dtype
        send, recv = buffers.as_list(input_list, dtype), buffers.as_list(output_list, dtype)
    if send is not None and recv is not None and len(send.sizes) == len(recv.sizes) == len(pg.ranks):
        then, outputs, sent, received = None, recv.tensors, send.sizes, recv.sizes
    else:
        outputs = buffers.as_tensors(output_list, "output_tensor_list", writable=True)
        inputs = buffers.as_tensors(input_list, "input_tensor_list")
        buffers.check_length("all_to_all", "output_tensor_list", outputs, len(pg.ranks))
        buffers.check_length("all_to_all", "input_tensor_list", inputs, len(pg.ranks))
        dtype = common_dtype("all_to_all", *outputs, *inputs)
        is_taken = takes_tensors(pg, [*inputs, *outputs])
        send = to_read(pg, inputs, dtype, is_taken, async_op)
        recv, then = to_write(outputs, dtype, is_taken)
        sent, received = ([each.nbytes for each in side] for side in (inputs, outputs))
    each = dtype.itemsize
    counts = [size // each for size in sent], [size // each for size in received]
    return Call(call.row, send, recv, None, None, counts, then, outputs)


def check_pairs(call: str, outputs: Any, inputs: Any) -> None:
    """Raise c10d's error unless there are as many outputs as inputs, and some."""
    for side, given in (("input", inputs), ("output", outputs)):
        if not isinstance(given, (list, tuple)):
            raise TypeError(f"{call}: `{side}s` is of type {type(given).__name__}; expected a list")
    if not len(inputs):
        raise MismatchError(f"{call}: requires non-empty input tensor list")
    if len(outputs) != len(inputs):
        raise MismatchError(
            f"{call}: requires input/output tensor lists to have the same length; got {len(inputs)} and {len(outputs)}"
        )


def check_lengths(call: str, side: str, lists: Any, length: int) -> None:
    for index, each in enumerate(lists):
        if not isinstance(each, (list, tuple)):
            raise TypeError(f"{call}: `{side}s[{index}]` is of type {type(each).__name__}; expected a list")
        if len(each) != length:
            raise MismatchError(
                f"{call}: invalid {side} tensor list at index {index} (expected length {length}, got {len(each)})"
            )


def counts_of_splits(
    pg: Group, given: torch.Tensor, output: torch.Tensor, dtype: torch.dtype, splits: Counts | None
) -> Counts | None:
    """Return the elements that an all_to_all_single sends to each rank and receives; None for equal shares.

    Splits are rows of dimension 0, None or empty for equal shares. Some ranks may give them and others not: the same
    call of the library carries both.
    """
    if splits is None and given.dim() == output.dim() == 1:  # rows are elements, checked with all sizes
        return None
    size, width = len(pg.ranks), dtype.itemsize  # counts are of the dtype in which both travel
    to, of = (buffers.as_splits(each) for each in splits or (None, None))
    sent = [each * given.itemsize // width for each in buffers.rows_of(given, to, size, "input")]
    received = [each * output.itemsize // width for each in buffers.rows_of(output, of, size, "output")]
    return (sent, received) if to or of else None


def splits_of(received: Any, sent: Any) -> Counts | None:
    """Return the splits of an all_to_all_single in the form that ``issue`` takes."""
    if sent.__class__ is not list:
        sent = buffers.as_splits(sent)
    if received.__class__ is not list:
        received = buffers.as_splits(received)
    return (sent, received) if sent or received else None


# the rows of calls on lists, and the names of the functions' arguments
ARRANGED: dict[Row, tuple[str, str]] = {
    table.ALL_GATHER: ("tensor", "tensor_list"),
    table.GATHER: ("tensor", "gather_list"),
    table.SCATTER: ("tensor", "scatter_list"),
    table.REDUCE_SCATTER: ("output", "input_list"),
    table.ALL_TO_ALL: ("output_tensor_list", "input_tensor_list"),
}


def arrange(pg: Group, call: Call, async_op: bool) -> Call:
    """Check a call on lists, and return it on buffers for the library: lists of memory, or one tensor of all."""
    call = (all_to_all if call.row is table.ALL_TO_ALL else with_list)(pg, call, async_op)
    row, send, recv, op, root, counts, then, result, _ = call
    if send.__class__ is not TensorList and recv.__class__ is not TensorList:
        return call
    if result is None:
        result = [recv]
    backend = pg.backend("cpu")
    if row.reduces:
        op = canonical(op)
        dtype = send.dtype
        backend.check_reduction(row, dtype, op)
        if dtype.is_complex and is_done_by_parts(op):
            if op == PREMUL_SUM and is_complex(factor_of(op)):
                return call._replace(send=buffers.concatenate(send.tensors, dtype))
            send = TensorList(send.tensors, dtype.to_real())
            counts = counts and scale(counts, 2)
    buffers.check_memory(*(each for each in (send, recv) if each.__class__ is not TensorList))
    if send.__class__ is not TensorList and not buffers.is_direct(send):
        if not async_op:
            backend.settle()  # a call that is queued may still write what is copied here
        send = buffers.for_reading(send)
    if recv.__class__ is not TensorList:
        target = buffers.for_writing(recv)
        if target is not recv:
            then = chain(partial(buffers.copy_into, target, recv), then)
        recv = target
    if send.dtype is not recv.dtype:  # one is complex, the list holds real and imaginary parts
        send, recv = (
            each if each.__class__ is TensorList or not each.is_complex() else torch.view_as_real(each)
            for each in (send, recv)
        )
    return Call(row, send, recv, op, root, counts, then, result)
