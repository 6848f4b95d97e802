"""Events of torch.profiler for calls.

A call is an event named ``backend:call`` that carries the shape of the input, and that ends when the operation ends.
Without a profiler a call costs one question, ``hooks.is_profiled()``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcdist.core import hooks

if TYPE_CHECKING:
    import torch

# events that c10d calls otherwise than the table calls the collective
TITLES = {
    "all_gather_single": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


def begin(backend: str, call: str, *tensors: torch.Tensor | None) -> hooks.Event:
    """Begin the event of a call; its input is the first tensor that is there. Ask ``hooks.is_profiled`` before."""
    given = next((tensor for tensor in tensors if tensor is not None), None)
    return hooks.record(f"{backend}:{TITLES.get(call, call)}", [] if given is None else [given])
