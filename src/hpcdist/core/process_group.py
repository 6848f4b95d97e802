"""torch's view of a group: a ``torch.distributed.ProcessGroup``, which torch's own libraries take for one of theirs."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from hpcdist.core import registry
from hpcdist.core.c10d_methods import C10dMethods
from hpcdist.core.world import WORLD
from stores.keep_alive import KeptAlive


class ProcessGroup(KeptAlive, C10dMethods, torch.distributed.ProcessGroup):  # type: ignore[misc]
    """A set of ranks that communicate, made by ``init_process_group`` or one of the ``new_group`` family."""

    def __init__(self, ranks: tuple[int, ...], rank: int, *args: Any) -> None:
        torch.distributed.ProcessGroup.__init__(self, rank, len(ranks))  # type: ignore[call-arg]  # not in the stub
        C10dMethods.__init__(self, ranks, rank, *args)
        self._splits: Counter[tuple[int, ...]] = Counter()  # how often each list of ranks was made a group

    # torch's libraries ask a group made in Python for these by name

    getRank, getSize = C10dMethods.rank, C10dMethods.size  # C++'s own were told once

    @property
    def pg_name(self) -> str:
        """The group's name, as torch's loggers ask for it."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

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
            opts: c10d's options of the backend; a communicator is made like this group's.
            group_name: a name for the members; None makes one of this group's, the ranks and a number.
            group_desc: what the group is for.
            device_types: keep only the backends of these.

        Returns:
            The group; None on a rank that is not in it.

        Raises:
            TypeError: other options.
        """
        registry.check_options(opts, [each.name for each in self.backends.values()])
        if self.rank() not in ranks:
            return None
        limit = timeout or self.timeout
        # no two groups meet under one name, although their members call for the same ranks again
        self._splits[tuple(ranks)] += 1
        own_name = f"{self.group_name}:split:{'_'.join(map(str, ranks))}:{self._splits[tuple(ranks)]}"
        kinds = [each.type for each in device_types] if device_types else None
        by_device = self.create_backends(ranks, own_name, limit, kinds)
        global_ranks = tuple(self.ranks[rank] for rank in ranks)
        description = group_desc or f"{self.group_desc}:split"
        name = group_name or own_name
        return ProcessGroup(global_ranks, ranks.index(self.rank()), by_device, self.config, name, description, limit)

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> ProcessGroup:
        """Raise: the ranks of an MPI world are those that it started with.

        Raises:
            RuntimeError: always; c10d's class for what a backend does not support.
        """
        raise RuntimeError(
            f"backend {self.config!r} does not support merge_remote_group: a group is made of ranks of one world; "
            "start all ranks together and use new_group or split_group"
        )

    def _refuse_hook(self, *args: Any) -> None:
        """Raise: torch calls such hooks below the methods that a group made in Python replaces.

        Raises:
            RuntimeError: always; else the hook would never be called.
        """
        raise RuntimeError(
            f"backend {self.config!r} does not call hooks of register_pre_hook and register_post_hook; a "
            "TorchDispatchMode sees its calls as operators, torch.profiler as events"
        )

    register_pre_hook = register_post_hook = _refuse_hook

    def _wait_for_pending_works(self) -> None:
        """Wait for the asynchronous calls of this rank on the group, as c10d's backends do."""
        for backend in self.backends.values():
            for work in backend.pending():
                work.wait()

    def shutdown(self) -> None:
        """Free the communicators; every rank of the group calls it, and torch's destroy does."""
        try:
            self.close()
        finally:
            WORLD.discard(self)

    def abort(self) -> None:
        """End the group and what is under way on it without the other ranks; ``destroy_process_group`` forgets it.

        Calls under way raise: NCCL's on this rank, MPI's on all ranks if this MPI can do so (ULFM). The communicators
        are not freed, which all ranks would have to take part in.
        """
        reason = f"group {self._name!r} was aborted"
        self.revoke(reason)
        self.drop(reason)

    def is_aborted(self) -> bool:
        """Tell whether the group has ended for good."""
        return not self.backends
