"""torch's view of a group: a ``torch.distributed.ProcessGroup``, which torch's own libraries take for one of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed

from hpcdist.core.c10d_methods import C10dMethods
from hpcdist.core.world import WORLD
from hpcdist_stores.keep_alive import KeptAlive


def refused(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a method that raises c10d's class for what a backend does not support."""

    def refuse(self: C10dMethods, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"backend {self.config!r} does not support {name}: {instead}")

    return refuse


class ProcessGroup(KeptAlive, C10dMethods, torch.distributed.ProcessGroup):  # type: ignore[misc]
    """A set of ranks that communicate, made by ``init_process_group`` or one of the ``new_group`` family."""

    # what each call reads: in the ``__dict__`` of a pybind11 class an attribute takes 20 to 40 ns more
    __slots__ = ("_begun", "_rank", "backends", "coalescing", "cpu", "group_ranks", "journal", "known", "ranks")

    def __init__(self, ranks: tuple[int, ...], rank: int, *args: Any) -> None:
        torch.distributed.ProcessGroup.__init__(self, rank, len(ranks))  # type: ignore[call-arg]  # not in the stub
        C10dMethods.__init__(self, ranks, rank, *args)
        self._begun = None

    split_group: Any  # ``core.factory`` adds it

    # torch's libraries ask a group made in Python for these by name

    getRank, getSize = C10dMethods.rank, C10dMethods.size  # C++'s own were told once

    use_pg_for_symm_mem_rendezvous = False  # C++'s own asks the default backend, which it does not know

    @property
    def pg_name(self) -> str:
        """The group's name, as torch's loggers ask for it."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        WORLD.rename(self, name)

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    merge_remote_group = refused(
        "merge_remote_group",
        "a group is made of ranks of one world; start all ranks together and use new_group or split_group",
    )
    # since torch 2.14; whether C++'s own are supported is asked of the default backend, too
    supports_window = supports_reconfigure = False
    new_window = refused("new_window", "hpcdist.Window is MPI's")
    reconfigure = refused("reconfigure", "hpcdist.elastic replaces ranks")
    get_reconfigure_handle = refused("get_reconfigure_handle", "hpcdist.elastic replaces ranks")

    # torch calls them below the methods that a group made in Python replaces, that is never
    register_pre_hook = register_post_hook = _register_on_completion_hook = refused(
        "hooks", "a TorchDispatchMode sees its calls as operators, torch.profiler as events"
    )
    register_abort_hook = unregister_abort_hook = refused(
        "hooks of an abort", "an abort ends the calls under way, whose waits raise"
    )

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

    def is_aborted(self) -> bool:
        """Tell whether the group has ended for good."""
        return not self.backends
