"""Datatypes and ops of NCCL: as what it sees a torch dtype, what it can reduce, and what stands for an op there.

The names are those of nccl4py's enums, and a test holds the tables against them. A dtype that NCCL lacks still
moves, as bytes; it does not reduce, and the error says which way does.
"""

from __future__ import annotations

from typing import Any

import torch

from hpcdist.backends.nccl.library import FLOAT8_SINCE, Library
from hpcdist.core import reduction
from hpcdist.core.buffers import as_bytes
from hpcdist.core.reduction import AVG, BAND, BOR, MAX, MIN, PREMUL_SUM, PRODUCT, SUM
from hpcdist.core.table import Row

DATATYPES: dict[torch.dtype, str] = {
    torch.int8: "INT8",
    torch.uint8: "UINT8",
    torch.bool: "UINT8",
    torch.int32: "INT32",
    torch.uint32: "UINT32",
    torch.int64: "INT64",
    torch.uint64: "UINT64",
    torch.float16: "FLOAT16",
    torch.float32: "FLOAT32",
    torch.float64: "FLOAT64",
    torch.bfloat16: "BFLOAT16",
    torch.float8_e4m3fn: "FLOAT8E4M3",
    torch.float8_e5m2: "FLOAT8E5M2",
}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # reduced on compute capability 9.0 and later

OPS: dict[Any, str] = {SUM: "SUM", AVG: "AVG", PRODUCT: "PROD", MIN: "MIN", MAX: "MAX"}
BOOL_OPS: dict[Any, str] = {SUM: "MAX", PRODUCT: "MIN", MIN: "MIN", MAX: "MAX", BAND: "MIN", BOR: "MAX"}
COMPLEX_OPS: dict[Any, str] = {SUM: "SUM", AVG: "AVG"}  # on pairs of numbers; a product is not one of pairs

PAIRED = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}

# a signless integer of each size, as which NumPy can hold the bits of a factor
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def ops_of(dtype: torch.dtype) -> dict[Any, str]:
    """Return the ops that NCCL has for a dtype, by torch's op; empty if it does not reduce it."""
    if dtype is torch.bool:
        return BOOL_OPS
    if dtype in PAIRED:
        return COMPLEX_OPS
    return OPS if dtype in DATATYPES else {}


def check(row: Row, dtype: torch.dtype, op: Any, reduces_float8: bool) -> None:
    """Raise if an op has no meaning for a dtype (``core.reduction.check``), or NCCL lacks it; MPI may have it."""
    reduction.check(row, dtype, op)
    ops = ops_of(dtype)
    can_scale = dtype is not torch.bool and bool(ops)
    if (op == PREMUL_SUM and can_scale) or (op != PREMUL_SUM and op in ops):
        if dtype not in FLOAT8 or reduces_float8:
            return
        lacks = f"{dtype} on this GPU or in this release (compute capability 9.0 and NCCL 2.24 reduce it)"
    elif not ops:
        lacks = f"{dtype}"
    else:
        lacks = f"ReduceOp.{reduction.name_of(op)} of {dtype}"
    raise RuntimeError(
        f"Cannot use ReduceOp.{reduction.name_of(op)} with {dtype} on NCCL: {row.name} there lacks {lacks}. "
        f"MPI has it: {row.name} of tensor.cpu() on a group with a CPU backend ('cpu:mpi,cuda:nccl'), then copy back"
    )


def as_reduced(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as NCCL reduces it: complex numbers as pairs."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def as_moved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as NCCL moves it: bytes if it lacks the dtype."""
    return tensor if tensor.dtype in DATATYPES else as_bytes(tensor)


def bits(factor: float, dtype: torch.dtype) -> Any:
    """Return a factor as a NumPy array of one element with the bits that it has in ``dtype``.

    NumPy itself knows neither bfloat16 nor float8.
    """
    return torch.tensor([factor], dtype=dtype, device="cpu").view(BITS[dtype.itemsize]).numpy()


class Reductions:
    """What has been found out about the reductions of a group."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._allowed: set[tuple[Row, torch.dtype, Any]] = set()
        self._numbers = {each.name: int(each) for each in library.core.NcclRedOp}
        self._scalings: dict[tuple[torch.dtype, float], Any] = {}  # ops that NCCL has made for factors

    def check(self, row: Row, dtype: torch.dtype, op: Any, device: torch.device) -> None:
        """Raise if NCCL cannot reduce on a GPU, naming the way over MPI."""
        is_plain = op != reduction.PREMUL_SUM  # one with a factor is another object each time
        if is_plain and (row, dtype, op) in self._allowed:
            return
        check(row, dtype, op, dtype not in FLOAT8 or self._reduces_float8(device))
        if is_plain:
            self._allowed.add((row, dtype, op))

    def _reduces_float8(self, device: torch.device) -> bool:
        return self._library.version >= FLOAT8_SINCE and torch.cuda.get_device_capability(device) >= (9, 0)

    def prepare(self, values: torch.Tensor, op: Any) -> tuple[torch.Tensor, int | None, float | None]:
        """Return the values to reduce, and NCCL's op, or the factor of a PREMUL_SUM: 1 if the values are multiplied."""
        dtype = values.dtype
        if op != reduction.PREMUL_SUM:
            return as_reduced(values), self._numbers[ops_of(dtype)[op]], None
        factor = reduction.factor_of(op)
        if not isinstance(factor, torch.Tensor):
            return as_reduced(values), None, float(factor)
        # not NCCL's sum: other ranks may have a number, and their algorithm is that of a sum with factors
        return as_reduced(values * factor.to(dtype)), None, 1.0

    def scaling(self, comm: Any, factor: float, dtype: torch.dtype) -> int:
        """Return NCCL's op for a factor, made on a communicator that the caller may use."""
        key = (dtype, factor)
        made = self._scalings.get(key)
        if made is None:  # kept: NCCL has room for many, and a training loop uses one or two
            made = comm.create_pre_mul_sum(bits(factor, dtype), self._library.core.NcclDataType[DATATYPES[dtype]])
            self._scalings[key] = made
        return int(made.op)

    def clear(self) -> None:
        """Forget what belonged to communicators that have ended."""
        self._scalings.clear()
