"""What memory does a call read, and what does it write?

Backends see flat, contiguous, dense tensors of one device. What the caller gave may be a NumPy array, a
strided view, a lazily conjugated or negated tensor, or require grad: then a contiguous copy stands in for
it, and what the call wrote is copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def is_plain(tensor: Any) -> bool:
    """Tell whether a tensor's own memory can be handed to a library as it is."""
    return (
        tensor.__class__ in PLAIN_TYPES
        and tensor.is_contiguous()  # False for sparse tensors too
        and not tensor.requires_grad
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def as_tensor(value: Any, name: str, writable: bool = False) -> torch.Tensor:
    """Return a caller's tensor or array as a tensor on the same memory, outside autograd.

    Args:
        value: a tensor, or a NumPy array of a dtype that torch has.
        name: the parameter's name, for the message.
        writable: whether the call writes to it.

    Raises:
        TypeError: neither tensor nor array, or a dtype that torch lacks.
        ValueError: an array to write to is read-only.
    """
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.ndarray):
        if writable and not value.flags.writeable:
            raise ValueError(f"parameter `{name}` is a read-only numpy.ndarray, and this call writes to it")
        if not value.flags.writeable:
            value = value.copy()
        return torch.from_numpy(value)  # TypeError names the dtypes that torch has
    raise TypeError(
        f"Invalid function argument. Expected parameter `{name}` of type torch.Tensor "
        f"(or numpy.ndarray) but got {type(value)} instead."
    )


def as_tensors(values: Any, name: str, writable: bool = False) -> list[torch.Tensor]:
    """Return a caller's list of tensors or arrays as tensors; TypeError where it is no such list."""
    if not isinstance(values, (list, tuple)):
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type List[torch.Tensor] "
            f"but got {type(values)} instead."
        )
    wrong = {type(value).__name__ for value in values if not isinstance(value, (torch.Tensor, np.ndarray))}
    if wrong:
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type List[torch.Tensor] "
            f"but got {type(values)} with elements of type {sorted(wrong)}."
        )
    return [as_tensor(value, name, writable) for value in values]


def for_reading(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with the same values."""
    return tensor.resolve_neg().resolve_conj().contiguous()


def for_writing(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor to receive what is meant for ``tensor``: itself where it can be."""
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def same_dtype(*tensors: torch.Tensor) -> None:
    """Raise c10d's ValueError where dtypes differ; a complex type goes with its element type."""
    kinds = {tensor.dtype.to_real() if tensor.dtype.is_complex else tensor.dtype for tensor in tensors}
    if len(kinds) > 1:
        raise ValueError(
            "Invalid usage of tensors with different dtypes "
            f"Found {' and '.join(sorted({str(tensor.dtype) for tensor in tensors}))}"
        )


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensors' elements one after another."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def joint(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return memory for the elements of all tensors."""
    return torch.empty(sum(tensor.numel() for tensor in tensors), dtype=like.dtype, device=like.device)


def scattering(flat: torch.Tensor, tensors: list[torch.Tensor]) -> Callable[[], None]:
    """Return what copies the elements of ``flat`` to the tensors."""

    def copy() -> None:
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))

    return copy


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two contiguous tensors share memory, which libraries forbid between input and output."""
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes
