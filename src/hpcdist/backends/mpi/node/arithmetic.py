"""Arithmetic of node-shared reductions on slices of memory, for every dtype and op.

`core.reduction` has checked that the dtype and op have a meaning; the functions here combine two slices into a third.

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

from hpcdist.core.reduction import COMBINE, KIND_OF, WIDE, average, combining_op

Combine = Callable[..., Any]


def by_numpy(ufunc: Any) -> Combine:
    """Return a function of NumPy with the interface of torch's."""

    def combine(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
        ufunc(a.numpy(), b.numpy(), out=out.numpy())

    return combine


# of `SIGNED_TWINS`
COMBINE_UNSIGNED: dict[str, Combine] = {
    "AVG": by_numpy(np.add),
    "MIN": by_numpy(np.minimum),
    "MAX": by_numpy(np.maximum),
}
SIGNED_TWINS: dict[torch.dtype, torch.dtype] = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}

# not float8: torch has no additions of it
DTYPES = tuple(dtype for dtype in KIND_OF if dtype.itemsize > 1 or not dtype.is_floating_point)
WIDER = {dtype: wide for dtype, wide in WIDE.items() if dtype in DTYPES}

STACK_WIDTH = 512  # elements that `Fold.add_stack` adds at a time: their float32 sums stay in a core's L1 cache
FOLD_BYTES = 256 << 10  # bytes of a slice that are added at a time: those of four ranks stay in a core's L2 cache


class Fold:
    """Reduces slices of one dtype by one op, over ``ranks`` contributions, also the divisor of AVG.

    It keeps memory of its own, so it is one communicator's.
    """

    def __init__(self, dtype: torch.dtype, op: str, ranks: int) -> None:
        name = combining_op(dtype, op)
        is_unsigned = dtype in SIGNED_TWINS and op in COMBINE_UNSIGNED
        self.combine = COMBINE_UNSIGNED[op] if is_unsigned else COMBINE[name]
        # the dtype of the computation; a twin has the same bits
        self.dtype = dtype if is_unsigned else SIGNED_TWINS.get(dtype, dtype)
        self.wide = WIDER.get(dtype) if name in ("SUM", "PRODUCT") else None
        self.adds_stacks = self.wide is torch.float32 and name == "SUM"
        self.divisor = ranks if op == "AVG" else 0
        self.op = op
        self._step = FOLD_BYTES // dtype.itemsize
        self._scratch: torch.Tensor | None = None  # an accumulator and memory for one part, both of the wider dtype

    def reduce(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Reduce slices of one length in the order given and write the result, rounded once.

        ``out`` may be one of the first two parts, not a later one.
        """
        numel, step = out.numel(), self._step
        if numel <= step or (len(parts) <= 2 and not self.divisor):
            self._reduce(parts, out)  # little memory, or one pass
            return
        for low in range(0, numel, step):
            self._reduce([part[low : low + step] for part in parts], out[low : low + step])

    def _reduce(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        if self.wide is not None and (len(parts) > 2 or self.divisor):
            if self._scratch is None:
                self._scratch = torch.empty(2, self._step, dtype=self.wide, device="cpu")
            # torch would widen a slice into new memory each time, which takes a third longer
            total, spare = self._scratch[:, : out.numel()]
            total.copy_(parts[0])
            for part in parts[1:]:
                self.combine(total, spare.copy_(part), out=total)
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
        """Return the sum or average of slices, each a row, added in the wider dtype, rounded once (`adds_stacks`).

        For torch this is average pooling over rows of `STACK_WIDTH` channels, of which a row has a multiple: the only
        one of its kernels that adds more than two tensors of half types in one pass, in float32.
        """
        rows = stack.size(0)
        images = stack.view(1, rows, -1, STACK_WIDTH).permute(0, 3, 1, 2)
        return avg_pool2d(images, (rows, 1), divisor_override=self.divisor or 1).permute(0, 2, 3, 1).view(-1)

    def finish(self, total: torch.Tensor) -> None:
        if self.divisor:
            average(total, self.divisor)
