"""Arithmetic of node-shared reductions: what is computed on slices of memory, for every dtype and op.

`FOLDS` is the table: (kind of dtype, op) -> the torch function that combines two slices into a third. A pair that is
not in it has no meaning (MAX of complex numbers, BAND of floats) and raises TypeError before anything moves.

- Half types (float16, bfloat16, complex32) accumulate in the wider type and round once at the end. With two
  contributions torch does exactly that inside one `add`, so they need no accumulator; with more, one kernel of torch
  does it where they lie one after another, as the rows of a stack.
- MIN and MAX propagate NaN as torch.minimum and torch.maximum do; MPI_MIN and MPI_MAX leave it undefined.
- bool means logic: SUM and MAX are OR, PRODUCT and MIN are AND.
- Unsigned 16, 32 and 64 bit integers: two's complement makes SUM, PRODUCT and the bitwise ops those of the signed type
  of that width; MIN, MAX and AVG run in NumPy, since torch has no kernel for them.
- AVG divides the sum by the number of ranks: floats before they are rounded, integers toward zero.
- PREMUL_SUM is SUM here: the caller has multiplied its own contribution by its own factor already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import avg_pool2d

Combine = Callable[..., Any]
Scratch = tuple[torch.Tensor, torch.Tensor]  # an accumulator, and room for a slice, both of a wider dtype


def _numpy_combine(ufunc: Any) -> Combine:
    def combine(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
        ufunc(a.numpy(), b.numpy(), out=out.numpy())

    return combine


_RING: dict[str, Combine] = {"SUM": torch.add, "AVG": torch.add, "PREMUL_SUM": torch.add, "PRODUCT": torch.mul}
_ORDER: dict[str, Combine] = {"MIN": torch.minimum, "MAX": torch.maximum}
_BITS: dict[str, Combine] = {
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_NUMPY: dict[str, Combine] = {
    "AVG": _numpy_combine(np.add),
    "MIN": _numpy_combine(np.minimum),
    "MAX": _numpy_combine(np.maximum),
}

FOLDS: dict[str, dict[str, Combine]] = {
    "float": _RING | _ORDER,
    "complex": _RING,
    "signed": {op: f for op, f in (_RING | _ORDER | _BITS).items() if op != "PREMUL_SUM"},
    "unsigned": {op: f for op, f in (_RING | _NUMPY | _BITS).items() if op != "PREMUL_SUM"},
    "bool": {
        "SUM": torch.logical_or,
        "MAX": torch.logical_or,
        "PRODUCT": torch.logical_and,
        "MIN": torch.logical_and,
        **_BITS,
    },
}

KINDS: dict[torch.dtype, str] = {
    torch.float64: "float",
    torch.float32: "float",
    torch.float16: "float",
    torch.bfloat16: "float",
    torch.complex128: "complex",
    torch.complex64: "complex",
    torch.complex32: "complex",
    torch.int64: "signed",
    torch.int32: "signed",
    torch.int16: "signed",
    torch.int8: "signed",
    torch.uint8: "signed",  # torch computes in it, and without a sign
    torch.uint16: "unsigned",
    torch.uint32: "unsigned",
    torch.uint64: "unsigned",
    torch.bool: "bool",
}

WIDER: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}

SIGNED_TWINS: dict[torch.dtype, torch.dtype] = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


_SUMS = {"SUM", "AVG", "PREMUL_SUM"}
_ACCUMULATING = {*_SUMS, "PRODUCT"}

STACK_WIDTH = 512  # elements that `Fold.add_stack` adds at a time: their float32 sums stay in a core's first cache


class Fold:
    """Reduces slices of one dtype by one op over a number of ranks.

    Args:
        dtype: the tensors' dtype.
        op: the op's name (`core.reduction.name_of`).
        ranks: how many contributions a result has; the divisor of AVG.

    Raises:
        TypeError: the pair has no meaning.
    """

    def __init__(self, dtype: torch.dtype, op: str, ranks: int) -> None:
        kind = KINDS.get(dtype)
        row = FOLDS.get(kind or "", {})
        if op not in row:
            known = ", ".join(sorted(row)) or "no reduction at all"
            raise TypeError(f"{op} of {dtype} has no meaning; {dtype} knows {known}")
        self.combine = row[op]
        # Under this dtype a slice is computed; the twin has the same bits.
        self.dtype = SIGNED_TWINS.get(dtype, dtype) if op not in _NUMPY else dtype
        self.wide = WIDER.get(dtype) if op in _ACCUMULATING else None
        self.adds_stacks = self.wide is torch.float32 and op in _SUMS
        self.divisor = ranks if op == "AVG" else 0
        self.kind = kind
        self.op = op

    def needs_scratch(self, parts: int) -> bool:
        """Say whether reducing that many slices takes an accumulator of the wider dtype."""
        return self.wide is not None and (parts > 2 or self.divisor > 0)

    def reduce(self, parts: Sequence[torch.Tensor], out: torch.Tensor, scratch: Scratch | None) -> None:
        """Reduce slices in the order given and write the result, rounded once.

        Args:
            parts: slices of one length and this fold's dtype.
            out: where the result goes; it may be one of the first two parts, not a later one.
            scratch: memory of at least that length where `needs_scratch`.
        """
        if scratch is not None:
            total = scratch[0][: out.numel()]
            self.accumulate(parts, total, scratch[1][: out.numel()])
            self.finish(total)
            out.copy_(total)
            return
        if len(parts) == 1:
            out.copy_(parts[0])
        else:
            self.combine(parts[0], parts[1], out=out)
            for part in parts[2:]:
                self.combine(out, part, out=out)
        self.finish(out)

    def add_stack(self, stack: torch.Tensor) -> torch.Tensor:
        """Add slices that lie one after another, in order, in the wider dtype, and round once; where `adds_stacks`.

        To torch this is average pooling over rows of `STACK_WIDTH` channels: of its kernels for half types the one that
        adds more than two tensors in one pass, in float32.

        Args:
            stack: a slice in each row, contiguous, of a multiple of `STACK_WIDTH` elements.

        Returns:
            The sum or average, as long as a row.
        """
        rows = stack.size(0)
        images = stack.view(1, rows, -1, STACK_WIDTH).permute(0, 3, 1, 2)
        return avg_pool2d(images, (rows, 1), divisor_override=self.divisor or 1).permute(0, 2, 3, 1).view(-1)

    def accumulate(self, parts: Sequence[torch.Tensor], total: torch.Tensor, spare: torch.Tensor | None) -> None:
        """Reduce slices into an accumulator without dividing or rounding.

        Args:
            parts: the slices.
            total: the accumulator, of the wider dtype where there is one.
            spare: as much memory of the wider dtype; None where there is none. torch would widen a slice into memory
                that it gets from the system each time, which takes a third longer.
        """
        total.copy_(parts[0])
        for part in parts[1:]:
            self.combine(total, part if spare is None else spare.copy_(part), out=total)

    def finish(self, total: torch.Tensor) -> None:
        """Turn a sum into an average, where the op asks for one."""
        if not self.divisor:
            return
        if self.kind == "signed":
            torch.div(total, self.divisor, rounding_mode="trunc", out=total)
        elif self.kind == "unsigned":
            array = total.numpy()
            np.floor_divide(array, array.dtype.type(self.divisor), out=array)
        elif self.kind == "complex":
            # by parts: torch's own division of complex numbers rounds differently with the length of the slice
            torch.view_as_real(total).div_(self.divisor)
        else:
            total.div_(self.divisor)
