"""The backend of a device type, as torch's libraries ask a group for it (c10d's ``Backend``)."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

from hpcdist.core.backend import Backend
from hpcdist.core.group import Group
from hpcdist.core.table import MESSAGE_METHODS, METHODS

# the group's methods that the backend of a device type has too
OTHERS = ("monitored_barrier", "set_timeout", "_get_sequence_number_for_group", "_set_sequence_number_for_group")
CARRIED = {*METHODS, *filter(None, METHODS.values()), *MESSAGE_METHODS, *OTHERS}


class DeviceBackend:
    """The backend of a device type, as torch's libraries see it (c10d's ``Backend``)."""

    supports_splitting = True
    supports_time_estimate = False

    def __init__(self, group: Group, backend: Backend) -> None:
        self._group = group
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        """Return the group's own method for a collective, a message or a setting."""
        if name in CARRIED:
            return getattr(self._group, name)
        raise AttributeError(
            f"a group's backend has no attribute {name!r}; of the group's methods it has {', '.join(sorted(CARRIED))}"
        )

    @property
    def options(self) -> SimpleNamespace:
        group = self._group
        return SimpleNamespace(
            backend=self.name(),
            _timeout=group.timeout,
            group_name=group.group_name,
            global_ranks_in_group=list(group.ranks),
        )

    @property
    def supports_coalescing(self) -> bool:
        return self._backend.has_groups

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connect on a GPU at once, and bind the group to it; every rank of the group calls."""
        self._backend.connect_device(device)
        self._group.bound_device_id = device

    def abort(self) -> None:
        """Abort the calls under way on this device type, if the library can, without the other ranks."""
        self._backend.faults.interrupt(f"group {self._group.group_name!r} was aborted")

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    def name(self) -> str:
        """Return the name that a script asked for on the CPU, or else the backend's own."""
        group, backend = self._group, self._backend
        return group.asked_name if group.asked_name is not None and backend is group.cpu else backend.name

    def rank(self) -> int:
        return self._backend.rank

    def size(self) -> int:
        return self._backend.size

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: tensors come from torch's own allocator."""
        return False
