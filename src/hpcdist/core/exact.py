"""Exact sums of floating-point numbers: fixed-point numbers that add up without rounding, in any order.

A number becomes a row of 64-bit integers, the limbs, each of which counts 32 more binary digits than its neighbour.
Limbs are added by any library in any order and grouping, and the total is rounded once, to the nearest number of the
result's dtype (ties to even, IEEE 754). Only the digits between the smallest and the largest
exponent among all ranks' values have limbs, so that a number takes 4 to 6 limbs as a rule; 12 stand for all of float32,
and 69 for all of float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

LIMB = 32  # binary digits of a limb; the other bits take the carries of up to 2**29 ranks
MASK = np.int64((1 << LIMB) - 1)
NAN, INFINITY, NEGATIVE_INFINITY = 1, 1 << 20, 1 << 40  # counted in a limb of their own, for up to 2**20 ranks

# digits of a dtype's significand, and the exponent of the last digit of its smallest number
FORMATS: dict[torch.dtype, tuple[int, int]] = {
    torch.float64: (53, -1074),
    torch.float32: (24, -149),
    torch.float16: (11, -24),
    torch.bfloat16: (8, -133),
}
NOTHING = 1 << 20  # above any exponent


class Range(NamedTuple):
    """Which digits have limbs: the exponent of the lowest one, and how many limbs there are."""

    base: int
    limbs: int

    @property
    def width(self) -> int:
        """How many integers stand for a number: its limbs and the one for infinities and NaN."""
        return self.limbs + 1


def parts(values: Any) -> tuple[Any, Any, Any]:
    """Return integer significands of float32 or float64 values, their exponents, and where values are finite."""
    finite = np.isfinite(values)
    fractions, exponents = np.frexp(np.where(finite, values, 0).astype(np.float64))
    return np.ldexp(fractions, 53).astype(np.int64), exponents.astype(np.int64) - 53, finite


def extremes(values: torch.Tensor) -> torch.Tensor:
    """Return what the ranks combine by MAX to find the range: the negated lowest exponent and the highest."""
    significands, exponents, _ = parts(values.numpy())
    used = exponents[significands != 0]
    found = [-int(used.min()), int(used.max())] if used.size else [-NOTHING, -NOTHING]
    return torch.tensor(found, dtype=torch.int64, device="cpu")


def range_of(combined: torch.Tensor) -> Range:
    """Return the range that holds all ranks' values; the same on all of them."""
    lowest, highest = (int(each) for each in combined)
    if highest == -NOTHING:
        return Range(0, 1)
    base = -lowest
    # 53 digits from the highest exponent on, and one limb for the carries
    return Range(base, (highest - base + 53 + LIMB - 1) // LIMB + 1)


def limbs_of(values: torch.Tensor, span: Range) -> torch.Tensor:
    """Return float32 or float64 values as integers that add up exactly.

    Args:
        values: flat, on the CPU.
        span: the range, which holds them.

    Returns:
        int64, of shape (elements, ``span.width``).
    """
    array = values.numpy()
    significands, exponents, finite = parts(array)
    made = np.zeros((array.size, span.width + 2), np.int64)  # two more than needed: zeros are written beyond the end
    places = np.where(significands != 0, exponents - span.base, 0)
    first, offset = places // LIMB, places % LIMB
    sign, magnitude = np.sign(significands), np.abs(significands)
    low, high = (magnitude & MASK) << offset, (magnitude >> LIMB) << offset
    rows = np.arange(array.size)
    made[rows, first] += sign * (low & MASK)
    made[rows, first + 1] += sign * ((low >> LIMB & MASK) + (high & MASK))
    made[rows, first + 2] += sign * (high >> LIMB)
    special = np.where(np.isnan(array), NAN, np.where(array > 0, INFINITY, NEGATIVE_INFINITY))
    made[:, span.limbs] = np.where(finite, made[:, span.limbs], 0) + np.where(finite, 0, special)
    return torch.from_numpy(np.ascontiguousarray(made[:, : span.width]))


def rounded(limbs: torch.Tensor, span: Range, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that summed limbs stand for, each rounded once to the nearest of a dtype.

    Args:
        limbs: int64, of shape (elements, ``span.width``).
        span: their range.
        dtype: a key of FORMATS.
    """
    digits, least = FORMATS[dtype]
    everything = limbs.numpy()
    counted, special = carried(everything[:, : span.limbs]), everything[:, span.limbs]
    negative = counted[:, -1] < 0
    counted[negative] = carried(-counted[negative])
    size, count = counted.shape
    rows = np.arange(size)
    top = count - 1 - np.argmax(counted[:, ::-1] != 0, axis=1)
    padded = np.concatenate([np.zeros((size, 2), np.int64), counted], axis=1).astype(np.uint64)
    high, middle, low = (padded[rows, top + 2 - back] for back in range(3))
    below = np.cumsum(padded != 0, axis=1)[rows, top] - (padded[rows, top] != 0) > 0  # digits under those three limbs
    # the 64 digits from the first that is not zero on, and whether any follows
    shift = (LIMB - np.frexp(high.astype(np.float64))[1]).astype(np.uint64)
    whole = high << (LIMB + shift) | middle << shift | low >> (LIMB - shift)
    more = below | (low & ((np.uint64(1) << (LIMB - shift)) - np.uint64(1)) != 0)
    exponent = span.base + LIMB * top - LIMB - shift.astype(np.int64)
    dropped = np.maximum(64 - digits, least - exponent)  # fewer digits are left of what is subnormal
    exponent += dropped
    drop = np.clip(dropped, 1, 63).astype(np.uint64)
    kept, rest = whole >> drop, whole & ((np.uint64(1) << drop) - np.uint64(1))
    half = np.uint64(1) << (drop - np.uint64(1))
    kept += ((rest > half) | ((rest == half) & (more | (kept & np.uint64(1) == 1)))).astype(np.uint64)
    with np.errstate(over="ignore"):
        values = np.ldexp(kept.astype(np.float64), exponent)
    values = np.where(high == 0, 0.0, np.where(negative, -values, values))
    nans, infinite, opposite = special % INFINITY, special // INFINITY % INFINITY, special // NEGATIVE_INFINITY
    values = np.where(infinite > 0, np.inf, np.where(opposite > 0, -np.inf, values))
    values = np.where((nans > 0) | ((infinite > 0) & (opposite > 0)), np.nan, values)
    return torch.from_numpy(values).to(dtype)


def carried(limbs: Any) -> Any:
    """Return the same numbers with every limb but the last between 0 and 2**32."""
    made = np.array(limbs)
    for index in range(made.shape[1] - 1):
        made[:, index + 1] += made[:, index] >> LIMB
        made[:, index] &= MASK
    return made
