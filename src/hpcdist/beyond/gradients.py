"""Gradients of calls: a call on a tensor, and the call that computes its input's gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class WithGradient(torch.autograd.Function):
    """Makes a call; another call computes its gradient, which has no gradient itself."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, call: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        """Make the call."""
        ctx.back = back
        return call(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Compute the input's gradient."""
        return ctx.back(gradient), None, None
