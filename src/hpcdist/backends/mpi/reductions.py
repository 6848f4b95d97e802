"""Reductions over MPI: datatype, operation, and what surrounds the call, for every dtype and op.

Native if MPI has the type and the op. Narrow floats are widened to float32, reduced natively and rounded once. Open MPI
adds narrow integers as int32, and MPICH before 5.0 compares unsigned ones as signed ones of a wider type. MIN and MAX
of floats compare integers of their order, because MPI leaves NaN undefined: on MPICH some ranks would get it and others
a number. AVG is a SUM and a division; PREMUL_SUM a multiplication and a SUM; bool uses MPI's logical ops.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from hpcdist.backends.mpi.datatypes import DATATYPES
from hpcdist.core import reduction
from hpcdist.core.reduction import AVG, PREMUL_SUM, SIGNED
from hpcdist.core.table import Row

VENDOR, VERSION = MPI.get_vendor()
# by the name of torch's op (``core.reduction.combining``)
MPI_OPS = {
    "SUM": MPI.SUM,
    "PRODUCT": MPI.PROD,
    "MIN": MPI.MIN,
    "MAX": MPI.MAX,
    "BAND": MPI.BAND,
    "BOR": MPI.BOR,
    "BXOR": MPI.BXOR,
}
# of 8 and 16 bits, whose sums Open MPI's op/avx saturates: 200 + 100 is 255 in uint8 if it is one of 16 or 32 elements
NARROW = (torch.int8, torch.uint8, torch.int16, torch.uint16)
# MPICH before 4.1.2 and its children take MPI_IN_PLACE for an address at another root than 0, from 2 KiB on, and crash
# (pmodels/mpich, issue 6540)
READS_IN_PLACE = VERSION < (4, 1, 2) if VENDOR == "MPICH" else VENDOR not in ("Open MPI", "Intel MPI")
# MPICH 4.0.2 takes unsigned integers for signed ones in MIN and MAX (pmodels/mpich, issues 6083 and 7507). A wider type
# has their order; of 64 bits ``Keys`` have it
COMPARES_AS_SIGNED = VERSION < (5,) if VENDOR == "MPICH" else READS_IN_PLACE
INTEGERS = {4: np.int32, 8: np.int64}  # by bytes
KEYS = {torch.float32: torch.int32, torch.float64: torch.int64}  # what MIN and MAX of floats compare
LOGICAL_OPS = {"BAND": MPI.LAND, "BOR": MPI.LOR, "BXOR": MPI.LXOR}  # MPI has no bitwise op for its C++ bool


def wide(dtype: torch.dtype, name: str) -> torch.dtype | None:
    """Return the dtype in which MPI combines values by an op of a name, if it is not their own."""
    if dtype in NARROW and reduction.combining(dtype, name) == "SUM" and VENDOR == "Open MPI":
        return torch.int32  # which wraps, and so do its lowest bits
    return SIGNED[dtype] if is_compared_as_signed(dtype, name) else reduction.WIDE.get(dtype)


def is_compared_as_signed(dtype: torch.dtype, name: str) -> bool:
    """Tell whether MPI would order values of an unsigned dtype wrongly, in an op of a name."""
    return COMPARES_AS_SIGNED and name in ("MIN", "MAX") and dtype in SIGNED


class Keys:
    """Memory of floats, or of int64 that stand for uint64, whose values MPI compares as signed integers of their order.

    NumPy's calls take less time than torch's.
    """

    def __init__(self, values: torch.Tensor, name: str) -> None:
        self._values = array = values.numpy()
        self._keys = array.view(INTEGERS[array.itemsize])
        self._is_float = values.is_floating_point()
        self._spare, self._is_nan = np.empty_like(self._keys), np.empty_like(array, bool)
        largest = np.iinfo(self._keys.dtype).max
        self._sign, self._largest, self._lowest, self._of_nan = (
            np.array(each, self._keys.dtype)  # a number would be converted by each call
            for each in (8 * array.itemsize - 1, largest, ~largest, ~largest if name == "MIN" else largest)
        )

    def make(self) -> None:
        """Turn the values to keys."""
        if self._is_float:
            np.isnan(self._values, out=self._is_nan)
        self.turn()
        if self._is_float:
            np.copyto(self._keys, self._of_nan, where=self._is_nan)

    def turn(self) -> None:
        """Turn keys to values, or the other way round those that are no NaN."""
        keys, spare = self._keys, self._spare
        if self._is_float:  # of what is below zero all bits but the sign flip
            np.right_shift(keys, self._sign, out=spare)
            np.bitwise_and(spare, self._largest, out=spare)
            np.bitwise_xor(keys, spare, out=keys)
        else:
            np.bitwise_xor(keys, self._lowest, out=keys)


def mpi_op(dtype: torch.dtype, name: str) -> MPI.Op:
    """Return the op of MPI that combines values of a dtype by torch's op of a name."""
    ops = LOGICAL_OPS if dtype is torch.bool else MPI_OPS
    return ops[reduction.combining(dtype, name)]


class Reduction(NamedTuple):
    """How one dtype and op are reduced: over which MPI type and op, and what surrounds the call."""

    datatype: MPI.Datatype
    op: MPI.Op
    wide: torch.dtype | None  # the dtype on the wire if it is not the tensor's own
    factor: Any  # of a PREMUL_SUM
    averages: bool
    in_memory: bool  # whether the tensor's own memory goes to MPI
    is_direct: bool  # and nothing is left to do after the call
    keyed: str  # the name of MIN or MAX if MPI compares integers that stand for the values (``Keys``)

    def before(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values to reduce, in memory of their own."""
        values = tensor.to(self.wide) if self.wide is not None else tensor.clone()
        if self.keyed:
            Keys(values, self.keyed).make()
        return values if self.factor is None else values.mul_(self.factor)

    def after(self, values: torch.Tensor, recv: torch.Tensor, size: int) -> None:
        if self.keyed:
            Keys(values, self.keyed).turn()
        if values is not recv and not recv.is_floating_point() and not recv.is_complex():
            values = recv.copy_(values)  # a sum wraps before it is divided, as it does if MPI adds in the dtype
        if self.averages:
            reduction.average(values, size)
        if values is not recv:
            recv.copy_(values)


def plan(row: Row, dtype: torch.dtype, op: Any) -> Reduction:
    """Return how to reduce a dtype by an op, or raise c10d's error (see ``core.reduction.check``)."""
    reduction.check(row, dtype, op)
    premultiplies = op == PREMUL_SUM
    name = reduction.name_of(op)
    on_wire = wide(dtype, name)
    factor = reduction.premultiplier(op) if premultiplies else None
    compared = on_wire or dtype
    is_keyed = name in ("MIN", "MAX") and (compared in KEYS or (dtype is torch.uint64 and on_wire is not None))
    on_memory = on_wire is None and factor is None and not is_keyed
    return Reduction(
        datatype=DATATYPES[KEYS.get(compared, compared) if is_keyed else compared],
        op=mpi_op(dtype, name),
        wide=on_wire,
        factor=factor,
        averages=op == AVG,
        in_memory=on_memory,
        is_direct=on_memory and op != AVG,
        keyed=name if is_keyed else "",
    )
