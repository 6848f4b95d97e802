"""Reductions over MPI: datatype, operation, and the steps around the call, for every dtype and op.

MPI's own type and op are used if it has them. Narrow floats are widened to float32, reduced and rounded once. Open MPI
adds narrow integers as int32, and MPICH before 5.0 compares unsigned ones as signed ones of a wider type. MIN and MAX
of floats compare integers of the same order, because MPI leaves NaN undefined: on MPICH some ranks would get NaN and
others a number. AVG is a SUM and a division; PREMUL_SUM a multiplication and a SUM; bool uses MPI's logical ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from hpcdist.backends.mpi.datatypes import DATATYPES, address, array_on, memory
from hpcdist.core import reduction
from hpcdist.core.reduction import SIGNED
from hpcdist.core.table import Row

VENDOR, VERSION = MPI.get_vendor()
# by the name of torch's op (``core.reduction.combining_op``)
MPI_OPS = {
    "SUM": MPI.SUM,
    "PRODUCT": MPI.PROD,
    "MIN": MPI.MIN,
    "MAX": MPI.MAX,
    "BAND": MPI.BAND,
    "BOR": MPI.BOR,
    "BXOR": MPI.BXOR,
}
# integers of 8 and 16 bits; Open MPI's op/avx saturates their sums: in a vector of uint8, 200 + 100 is 255
NARROW = (torch.int8, torch.uint8, torch.int16, torch.uint16)
# MPICH before 4.1.2 and its children take MPI_IN_PLACE for an address if the root is not rank 0, from 2 KiB on, and
# crash (pmodels/mpich, issue 6540)
READS_IN_PLACE = VERSION < (4, 1, 2) if VENDOR == "MPICH" else VENDOR not in ("Open MPI", "Intel MPI")
# MPICH 4.0.2 takes unsigned integers for signed ones in MIN and MAX (pmodels/mpich, issues 6083 and 7507). A wider type
# has their order; for 64 bits ``Flipped`` makes integers of that order
COMPARES_AS_SIGNED = VERSION < (5,) if VENDOR == "MPICH" else READS_IN_PLACE
# the integers that MIN and MAX of floats compare; floats of 8 bits, whose NaN have other bits, are widened
KEYS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
shift, both, differ, add, subtract = np.right_shift, np.bitwise_and, np.bitwise_xor, np.add, np.subtract
LOGICAL_OPS = {"BAND": MPI.LAND, "BOR": MPI.LOR, "BXOR": MPI.LXOR}  # MPI has no bitwise op for its C++ bool


def wide(dtype: torch.dtype, name: str) -> torch.dtype | None:
    """Return the dtype in which MPI combines values by an op, given by name, if it is not their own."""
    if dtype in NARROW and reduction.combining_op(dtype, name) == "SUM" and VENDOR == "Open MPI":
        return torch.int32  # it wraps, and its lowest bits are those of the narrow sum
    return SIGNED[dtype] if is_compared_as_signed(dtype, name) else reduction.WIDE.get(dtype)


def is_compared_as_signed(dtype: torch.dtype, name: str) -> bool:
    """Tell whether MPI would order values of an unsigned dtype wrongly in an op, given by name."""
    return COMPARES_AS_SIGNED and name in ("MIN", "MAX") and dtype in SIGNED


# makes a function's arguments from the addresses of input and output, the latter None if this rank does not receive,
# and from the numbers of elements sent and received
Bind = Callable[[int, "int | None", int, int], tuple[Any, ...]]


class Encoding:
    """Integers in place of values in MPI's call: in this class the same integers, of a wider dtype.

    A call of NumPy takes a third of the time of torch's. Settings for floats (``numpy.seterr``) do not apply to
    integers.
    """

    def __init__(self, dtype: torch.dtype, sent: torch.dtype) -> None:
        self.dtype, self.sent = map(numpy_dtype, (dtype, sent))  # the dtype of the values, and that of MPI's integers
        self.datatype = DATATYPES[sent]

    def encode(self, values: Any, sent: Any) -> None:
        sent[...] = values

    def decode(self, result: Any, values: Any) -> None:
        """Write the values of the integers that MPI returned; these may be overwritten."""
        values[...] = result


class Flipped(Encoding):
    """Signed integers of the same order, for uint64."""

    def __init__(self) -> None:
        super().__init__(torch.int64, torch.int64)
        self._lowest = np.array(np.iinfo(np.int64).min)

    def encode(self, values: Any, sent: Any) -> None:
        differ(values, self._lowest, sent)

    def decode(self, result: Any, values: Any) -> None:
        differ(result, self._lowest, values)


class Keys(Encoding):
    """Signed integers of the same order, for floats; NaN of either sign is beyond the infinity that would win."""

    def __init__(self, dtype: torch.dtype, name: str) -> None:
        super().__init__(KEYS[dtype], KEYS[dtype])
        nans = round(1 / torch.finfo(dtype).eps) - 1  # the bits of infinity of each sign
        self._sign, self._largest, self._nans = (
            np.array(each, self.sent)  # arrays: a number would be converted at each call
            for each in (8 * dtype.itemsize - 1, np.iinfo(self.sent).max, nans if name == "MAX" else -nans)
        )

    def encode(self, values: Any, sent: Any) -> None:
        shift(values, self._sign, sent)
        both(sent, self._largest, sent)
        differ(values, sent, sent)  # of negative values all bits but the sign are inverted
        subtract(sent, self._nans, sent)  # NaN at the wrong end are moved to the other end

    def decode(self, result: Any, values: Any) -> None:
        add(result, self._nans, result)
        shift(result, self._sign, values)
        both(values, self._largest, values)
        differ(result, values, values)


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return np.dtype(str(dtype).removeprefix("torch."))


def array_of(tensor: torch.Tensor, dtype: np.dtype[Any]) -> Any:
    """Return the memory of a contiguous CPU tensor as a flat array of a dtype of the same size."""
    return array_on(memory(tensor), tensor.numel(), dtype)


def mpi_op(dtype: torch.dtype, name: str) -> MPI.Op:
    """Return MPI's op for values of a dtype and torch's op, given by name."""
    ops = LOGICAL_OPS if dtype is torch.bool else MPI_OPS
    return ops[reduction.combining_op(dtype, name)]


class Reduction(NamedTuple):
    """How one dtype and op are reduced: MPI's type and op, and the steps around the call."""

    datatype: MPI.Datatype
    op: MPI.Op
    wide: torch.dtype | None  # to which torch converts values first, and from which it rounds the result
    encoding: Encoding | None  # the integers that MPI gets in place of these
    multiplies: bool  # whether values are multiplied by the factor of a PREMUL_SUM first
    averages: bool
    in_memory: bool  # whether the tensor's own memory goes to MPI
    is_direct: bool  # and there is no step after the call

    def before(self, tensor: torch.Tensor, op: Any, memory_of: Callable[[int], MPI.buffer]) -> torch.Tensor:
        """Return the values to reduce, as a copy; ``memory_of`` returns memory of a number of bytes."""
        values, encoding = tensor, self.encoding
        if self.wide is not None:
            values = tensor.to(self.wide)
        elif self.multiplies:
            values = tensor.clone()
        if self.multiplies:
            values.mul_(reduction.premultiplier(op))
        if encoding is None or not tensor.numel():
            return values
        sent = array_on(memory_of(tensor.numel() * encoding.sent.itemsize), tensor.numel(), encoding.sent)
        encoding.encode(array_of(values, encoding.dtype), sent)
        return torch.from_numpy(sent)

    def after(self, values: torch.Tensor, recv: torch.Tensor, size: int) -> None:
        if self.encoding is not None:
            result = array_of(values, self.encoding.sent)
            values = recv if self.wide is None else torch.empty(recv.shape, dtype=self.wide, device="cpu")
            self.encoding.decode(result, array_of(values, self.encoding.dtype))
        if self.averages:
            reduction.average(values, size)
        if values is not recv:
            recv.copy_(values)


def on_encoded(encoding: Encoding, function: Callable[..., Any]) -> Callable[..., None]:
    """Return a function that runs MPI's on encoded values; it takes the arguments that ``of_encoded`` makes."""
    encode, decode = encoding.encode, encoding.decode

    def run(values: Any, sent: Any, result: Any, target: Any, *arguments: Any) -> None:
        encode(values, sent)
        function(*arguments)
        if target is not None:
            decode(result, target)

    return run


def of_encoded(encoding: Encoding, bind: Bind, in_place: bool, memory_of: Callable[[int], MPI.buffer]) -> Bind:
    """Return a function that makes arguments from the values' addresses, with memory that other calls use too."""
    of_values, of_sent = encoding.dtype, encoding.sent

    def bind_encoded(place: int, target: int | None, sent: int, received: int) -> tuple[Any, ...]:
        start = 0 if in_place else sent * of_sent.itemsize  # bytes of the result
        kept = memory_of(start + received * of_sent.itemsize)
        values: Any = array_on(address(place, sent * of_values.itemsize), sent, of_values)
        returned, end = None, None
        if target is not None:
            returned = array_on(address(target, received * of_values.itemsize), received, of_values)
            end = kept.address + start
        return (
            values,
            array_on(kept, sent, of_sent),
            array_on(kept, received, of_sent, start),
            returned,
            *bind(kept.address, end, sent, received),
        )

    return bind_encoded


def encoding_of(dtype: torch.dtype, on_wire: torch.dtype | None, name: str) -> Encoding | None:
    """Return the encoding of values of a dtype as ``on_wire`` for an op, given by name; None without one."""
    if name in ("MIN", "MAX") and (compared := dtype if dtype in KEYS else on_wire) in KEYS:
        return Keys(compared, name)
    if on_wire is None or on_wire.is_floating_point or on_wire.is_complex:
        return None
    return Flipped() if dtype.itemsize == on_wire.itemsize else Encoding(dtype, on_wire)


def plan(row: Row, dtype: torch.dtype, op: Any) -> Reduction:
    """Return how to reduce a dtype by an op, or raise c10d's error (see ``core.reduction.check``)."""
    reduction.check(row, dtype, op)
    name = reduction.name_of(op)
    on_wire = wide(dtype, name)
    encoding = encoding_of(dtype, on_wire, name)
    if encoding is not None and (dtype in KEYS or not dtype.is_floating_point):
        on_wire = None
    multiplies = name == "PREMUL_SUM"
    on_memory = on_wire is None and not multiplies and encoding is None
    return Reduction(
        datatype=DATATYPES[on_wire or dtype] if encoding is None else encoding.datatype,
        op=mpi_op(dtype, name),
        wide=on_wire,
        encoding=encoding,
        multiplies=multiplies,
        averages=name == "AVG",
        in_memory=on_memory,
        is_direct=on_memory and name != "AVG",
    )
