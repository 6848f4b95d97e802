"""Expected values: inputs whose sum, product and bits are known, and the mathematics of each op.

The input of rank r at place i is ``1 + (3 r + i) mod 5`` in small integers: exact in every dtype that
reduces, so results can be compared for equality.
"""

from __future__ import annotations

import functools
import operator

import torch

import hpcdist as dist
from hpcdist.core.reduction import KIND_OF, KINDS

OPS = {
    "SUM": dist.ReduceOp.SUM,
    "AVG": dist.ReduceOp.AVG,
    "PRODUCT": dist.ReduceOp.PRODUCT,
    "MIN": dist.ReduceOp.MIN,
    "MAX": dist.ReduceOp.MAX,
    "BAND": dist.ReduceOp.BAND,
    "BOR": dist.ReduceOp.BOR,
    "BXOR": dist.ReduceOp.BXOR,
}
PYTHON = {
    "SUM": sum,
    "PRODUCT": lambda values: functools.reduce(operator.mul, values),
    "MIN": min,
    "MAX": max,
    "BAND": lambda values: functools.reduce(operator.and_, values),
    "BOR": lambda values: functools.reduce(operator.or_, values),
    "BXOR": lambda values: functools.reduce(operator.xor, values),
}
LOGICAL = {
    "SUM": any,
    "PRODUCT": all,
    "MIN": all,
    "MAX": any,
    "BAND": all,
    "BOR": any,
    "BXOR": lambda v: sum(v) % 2 == 1,
}

PAIRS = [
    (dtype, name)
    for dtype, kind in KIND_OF.items()
    for name, op in OPS.items()
    if any(op == known for known in KINDS[kind])
]
MOVING = [*KIND_OF, torch.float8_e8m0fnu]


def number(rank: int, place: int) -> int:
    return 1 + (3 * rank + place) % 5


def values(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """The input of a rank."""
    if dtype is torch.bool:
        return torch.tensor([(rank + place) % 3 == 0 for place in range(length)], dtype=dtype)
    numbers = [number(rank, place) for place in range(length)]
    if dtype.is_complex:
        return torch.tensor([complex(n, -n) for n in numbers], dtype=torch.complex128).to(dtype)
    if dtype is torch.float8_e8m0fnu:
        return torch.tensor([2.0**n for n in numbers]).to(dtype)
    return torch.tensor(numbers, dtype=torch.float64).to(dtype)


def combined(name: str, size: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """The mathematics of an op over the inputs of all ranks."""
    if dtype is torch.bool:
        columns = [[(rank + place) % 3 == 0 for rank in range(size)] for place in range(length)]
        return torch.tensor([bool(LOGICAL[name](column)) for column in columns], dtype=dtype)
    columns = [[number(rank, place) for rank in range(size)] for place in range(length)]
    if dtype.is_complex:
        whole = [[complex(n, -n) for n in column] for column in columns]
        result = [PYTHON["SUM" if name == "AVG" else name](column) / (size if name == "AVG" else 1) for column in whole]
        return torch.tensor(result, dtype=torch.complex128).to(dtype)
    result = [PYTHON["SUM" if name == "AVG" else name](column) for column in columns]
    if name == "AVG":
        is_float = dtype.is_floating_point
        result = [total / size if is_float else total // size for total in result]
    if dtype.is_floating_point:
        exact = torch.tensor(result, dtype=torch.float64)
        return exact if dtype is torch.float64 else exact.to(torch.float32).to(dtype)  # half types round float32
    return torch.tensor(result).to(dtype)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same values; a zero has two signs, and the order of products tells which."""
    if one.dtype != other.dtype or one.shape != other.shape or not one.dtype.is_complex:
        return same(one, other)
    return torch.equal(one.to(torch.complex128), other.to(torch.complex128))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes."""
    one, other = one.contiguous(), other.contiguous()
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and bool((one.reshape(-1).view(torch.uint8) == other.reshape(-1).view(torch.uint8)).all())
    )
