"""Buffers that every call refuses."""

from __future__ import annotations

import numpy as np
import torch


def frozen() -> np.ndarray:
    """Return a read-only array."""
    array = np.ones(2, np.float32)
    array.flags.writeable = False
    return array


def freed(count: int, start: int = 0, step: int = 1) -> torch.Tensor:
    """Return part of a tensor whose storage was freed, as FSDP frees those of unsharded parameters."""
    tensor = torch.ones(start + step * count)[start::step]
    tensor.untyped_storage().resize_(0)
    return tensor
