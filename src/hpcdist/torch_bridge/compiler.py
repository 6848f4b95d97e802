"""Bridge to ``torch.compile``: lets it run our calls as they are, and uses its comparison of tensors.

What torch keeps private and is used here, and the versions where that was checked; if it is missing, calls are slower,
or ``torch.compile`` cannot take them:

====================================================  ==================================================  ==============
what                                                  why                                                 checked
====================================================  ==================================================  ==============
``_C._dynamo.guards.TensorGuards``                    whether two calls have tensors that look the same   2.13.0
``_C._dynamo.eval_frame.set_code_exec_strategy``,     a compiled function runs our calls as they are: it  2.13.0
``_torchdynamo_disable`` of a function                traces into them otherwise, and fails
====================================================  ==================================================  ==============
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch
from torch._C import _dynamo

from hpcdist.core import call_cache, hooks

compiler: Any = _dynamo
REASON = "it communicates"


def likeness(*tensors: torch.Tensor, any_size: bool = False) -> call_cache.Likeness:
    """Return a predicate: whether tensors have the same metadata as these, by the guards of torch.compile.

    One call compares class, dispatch keys (layout, device type, lazy negation and conjugation, and those of the thread,
    such as autocast), dtype, device, requires_grad, sizes and strides; with ``any_size``, in place of sizes and strides
    only the number of dimensions, and the stride of a single dimension.
    """
    sizes: list[list[int | None]] = [[None] * each.dim() if any_size else list(each.shape) for each in tensors]
    strides: list[list[int | None]] = [
        [None] * each.dim() if any_size and each.dim() > 1 else list(each.stride()) for each in tensors
    ]
    made = compiler.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: call_cache.Likeness = made.check
    return check


with suppress(Exception):  # a torch with other guards: then each call makes its checks
    likeness(torch.empty(1, device="cpu"), any_size=True)
    hooks.likeness = likeness


def run_as_they_are(values: Iterable[Any]) -> None:
    """Let torch.compile call our functions and methods among these values without tracing into them.

    A group is opaque to the compiler: it knows a group's name, rank and size, and raises an error at any other member,
    which our methods need. A skipped function breaks the graph instead, and runs.

    This is what ``torch.compiler.disable`` does, without its wrapper, which would cost each call a microsecond, and
    without importing the compiler, which takes seconds.
    """
    with suppress(AttributeError):
        frames = compiler.eval_frame
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        for function in functions_among(values):
            frames.set_code_exec_strategy(function.__code__, skip)
            marked: Any = function
            marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, REASON


def functions_among(values: Iterable[Any]) -> Iterator[FunctionType]:
    """Yield our functions among the values, and the methods that our classes among them define and inherit."""
    for value in values:
        parts = (vars(each).values() for each in value.__mro__) if isinstance(value, type) else ([value],)
        for part in parts:
            for each in part:
                if isinstance(each, FunctionType) and each.__module__.startswith("hpcdist."):
                    yield each
