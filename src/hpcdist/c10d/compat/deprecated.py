"""Names that torch renamed: they still work, and each says once what to use."""

from __future__ import annotations

from typing import Any

from torch.distributed import ReduceOp
from typing_extensions import deprecated

from hpcdist.c10d.collectives import all_gather_single, reduce_scatter_single
from hpcdist.core.work import Work


@deprecated("`_all_gather_base` is a private function; use `all_gather_single` instead", category=FutureWarning)
def _all_gather_base(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Work | None:
    """Gather into one tensor: the private name of ``all_gather_single`` before torch 1.13."""
    return all_gather_single(output_tensor, input_tensor, group, async_op)


@deprecated(
    "`_reduce_scatter_base` is a private function; use `reduce_scatter_single` instead",
    category=FutureWarning,
)
def _reduce_scatter_base(
    output: Any, input: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    """Combine and scatter one tensor: the private name of ``reduce_scatter_single`` before torch 1.13."""
    return reduce_scatter_single(output, input, op, group, async_op)
