"""Names that torch renamed: they still work, and each says once what to use."""

from __future__ import annotations

from typing import Any

from torch.distributed import ReduceOp
from typing_extensions import deprecated

from hpcdist.c10d.collectives import all_gather_single, gather_single, reduce_scatter_single
from hpcdist.core.group import Group
from hpcdist.core.work import Work


@deprecated("`_all_gather_base` is a private function; use `all_gather_single` instead", category=FutureWarning)
def _all_gather_base(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Work | None:
    """Gather into one tensor: the private name of ``all_gather_single`` before torch 1.13."""
    return all_gather_single(output_tensor, input_tensor, group, async_op)


@deprecated("`_reduce_scatter_base` is a private function; use `reduce_scatter_single` instead", category=FutureWarning)
def _reduce_scatter_base(
    output: Any, input: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    """Combine and scatter one tensor: the private name of ``reduce_scatter_single`` before torch 1.13."""
    return reduce_scatter_single(output, input, op, group, async_op)


@deprecated("`gather_into_tensor` is deprecated; use `gather_single` instead", category=FutureWarning)
def gather_into_tensor(
    tensor: Any,
    gather_tensor: Any = None,
    dst: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gather into one tensor on one rank: an earlier name of ``gather_single`` in torch 2.14."""
    return gather_single(tensor, gather_tensor, dst, group, async_op, group_dst)
