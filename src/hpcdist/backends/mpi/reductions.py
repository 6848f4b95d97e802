"""Reductions over MPI: datatype, operation, and what surrounds the call, for every dtype and op.

Native if MPI has the type and the op. Narrow floats are widened to float32, reduced natively and rounded once. Open MPI
adds narrow integers as int32, and MPICH before 5.0 compares unsigned ones as signed ones of a wider type. AVG is a SUM
and a division; PREMUL_SUM a multiplication and a SUM; bool uses MPI's logical ops.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
# has their order; of 64 bits the first is flipped before and after
COMPARES_AS_SIGNED = VERSION < (5,) if VENDOR == "MPICH" else READS_IN_PLACE
LOWEST = -(2**63)
LOGICAL_OPS = {"BAND": MPI.LAND, "BOR": MPI.LOR, "BXOR": MPI.LXOR}  # MPI has no bitwise op for its C++ bool


def wide(dtype: torch.dtype, name: str) -> torch.dtype | None:
    """Return the dtype in which MPI combines values by an op of a name, if it is not their own."""
    if dtype in NARROW and reduction.combining(dtype, name) == "SUM" and VENDOR == "Open MPI":
        return torch.int32  # which wraps, and so do its lowest bits
    return SIGNED[dtype] if is_compared_as_signed(dtype, name) else reduction.WIDE.get(dtype)


def is_compared_as_signed(dtype: torch.dtype, name: str) -> bool:
    """Tell whether MPI would order values of an unsigned dtype wrongly, in an op of a name."""
    return COMPARES_AS_SIGNED and name in ("MIN", "MAX") and dtype in SIGNED


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
    flips: bool  # whether the values' first bits are flipped before and after

    def before(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values to reduce, in memory of their own."""
        values = tensor.to(self.wide) if self.wide is not None else tensor.clone()
        if self.flips:
            values.bitwise_xor_(LOWEST)
        return values if self.factor is None else values.mul_(self.factor)

    def after(self, values: torch.Tensor, recv: torch.Tensor, size: int) -> None:
        """Write the reduced values to the caller's tensor."""
        if self.flips:
            values.bitwise_xor_(LOWEST)
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
    return Reduction(
        datatype=DATATYPES[on_wire or dtype],
        op=mpi_op(dtype, name),
        wide=on_wire,
        factor=factor,
        averages=op == AVG,
        in_memory=on_wire is None and factor is None,
        is_direct=on_wire is None and factor is None and op != AVG,
        flips=dtype is torch.uint64 and on_wire is not None,
    )
