"""How does ``torch.distributed.init_process_group("hpcdist")`` work in a program that never imports hpcdist?

torch calls ``autoload`` at the end of ``import torch`` (entry-point group ``torch.backends``), in every program of an
environment where hpcdist is installed. So it imports nothing and starts nothing: it enters a name, and what the name
stands for is imported when a program uses it. TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from calling it.

It is installed as a module of its own, ``hpcdist_autoload``, because importing a part of ``hpcdist`` imports the whole.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

NAME = "hpcdist"
STOCK: list[Callable[..., Iterator[Any]]] = []  # torch's own rendezvous, whose place ours takes


def autoload() -> None:
    """Make the backend "hpcdist" known to torch.distributed; once a process."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, NAME.upper()):
        return
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    c10d: Any = dist.distributed_c10d
    STOCK.append(c10d.rendezvous)
    c10d.rendezvous = rendezvous


def create(options: Any, pg_options: Any) -> Any:
    """Make a group as torch asks for it (``hpcdist.c10d.adoption.create``)."""
    from hpcdist.c10d import adoption

    return adoption.create(options, pg_options)


def rendezvous(url: Any, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[Any]:
    """Find the other processes as torch does; under MPI a group of hpcdist needs no address for it.

    Which backend asks is not told here, so any other meets torch's own error when it first uses the store.
    """
    if str(url).startswith("env:") and "MASTER_ADDR" not in os.environ and is_unasked():
        from hpcdist import torch_bridge

        torch_bridge.LATE_STORE.is_reserved = True
    return STOCK[0](url, rank, world_size, **kwargs)


@cache
def is_unasked() -> bool:
    """Tell whether the program had not imported hpcdist by itself when this was first asked."""
    return NAME not in sys.modules
