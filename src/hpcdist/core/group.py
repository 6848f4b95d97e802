"""What is a process group?

Ranks, a name, a time limit, and one backend per device type. It is a ``torch.distributed.ProcessGroup``, so
that torch's own libraries take it for one of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from hpcdist.core import errors
from hpcdist.core.c10d_methods import C10dMethods
from hpcdist.core.journal import Journal
from hpcdist.core.repetition import Known
from stores.keep_alive import KeptAlive

if TYPE_CHECKING:
    from hpcdist.core.backend import Backend


class ProcessGroup(KeptAlive, C10dMethods, torch.distributed.ProcessGroup):  # type: ignore[misc]
    """A set of ranks that communicate, made by ``init_process_group`` or one of the ``new_group`` family.

    Attributes:
        ranks: the global rank of each rank of the group, in order.
        backends: the backend that carries each device type; empty once the group is destroyed.
        config: the backend string that it was made with, such as ``"cpu:mpi,cuda:nccl"``.
        timeout: the limit of each call on the group.
        journal: the calls of this rank on the group.
        known: what need not be asked of a collective that repeats the last one of its kind.
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
        self.carriers = {device: backend.on(device) for device, backend in backends.items()}
        for backend in backends.values():
            if backend is not self.cpu and backend.peer is None:
                backend.peer = self.cpu
        self.config = config
        self.timeout = timeout
        self.journal = Journal(name)
        self.known = Known()
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
            return self.carriers[kind]
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

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """Launch the calls begun inside together, on the backends that can."""
        with ExitStack() as groups:
            for backend in self.backends.values():
                groups.enter_context(backend.grouped())
            yield

    def close(self) -> None:
        """Free the communicators; every rank of the group calls it, and the watchdog looks on until it is done."""
        closing = dict.fromkeys(self.backends.values())  # one backend may carry several devices
        try:
            with self.journal.during("destroy_process_group"):
                for backend in reversed(closing):  # the CPU's last: the others found each other over it
                    backend.close()
        finally:
            self.backends, self.cpu, self.carriers = {}, None, {}
            self.known.clear()

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> ProcessGroup | None:
        """Make a group of some ranks of this one, known to no registry; the members call.

        Args:
            ranks: ranks of this group, in the order of their ranks in the new one.
            timeout: the limit of each call; None for this group's.
            opts: taken as c10d takes it; a communicator is made like this group's.
            group_name: a name that is unique on its members; None makes one of this group's and the ranks.
            group_desc: what the group is for.
            device_types: keep only the backends of these.

        Returns:
            The group; None on a rank that is not in it.
        """
        if self.rank() not in ranks:
            return None
        limit = timeout or self.timeout
        name = group_name or f"{self.group_name}:split:{'_'.join(map(str, ranks))}"
        kept = {each.type for each in device_types} if device_types else set(self.backends)
        made = {
            each: each.create_group(ranks, name, limit)
            for each in dict.fromkeys(each for kind, each in self.backends.items() if kind in kept)
        }
        by_device = {kind: made[each] for kind, each in self.backends.items() if kind in kept}
        global_ranks = tuple(self.ranks[rank] for rank in ranks)
        description = group_desc or f"{self.group_desc}:split"
        return ProcessGroup(global_ranks, ranks.index(self.rank()), by_device, self.config, name, description, limit)

    def shutdown(self) -> None:
        """Free the communicators; every rank of the group calls it, and torch's destroy does."""
        from hpcdist.core.world import WORLD

        try:
            self.close()
        finally:
            WORLD.discard(self)

    def abort(self) -> None:
        """End the group as ``shutdown`` does; MPI has no way to end a call under way (MPI 4.1)."""
        self.shutdown()
