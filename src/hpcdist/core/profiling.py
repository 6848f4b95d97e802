"""Events of torch.profiler for calls.

A call is an event named ``backend:call`` that carries the shape of the input, and that ends when the operation ends.
Whoever knows torch's profiler (``hpcdist.torch_bridge``) installs two functions here; without a profiler a call
costs one question, ``is_on()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

# where c10d calls an event otherwise than the table calls the collective
TITLES = {
    "all_gather_single": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class Event(Protocol):
    """An event that has begun."""

    def __exit__(self, *_: Any) -> Any:
        """End it, from any thread."""


def never() -> bool:
    """Return False: nothing is installed."""
    return False


def unknown(name: str, inputs: Sequence[torch.Tensor]) -> Event:
    """Raise: nothing is installed."""
    raise RuntimeError(f"no profiler is installed to record {name}")


is_on: Callable[[], bool] = never
record: Callable[[str, Sequence[torch.Tensor]], Event] = unknown


def install(running: Callable[[], bool], recorder: Callable[[str, Sequence[torch.Tensor]], Event]) -> None:
    """Take the two functions: whether a profiler runs, and what begins an event of a name and inputs."""
    global is_on, record
    is_on, record = running, recorder


def begin(backend: str, call: str, *tensors: torch.Tensor | None) -> Event:
    """Begin the event of a call, where a profiler ``is_on()``; its input is the first tensor that is there."""
    given = next((tensor for tensor in tensors if tensor is not None), None)
    return record(f"{backend}:{TITLES.get(call, call)}", [] if given is None else [given])
