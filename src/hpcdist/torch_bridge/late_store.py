"""The world's store as ``torch.distributed`` sees it: opened when it is first used.

====================================================  ==================================================  ==============
what                                                  why                                                 checked
====================================================  ==================================================  ==============
``_C._distributed_c10d.Store``                        the class that C++ takes                            2.13.0, 2.15.0
``threading._DummyThread``                            a thread of C++'s that calls Python                 3.10, 3.13
====================================================  ==================================================  ==============
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as bindings
from torch.distributed import default_pg_timeout

from hpcdist.core.world import WORLD

STOCK: dict[str, Callable[..., Any]] = {}  # torch's own functions, by the names of the places that hpcdist took


class LateStore(bindings.Store):
    """The world's store, opened when it is first used: few programs ask for one, and a server costs time.

    Under MPI the first use opens it for all ranks, so all of them have to come to it.
    """

    is_reserved = False  # for groups of ours only, since torch imported hpcdist and the program did not

    def opened(self) -> Any:
        if WORLD.store is None:
            from hpcdist.launch import rendezvous

            if WORLD.default is not None:
                return rendezvous.store_of(WORLD.default)
            if self.is_reserved:
                return next(STOCK["env"]("env://"))[0]  # its error says what is missing
            WORLD.store = next(iter(rendezvous.rendezvous("mpi://")))[0]
        return WORLD.store

    def check(self, keys: list[str]) -> bool:
        """Tell whether keys are there.

        c10d's own threads look for a signal now and then, each rank when it likes. They do not open the store, which
        takes all ranks: one that nobody has opened holds nothing.
        """
        if WORLD.store is None and isinstance(threading.current_thread(), threading._DummyThread):
            return False
        return bool(self.opened().check(keys))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long calls wait; a store that is not open yet takes the world's limit when it opens."""
        super().set_timeout(timeout)  # what C++ and ``timeout`` say
        if WORLD.store is not None:
            WORLD.store.set_timeout(timeout)


STORE_CALLS = (
    "set", "get", "add", "wait", "compare_set", "delete_key", "num_keys", "append", "multi_get",
    "multi_set", "has_extended_api", "queue_push", "queue_pop", "queue_len", "list_keys", "barrier", "clone",
)  # fmt: skip


# by which torch's C++ PrefixStore calls two of them; queues and list_keys it does not hand on to a store made in Python
CXX_NAMES = {"deleteKey": "delete_key", "getNumKeys": "num_keys"}


def forwarded(name: str) -> Callable[..., Any]:
    """Return a method that calls the opened store's method of the same name."""

    def call(self: LateStore, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.opened(), name)(*args, **kwargs)

    call.__name__ = name
    return call


for each in STORE_CALLS:
    setattr(LateStore, each, forwarded(each))
for theirs, ours in CXX_NAMES.items():
    setattr(LateStore, theirs, forwarded(ours))

LATE_STORE = LateStore()  # C++ keeps only its half of a store made in Python, so this one lives for ever


def fresh_store() -> LateStore:
    """Return the store for a world that is about to begin."""
    if WORLD.default is None:
        WORLD.store = None
        LATE_STORE.set_timeout(default_pg_timeout)  # a world's own, where a store by itself has 5 minutes
    return LATE_STORE
