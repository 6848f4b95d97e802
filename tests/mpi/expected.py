"""Expected values: inputs whose sum, product and bits are known, and the mathematics of each op.

The input of rank r at place i is ``1 + (3 r + i) mod 5`` in small integers: exact in every dtype that
reduces, so results can be compared for equality.
"""

from __future__ import annotations

import numpy as np
import torch

import hpcdist as dist
from hpcdist.core.reduction import KIND_OF, KINDS

OPS = {name: getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}
COMBINING = {
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}  # and all others sum
PAIRS = [
    (dtype, name)
    for dtype, kind in KIND_OF.items()
    for name, op in OPS.items()
    if any(op == known for known in KINDS[kind])
]
MOVING = [*KIND_OF, torch.float8_e8m0fnu]


def ids(value: object) -> str | None:
    """How a test's parameters are shown."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


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


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values are combined."""
    if dtype is torch.complex32:
        return torch.complex64
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def mathematics(parts: list[torch.Tensor], name: str) -> torch.Tensor:
    """What an op makes of the ranks' values: integers wrap, an average is cut toward zero, half types round once."""
    dtype, count = parts[0].dtype, len(parts)
    each = np.stack([part.to(widened(dtype)).numpy() for part in parts])
    with np.errstate(all="ignore"):
        total = COMBINING.get(name, np.add).reduce(each, axis=0, dtype=each.dtype)
        if name == "AVG" and total.dtype.kind in "fc":
            total = (total.view(total.real.dtype) / count).view(total.dtype)
        elif name == "AVG":
            total = total // count + ((total < 0) & (total % count != 0))
    return torch.empty(total.shape, dtype=dtype).copy_(torch.from_numpy(total))


def combined(name: str, size: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """What an op makes of the inputs of all ranks."""
    return mathematics([values(rank, length, dtype) for rank in range(size)], name)


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
