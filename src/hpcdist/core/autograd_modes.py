"""Modes of autograd, which belong to a thread, for calls that another thread carries out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import is_grad_enabled, is_inference_mode_enabled

Modes = tuple[bool, bool]  # inference_mode, grad


def run_in(modes: Modes, call: Callable[[], None]) -> None:
    """Run a call in the modes of autograd of another thread.

    Writing to an inference tensor raises outside ``torch.inference_mode()``, and writing to a parameter outside
    ``torch.no_grad()``. Both modes belong to a thread.
    """
    if modes == (is_inference_mode_enabled(), is_grad_enabled()):
        call()
        return
    is_inference, has_grad = modes
    with torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad):
        call()


def in_modes_of_caller(call: Callable[[], None]) -> Callable[[], None]:
    """Return a call that runs in this thread's modes of autograd wherever it is carried out."""
    return partial(run_in, (is_inference_mode_enabled(), is_grad_enabled()), call)
