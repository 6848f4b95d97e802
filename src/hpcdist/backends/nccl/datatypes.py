"""Datatypes and ops of NCCL: its datatype for each torch dtype, and the ops that it can reduce.

The names are those of nccl4py's enums, and a test compares the tables with them. A dtype that NCCL lacks is moved as
bytes; it cannot be reduced, and the error names the way that can.
"""

from __future__ import annotations

from typing import Any

import torch

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
# complex numbers come here as pairs; a complex product is not a product of pairs
COMPLEX_OPS: dict[Any, str] = {SUM: "SUM", AVG: "AVG"}


def ops_of(dtype: torch.dtype) -> dict[Any, str]:
    """Return NCCL's ops for a dtype, by torch's op; empty if it does not reduce it."""
    if dtype is torch.bool:
        return BOOL_OPS
    if dtype.is_complex:
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
        lacks = f"{dtype} on this GPU (compute capability 9.0 reduces it)"
    elif not ops:
        lacks = f"{dtype}"
    else:
        lacks = f"ReduceOp.{reduction.name_of(op)} of {dtype}"
    raise RuntimeError(
        f"Cannot use ReduceOp.{reduction.name_of(op)} with {dtype} on NCCL: {row.name} there lacks {lacks}. "
        f"MPI has it: {row.name} of tensor.cpu() on a group with a CPU backend ('cpu:mpi,cuda:nccl'), then copy back"
    )


def as_moved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the form that NCCL moves: bytes if it lacks the dtype."""
    return tensor if tensor.dtype in DATATYPES else as_bytes(tensor)


def premultiplied(values: torch.Tensor, op: Any) -> tuple[torch.Tensor, float]:
    """Return the values of a PREMUL_SUM and the factor that NCCL multiplies them by: 1 if that is done already."""
    factor = reduction.factor_of(op)
    if not isinstance(factor, torch.Tensor):
        return values, float(factor)
    # not NCCL's sum: other ranks may have a number, and their algorithm is that of a sum with factors
    wide = reduction.WIDE.get(values.dtype, values.dtype)  # torch does not multiply float8
    return (values.to(wide) * factor.to(wide)).to(values.dtype), 1.0
