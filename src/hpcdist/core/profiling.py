"""Events of torch.profiler for calls.

A call is an event named ``backend:call`` that carries the shape of the input, and that ends when the operation ends.
Without a profiler a call costs one question, ``hooks.is_profiled()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcdist.core import hooks
from hpcdist.core.table import ALL_REDUCE

if TYPE_CHECKING:
    import torch

    from hpcdist.core.call import Call

# events that c10d calls otherwise than the table calls the collective
TITLES = {
    "all_gather_single": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


def begin(backend: str, call: str, inputs: Sequence[torch.Tensor]) -> hooks.Event:
    """Begin the event of a call. Ask ``hooks.is_profiled`` before."""
    return hooks.record(f"{backend}:{TITLES.get(call, call)}", inputs)


def inputs(call: Call) -> Sequence[torch.Tensor]:
    """Return the tensors whose shapes the event of a collective shows: as the caller gave them, if it joins several."""
    if call.row is ALL_REDUCE and call.result:
        return call.result
    return [] if call.tensor is None else [call.tensor]
