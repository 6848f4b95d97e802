"""NaN check: refuses to send a tensor that holds NaN, before it spreads, if TORCH_DIST_NAN_CHECK=1 (torch's, 2.14)."""

from __future__ import annotations

from typing import Any

import torch

from hpcdist.core.backend import Backend
from hpcdist.core.call import Call
from hpcdist.core.errors import explained
from hpcdist.core.group import Group, label
from hpcdist.core.table import ALL_REDUCE, BROADCAST
from hpcdist.watch import calls_under_way

VARIABLE = "TORCH_DIST_NAN_CHECK"


def check(pg: Group, backend: Backend, call: Call | str) -> None:
    """Look at what a collective is about to send from this rank; ``call`` is a name for one that moves objects."""
    if isinstance(call, str) or call.send is None or (call.row is BROADCAST and call.root != pg.rank()):
        return  # a buffer that is only received into may hold anything
    backend.settle()  # a queued call may still write what is looked at
    is_list = call.row is ALL_REDUCE and call.send is call.recv and call.result
    for tensor in call.result if is_list and call.result else [call.send]:
        refuse_nan(pg, f"{call.row.name} #{pg.journal.sequence + 1}", tensor)


def check_message(pg: Group, name: str, peer: int, tensor: torch.Tensor) -> None:
    """Look at a message before it is sent; ``peer`` is a rank of the group."""
    refuse_nan(pg, f"{name} to rank {pg.ranks[peer]}", tensor)


def refuse_nan(pg: Group, call: str, tensor: Any) -> None:
    """Raise RuntimeError, c10d's class for it, if a tensor holds NaN; the host waits for a GPU's answer.

    Sums of complex numbers, all_reduce aside, are sums of pairs of real ones, and are named as such.
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
        explained(
            f"NaN in what rank {pg.ranks[pg.rank()]} was about to send: {call} of "
            f"{label(pg)}, called at {calls_under_way.caller()}, has {count} NaN among the "
            f"{tensor.numel()} elements of {shape}, the first at {first}; nothing was sent",
            "nan",
        )
    )
