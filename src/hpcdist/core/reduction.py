"""Reductions: which op has a meaning for which dtype, and torch's arithmetic for it.

Every dtype is of a kind, and each kind has its ops. An op without a meaning, such as the maximum of complex numbers, is
an error of c10d's class before anything is sent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp

from hpcdist.core.errors import MismatchError
from hpcdist.core.printing import format_value
from hpcdist.core.table import Row

SUM, AVG, PRODUCT, MIN, MAX = ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX
BAND, BOR, BXOR, PREMUL_SUM = ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR, ReduceOp.PREMUL_SUM
ALL_OPS = (SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM)

NAMES = {op: str(op).rsplit(".", 1)[-1] for op in ALL_OPS}
ARITHMETIC = (SUM, AVG, PRODUCT, MIN, MAX, PREMUL_SUM)
KINDS: dict[str, tuple[Any, ...]] = {
    "float": ARITHMETIC,
    "half": ARITHMETIC,  # combined in float32, then rounded once
    "integer": (SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR),  # AVG is cut toward zero
    "bool": (SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR),  # bitwise or, and, and, or, and, or, exclusive or
    "complex": (SUM, AVG, PRODUCT, PREMUL_SUM),
}

KIND_OF: dict[torch.dtype, str] = {
    torch.float64: "float",
    torch.float32: "float",
    torch.float16: "half",
    torch.bfloat16: "half",
    torch.float8_e4m3fn: "half",
    torch.float8_e4m3fnuz: "half",
    torch.float8_e5m2: "half",
    torch.float8_e5m2fnuz: "half",
    torch.int8: "integer",
    torch.int16: "integer",
    torch.int32: "integer",
    torch.int64: "integer",
    torch.uint8: "integer",
    torch.uint16: "integer",
    torch.uint32: "integer",
    torch.uint64: "integer",
    torch.bool: "bool",
    torch.complex32: "complex",
    torch.complex64: "complex",
    torch.complex128: "complex",
}

# the dtype in which values of a half type are combined
WIDE: dict[torch.dtype, torch.dtype] = {
    **{dtype: torch.float32 for dtype, kind in KIND_OF.items() if kind == "half"},
    torch.complex32: torch.complex64,
}


RedOpType = ReduceOp.RedOpType
# those without a factor, by the hash of a ReduceOp that is one: options of c10d make a new one for each question
MEMBERS = {hash(ReduceOp(op)): op for op in ALL_OPS if op != PREMUL_SUM}
LOGICAL = {"SUM": "BOR", "PRODUCT": "BAND", "MIN": "BAND", "MAX": "BOR"}  # the bitwise op for an op on bool


def name_of(op: Any) -> str:
    """Return an op's name in torch, such as ``SUM``; one with a factor is named by its kind."""
    return NAMES[getattr(op, "op", op)]


def canonical(op: Any) -> Any:
    """Return an op as backends know it: a plain member of ReduceOp, or the ReduceOp of a PREMUL_SUM; else TypeError."""
    kind = type(op)  # to ``isinstance`` the class ReduceOp is one of its own objects
    if kind is RedOpType:
        return op
    if kind is ReduceOp:
        return MEMBERS.get(hash(op), op)
    raise TypeError(
        f"op is {format_value(op)} of type {kind.__name__}; expected a torch.distributed.ReduceOp such as ReduceOp.SUM"
    )


def is_done_by_parts(op: Any) -> bool:
    """Tell whether an op combines the real and the imaginary parts of complex numbers by themselves.

    It is then done on real numbers, as ``torch.distributed`` does: for a library that cuts a buffer by its number of
    elements, n complex numbers and 2 n real ones are different calls. A PREMUL_SUM is a sum of values that each rank
    has multiplied by a factor of its own, real or complex.
    """
    return any(op == known for known in (SUM, AVG, PREMUL_SUM))  # ``in`` asks the other way round, and is False


def combining_op(dtype: torch.dtype, name: str) -> str:
    """Return the name of the op that combines the values: of AVG and PREMUL_SUM the sum, of bool a bitwise one."""
    if dtype is torch.bool:
        return LOGICAL.get(name, name)
    return "SUM" if name in ("AVG", "PREMUL_SUM") else name


def check(row: Row, dtype: torch.dtype, op: Any) -> None:
    """Raise c10d's error if an op, or its factor, has no meaning for a dtype, or nothing reduces it."""
    if (kind := KIND_OF.get(dtype)) is None:
        raise NotImplementedError(
            f"Invalid scalar type: {row.name} cannot reduce {dtype} (dtypes that reduce: "
            f"{', '.join(str(known).removeprefix('torch.') for known in KIND_OF)})"
        )
    if any(op == known for known in KINDS[kind]):
        if op == PREMUL_SUM:
            check_factor(row, dtype, op)
        return
    choices = ", ".join(name_of(known) for known in KINDS[kind])
    if kind == "complex":
        raise MismatchError(f"{row.name} does not support {name_of(op)} on complex tensors (choices: {choices})")
    raise RuntimeError(f"Cannot use ReduceOp.{name_of(op)} with {dtype}: {row.name} of {kind} values takes {choices}")


def premul_sum(factor: float) -> Any:
    """Return a PREMUL_SUM with a factor."""
    made: Any = ReduceOp.__new__(ReduceOp)
    made.__setstate__((PREMUL_SUM, factor))
    return made


def factor_of(op: Any) -> Any:
    """Return the factor of a PREMUL_SUM: a number, or a 0-dimensional tensor outside autograd, on any device."""
    factor = op.__getstate__()[1]
    return factor.detach().reshape(()) if isinstance(factor, torch.Tensor) else factor


def is_complex(factor: Any) -> bool:
    """Tell whether the factor of a PREMUL_SUM is a complex number."""
    return isinstance(factor, torch.Tensor) and factor.is_complex()


def premultiplier(op: Any) -> Any:
    """Return the factor of a PREMUL_SUM as a number."""
    factor = factor_of(op)
    return factor.item() if isinstance(factor, torch.Tensor) else factor


def check_factor(row: Row, dtype: torch.dtype, op: Any) -> None:
    """Raise if a PREMUL_SUM has no factor that a dtype can be multiplied by."""
    state = op.__getstate__()
    factor = state[1] if isinstance(state, tuple) else None
    if factor is None:
        found = "none: it is a plain ReduceOp.PREMUL_SUM"
    elif is_complex(factor) and not dtype.is_complex:
        found = f"a tensor of {factor.dtype} for values of {dtype}"
    elif isinstance(factor, torch.Tensor) and factor.is_meta:
        found = "a tensor on the device meta, which has no value"
    else:
        return
    raise MismatchError(
        f"{row.name}: the factor of PREMUL_SUM is {found}; expected a number or a tensor of one element, real unless "
        "the values are complex (torch.distributed._make_nccl_premul_sum makes such an op)"
    )


def terms(values: torch.Tensor, op: Any) -> torch.Tensor:
    """Return the values that an op combines, as a copy: in the wide dtype, and times the factor of a PREMUL_SUM."""
    wide = WIDE.get(values.dtype)
    made = values.to(wide) if wide is not None else values.clone()
    return made.mul_(premultiplier(op)) if op == PREMUL_SUM else made


def average(total: torch.Tensor, size: int) -> torch.Tensor:
    """Return ``total / size`` in place; integers are cut toward zero, as NCCL does."""
    if total.dtype.is_complex:
        torch.view_as_real(total).div_(size)  # each part rounded once, unlike a complex division
        return total
    if total.dtype.is_floating_point:
        return total.div_(size)
    if total.dtype is torch.uint64:  # torch cannot divide it: twice the quotient of the half, or one more
        signed = total.view(torch.int64)
        quotient = torch.div((signed >> 1) & torch.iinfo(torch.int64).max, size, rounding_mode="trunc") * 2
        signed.copy_(quotient + (signed - quotient * size >= size))
        return total
    return total.copy_(torch.div(total.to(torch.int64), size, rounding_mode="trunc"))


# by the name of the op that combines values (``combining_op``); each takes two tensors and ``out``
COMBINE: dict[str, Any] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
SIGNED = {torch.uint8: torch.int16, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}


def fold(values: list[torch.Tensor], op: Any) -> torch.Tensor:
    """Combine tensors one after another with torch's arithmetic; the first one is written to.

    Takes what ``check`` accepts, except AVG and PREMUL_SUM, in dtypes with which torch computes.
    """
    dtype = values[0].dtype
    name = combining_op(dtype, name_of(op))
    signed = SIGNED.get(dtype)  # torch lacks arithmetic on most; the bits agree, in uint64's order too
    if signed is None or dtype is torch.uint8:
        total = values[0]
        for other in values[1:]:
            COMBINE[name](total, other, out=total)
        return total
    flip = -(2**63) if dtype is torch.uint64 and name in ("MIN", "MAX") else 0
    wide = [value.to(signed) ^ flip for value in values]
    for other in wide[1:]:
        COMBINE[name](wide[0], other, out=wide[0])
    return values[0].copy_(wide[0] ^ flip)
