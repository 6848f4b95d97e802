"""Snapshot of a training state: a copy to which a rank returns, or which it gets from another rank, bit for bit.

The tensors of a ``state_dict()`` are copied apart, and sent as tensors; the rest of it (numbers, names, the order of
entries) is one small pickle.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from hpcdist.c10d.collectives import broadcast
from hpcdist.core.group import Group
from hpcdist.core.objects import TensorObjects


class Stateful(Protocol):
    """An object with a state: modules, optimizers, schedulers, a user's class."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Load a state."""


class TensorSlot(NamedTuple):
    """The place of a tensor in the pickled rest."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str  # the type only: the number of a GPU depends on the rank


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested dicts, lists and tuples with a function applied to their leaves."""
    if isinstance(value, Mapping):
        return {key: mapped(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, TensorSlot):
        made = [mapped(each, change) for each in value]
        return made if isinstance(value, list) else type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return change(value)


class Snapshot:
    """The state of some objects, by their names, after a step."""

    def __init__(self, state: Mapping[str, Stateful]) -> None:
        self._state = state
        self._tensors: list[torch.Tensor] = []
        self._rest = b""
        self.step = 0  # the number of steps that the state contains

    def take(self, step: int) -> None:
        """Copy the current state, to the memory of the last copy."""
        tensors: list[torch.Tensor] = []

        def leave_out(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            tensors.append(value.detach())
            return TensorSlot(len(tensors) - 1, tuple(value.shape), value.dtype, value.device.type)

        rest = mapped({name: each.state_dict() for name, each in self._state.items()}, leave_out)
        kept = self._tensors
        for index, tensor in enumerate(tensors):
            if index < len(kept) and are_alike(kept[index], tensor):
                kept[index].copy_(tensor)
            else:
                kept[index : index + 1] = [tensor.clone(memory_format=torch.contiguous_format)]
        del kept[len(tensors) :]
        self._rest, self.step = pickle.dumps(rest), step

    def broadcast(self, group: Group, source: int) -> None:
        """Replace all snapshots by one rank's; every rank of the group calls."""
        backend = group.any_backend()
        step, rest = TensorObjects(backend, backend.run).broadcast((self.step, self._rest), source)
        tensors = self._tensors
        if group.rank() != source:
            slots: list[TensorSlot] = []
            mapped(pickle.loads(rest), lambda value: slots.append(value) if isinstance(value, TensorSlot) else None)
            tensors = [torch.empty(slot.shape, dtype=slot.dtype, device=slot.device) for slot in slots]
        for tensor in tensors:
            broadcast(tensor, group=group, group_src=source)
        self._tensors, self.step, self._rest = tensors, step, rest  # the old tensors may be needed until now

    def restore(self) -> None:
        """Load this state into the objects."""
        rest = pickle.loads(self._rest)
        # copies: an optimizer keeps the tensors that it gets
        found = mapped(
            rest, lambda value: self._tensors[value.number].clone() if isinstance(value, TensorSlot) else value
        )
        for name, each in self._state.items():
            each.load_state_dict(found[name])


def are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors have the same shape, dtype and device."""
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
