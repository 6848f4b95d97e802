"""Remote memory: what a backend that has one-sided calls must do; offsets and sizes are in bytes, ranks the group's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class RemoteMemory(ABC):
    """Memory of every rank of a group, open to the others until it is closed.

    A call is complete, here and there, when it returns. Tensors are contiguous, on the CPU and checked by the caller.
    """

    own: torch.Tensor  # this rank's memory, as bytes

    @abstractmethod
    def put(self, tensor: torch.Tensor, dst: int, offset: int) -> None:
        """Write a tensor to a rank's memory."""

    @abstractmethod
    def get(self, tensor: torch.Tensor, src: int, offset: int) -> None:
        """Read a rank's memory into a tensor."""

    @abstractmethod
    def accumulate(self, tensor: torch.Tensor, dst: int, offset: int, op: Any) -> None:
        """Combine a tensor with a rank's memory, each element atomically."""

    @abstractmethod
    def fetch_and_add(self, value: torch.Tensor, dst: int, offset: int) -> torch.Tensor:
        """Add one element to a rank's atomically, and return what was there before."""

    @abstractmethod
    def signal(self, dst: int) -> None:
        """Send a rank a signal, which it sees after all that was written to it before."""

    @abstractmethod
    def wait_signal(self, src: int, seconds: float) -> None:
        """Wait for one signal of a rank."""

    @abstractmethod
    def mapped(self, rank: int) -> torch.Tensor | None:
        """Return a rank's memory as bytes, or None if this rank cannot load from it."""

    @abstractmethod
    def close(self) -> None:
        """Close it; every rank calls, once or often."""
