"""Gradients of calls: a call on a tensor, and the call that takes the gradient of its result back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class WithGradient(torch.autograd.Function):
    """Makes a call; its gradient is made by another call, and has none itself."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, call: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        """Make the call."""
        ctx.back = back
        return call(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Take the gradient back."""
        return ctx.back(gradient), None, None
