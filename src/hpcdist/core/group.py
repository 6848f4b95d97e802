"""What is a process group?

Ranks, a name, a time limit, and one backend per device type. It is a ``torch.distributed.ProcessGroup``, so
that torch's own libraries take it for one of theirs.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from hpcdist.core import errors
from hpcdist.core.journal import Journal

if TYPE_CHECKING:
    from hpcdist.core.backend import Backend


class ProcessGroup(torch.distributed.ProcessGroup):
    """A set of ranks that communicate, made by ``init_process_group`` or one of the ``new_group`` family.

    Attributes:
        ranks: the global rank of each rank of the group, in order.
        backends: the backend that carries each device type; empty once the group is destroyed.
        config: the backend string that it was made with, such as ``"cpu:mpi,cuda:nccl"``.
        timeout: the limit of each call on the group.
        journal: the calls of this rank on the group.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        backends: dict[str, Backend],
        config: str,
        name: str,
        description: str,
        timeout: timedelta,
    ) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]  # the stub lacks this overload
        self.ranks = ranks
        self.group_ranks = {global_rank: index for index, global_rank in enumerate(ranks)}
        self.backends = backends
        self.cpu = backends.get("cpu")
        self.config = config
        self.timeout = timeout
        self.journal = Journal(name)
        self.coalescing: list[Any] | None = None  # the calls held back by a coalescing manager
        self._name = name
        self._description = description
        self._device_id: torch.device | None = None

    @property
    def sequence(self) -> int:
        """How many calls this rank has made on the group."""
        return self.journal.sequence + self.journal.messages

    # torch's libraries ask a group made in Python for these by name

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch's stub has a NewType of str
        """The name that is unique in this process and the same on every rank of the group."""
        return self._name

    @property
    def pg_name(self) -> str:
        """The same name, as torch's loggers ask for it."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the group is for, in the user's words."""
        return self._description

    @property
    def bound_device_id(self) -> torch.device | None:
        """The device given as ``device_id``, or None."""
        return self._device_id

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self._device_id = device

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def __repr__(self) -> str:
        if not self.backends:
            return f"<hpcdist.ProcessGroup {self._name!r}, destroyed>"
        return f"<hpcdist.ProcessGroup {self._name!r}: rank {self.rank()} of {self.size()}, {self.config}>"

    def backend(self, device: torch.device | str) -> Backend:
        """Return the backend that carries tensors of a device.

        Raises:
            ValueError: the group was destroyed.
            RuntimeError: no backend of the group carries that device type.
        """
        kind = device if isinstance(device, str) else device.type
        try:
            return self.backends[kind]
        except KeyError:
            if not self.backends:
                raise errors.destroyed(self) from None
            raise RuntimeError(
                f"No backend type associated with device type {kind}: group {self._name!r} carries {self.config}"
            ) from None

    def any_backend(self) -> Backend:
        """Return the backend for calls without a tensor: the CPU's where there is one."""
        if self.cpu is not None:
            return self.cpu
        if not self.backends:
            raise errors.destroyed(self)
        return next(iter(self.backends.values()))

    def close(self) -> None:
        """Free the communicators; every rank of the group calls it."""
        closing = dict.fromkeys(self.backends.values())  # one backend may carry several devices
        self.backends, self.cpu = {}, None
        for backend in closing:
            backend.close()
