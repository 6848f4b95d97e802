"""Reductions of one process group on NCCL: which are possible, and what stands for an op there."""

from __future__ import annotations

from typing import Any

import torch

from hpcdist.backends.nccl import datatypes
from hpcdist.backends.nccl.library import FLOAT8_SINCE, Library
from hpcdist.core import reduction
from hpcdist.core.table import Row


class Reductions:
    """What has been found out about the reductions of a group."""

    def __init__(self, library: Library, cuda: Any) -> None:
        self._library = library
        self._cuda = cuda
        self._allowed: set[tuple[Row, torch.dtype, Any]] = set()
        self._numbers: dict[tuple[torch.dtype, Any], int] = {}  # NCCL's, of torch's ops
        self._scalings: dict[tuple[torch.dtype, float], Any] = {}  # ops that NCCL has made for factors

    def check(self, row: Row, dtype: torch.dtype, op: Any, device: torch.device) -> None:
        """Raise if NCCL cannot reduce on a GPU, naming the way over MPI."""
        is_plain = op != reduction.PREMUL_SUM  # one with a factor is another object each time
        if is_plain and (row, dtype, op) in self._allowed:
            return
        datatypes.check(row, dtype, op, dtype not in datatypes.FLOAT8 or self._reduces_float8(device))
        if is_plain:
            self._allowed.add((row, dtype, op))

    def _reduces_float8(self, device: torch.device) -> bool:
        return self._library.version >= FLOAT8_SINCE and self._cuda.get_device_capability(device) >= (9, 0)

    def prepare(self, values: torch.Tensor, op: Any) -> tuple[torch.Tensor, int | None, float | None]:
        """Return the values to reduce, and NCCL's op, or the factor of a PREMUL_SUM: 1 if the values are multiplied."""
        dtype = values.dtype
        if op != reduction.PREMUL_SUM:
            number = self._numbers.get((dtype, op))
            if number is None:
                number = int(self._library.core.NcclRedOp[datatypes.ops_of(dtype)[op]])
                self._numbers[dtype, op] = number
            return datatypes.as_reduced(values), number, None
        factor = reduction.factor_of(op)
        if not isinstance(factor, torch.Tensor):
            return datatypes.as_reduced(values), None, float(factor)
        # not NCCL's sum: other ranks may have a number, and their algorithm is that of a sum with factors
        return datatypes.as_reduced(values * factor.to(dtype)), None, 1.0

    def scaling(self, comm: Any, factor: float, dtype: torch.dtype) -> int:
        """Return NCCL's op for a factor, made on a communicator that the caller may use."""
        key = (dtype, factor)
        made = self._scalings.get(key)
        if made is None:  # kept: NCCL has room for many, and a training loop uses one or two
            made = comm.create_pre_mul_sum(
                datatypes.bits(factor, dtype), self._library.core.NcclDataType[datatypes.DATATYPES[dtype]]
            )
            self._scalings[key] = made
        return int(made.op)

    def clear(self) -> None:
        """Forget what belonged to communicators that have ended."""
        self._scalings.clear()
