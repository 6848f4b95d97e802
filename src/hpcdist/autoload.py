"""Entry point that makes the backend "hpcdist" known to torch, also in a program that never imports hpcdist.

torch calls ``autoload`` at the end of ``import torch`` (entry-point group ``torch.backends``), in every program of an
environment that has hpcdist installed. So this module imports only the standard library and starts nothing: it
registers the name, and hpcdist itself is imported when a program asks torch for that backend.
TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from calling it.

It is installed as a module of its own, ``hpcdist_autoload``, because importing a module of ``hpcdist`` imports all
of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

NAME = "hpcdist"
STOCK: list[Callable[..., Iterator[Any]]] = []  # torch's own rendezvous, which ours replaces and calls


def autoload() -> None:
    """Register the backend "hpcdist" with torch.distributed, once a process."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, NAME.upper()):
        return
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    c10d: Any = dist.distributed_c10d
    STOCK.append(c10d.rendezvous)
    c10d.rendezvous = rendezvous


def create(options: Any, pg_options: Any) -> Any:
    """Create the group that torch asks for (see ``hpcdist.c10d.torch_init.create``)."""
    from hpcdist.c10d import torch_init

    return torch_init.create(options, pg_options)


def rendezvous(url: Any, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[Any]:
    """Find the other processes as torch does, but let a group of hpcdist start under MPI without MASTER_ADDR.

    torch does not pass the backend's name to a rendezvous. So the store is only created when it is first used: hpcdist
    never uses it under MPI, and any other backend then gets torch's own error about the missing address.
    """
    if str(url).startswith("env:") and "MASTER_ADDR" not in os.environ and is_unasked():
        from hpcdist.torch_bridge import late_store

        late_store.LATE_STORE.is_reserved = True
    return STOCK[0](url, rank, world_size, **kwargs)


@cache
def is_unasked() -> bool:
    """Tell whether the program had not imported hpcdist when this was first called."""
    return NAME not in sys.modules
