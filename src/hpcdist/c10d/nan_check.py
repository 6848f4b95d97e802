"""NaN check: an error before a tensor with NaN is sent, if TORCH_DIST_NAN_CHECK=1 (torch's, since 2.14)."""

from __future__ import annotations

from typing import Any

import torch

from hpcdist.core.backend import Backend
from hpcdist.core.call import Call
from hpcdist.core.group import Group, label
from hpcdist.core.printing import add_hint
from hpcdist.core.table import ALL_REDUCE, BROADCAST
from hpcdist.watch import calls_under_way

VARIABLE = "TORCH_DIST_NAN_CHECK"


def check(pg: Group, backend: Backend, call: Call | str) -> None:
    """Check the tensors that a collective is about to send; ``call`` is a name for one that moves objects."""
    if isinstance(call, str) or call.send is None or (call.row is BROADCAST and call.root != pg.rank()):
        return  # an output may hold any values
    backend.settle()  # a queued call may still write to it
    is_list = call.row is ALL_REDUCE and call.send is call.recv and call.result
    for tensor in call.result if is_list and call.result else [call.send]:
        refuse_nan(pg, f"{call.row.name} #{pg.journal.sequence + 1}", tensor)


def check_message(pg: Group, name: str, peer: int, tensor: torch.Tensor) -> None:
    """Check a message before it is sent; ``peer`` is a rank of the group."""
    refuse_nan(pg, f"{name} to rank {pg.ranks[peer]}", tensor)


def refuse_nan(pg: Group, call: str, tensor: Any) -> None:
    """Raise RuntimeError, as c10d does, if a tensor holds NaN; for a GPU's tensor the host waits.

    Sums of complex numbers, except all_reduce's, are sums of pairs of real numbers, and are named so.
    """
    dtype = tensor.dtype
    if not (dtype.is_floating_point or dtype.is_complex) or (
        tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        return
    found = torch.isnan(tensor.detach().to(torch.float32) if dtype.itemsize == 1 else tensor.detach())
    count = int(found.sum())
    if count == 0:
        return
    first = found.nonzero()[0].tolist()
    shape = f"{str(dtype).removeprefix('torch.')} {list(tensor.shape)}"
    raise RuntimeError(
        add_hint(
            f"NaN in what rank {pg.ranks[pg.rank()]} was about to send: {call} of "
            f"{label(pg)}, called at {calls_under_way.caller()}, has {count} NaN among the "
            f"{tensor.numel()} elements of {shape}, the first at {first}; nothing was sent",
            "nan",
        )
    )
