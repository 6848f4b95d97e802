"""Entry point that makes the backend "hpcdist" known to torch, also in a program that never imports hpcdist.

torch calls ``autoload`` at the end of ``import torch`` (entry-point group ``torch.backends``), in every program of an
environment that has hpcdist installed. So this module imports only the standard library and starts nothing: it
registers the name, and hpcdist itself is imported when a program asks torch for that backend.
TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from calling it.

It is installed as a module of its own, ``hpcdist_autoload``, because importing a module of ``hpcdist`` imports all
of it once torch is there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

NAME = "hpcdist"
STOCK: list[Callable[..., Any]] = []  # torch's own rendezvous and helper, which ours replace and call


def autoload() -> None:
    """Register the backend "hpcdist" with torch.distributed, once a process."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, NAME.upper()):
        return
    is_built_for = {"cuda": torch.backends.cuda.is_built(), "xpu": bool(getattr(torch.version, "xpu", None))}
    devices = ["cpu", *filter(is_built_for.get, is_built_for)]
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=devices)
    c10d: Any = dist.distributed_c10d
    STOCK.extend((c10d.rendezvous, c10d._new_process_group_helper))
    c10d.rendezvous, c10d._new_process_group_helper = rendezvous, helper
    shown: Any = dist  # c10d's own name would send torch to a ProcessGroupMPI that it does not have
    shown.is_mpi_available = is_mpi_available
    # torch.compile takes the result as a constant; ``torch.compiler.assume_constant_result`` would import the compiler
    shown.is_mpi_available._dynamo_marked_constant = True


def create(options: Any, pg_options: Any) -> Any:
    """Create the group that torch asks for (see ``hpcdist.c10d.torch_init.create``)."""
    from hpcdist.c10d import torch_init  # and with hpcdist.c10d all public names

    return torch_init.create(options, pg_options)


def rendezvous(url: Any, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[Any]:
    """Find the other processes as torch does, but let a group of hpcdist start under MPI without MASTER_ADDR.

    torch does not pass the backend's name to a rendezvous: it is read where torch calls this. An address that a script
    exports is then not used. If the name is not there, the store is only created when it is first used: hpcdist never
    uses it under MPI, and any other backend then gets torch's own error about the missing address.
    """
    is_by_environment = str(url).startswith("env:")
    if is_by_environment and asks_for_mpi(sys._getframe(1).f_locals.get("backend")):
        from hpcdist.c10d import torch_init  # noqa: F401  # registers hpcdist with torch
        from hpcdist.torch_bridge import registration

        return registration.by_launcher(url, rank=rank, world_size=world_size, is_ours=True, **kwargs)
    if is_by_environment and "MASTER_ADDR" not in os.environ and is_unasked():
        from hpcdist.torch_bridge import mirror

        mirror.LATE_STORE.is_reserved = True
    return STOCK[0](url, rank, world_size, **kwargs)


def is_mpi_available() -> bool:
    """Tell, for a script that chooses by it, whether backend "mpi" works: an MPI launcher started several ranks.

    torch's wheels have no MPI of their own. False too if the variables show that this MPI cannot connect the launcher's
    ranks: the script then takes what it would have taken without hpcdist.
    """
    is_unasked()  # before the import
    from hpcdist.c10d import names
    from hpcdist.launch import environment

    launch = environment.detect()
    if launch is None or launch.size == 1:
        return False
    return names.is_mpi_available() and names.may_connect(launch)


def asks_for_mpi(backend: Any) -> bool:
    """Tell whether a backend's name, or pairs of devices and names, has one that hpcdist carries."""
    return not {"mpi", NAME}.isdisjoint(pair.rpartition(":")[2] for pair in str(backend).split(","))


def helper(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a group as torch does, after importing hpcdist if the group asks for MPI, which torch's wheels lack."""
    if "hpcdist.c10d.torch_init" not in sys.modules and asks_for_mpi(backend):
        import torch.distributed as dist

        from hpcdist.c10d import torch_init  # noqa: F401  # puts another in this function's place

        c10d: Any = dist.distributed_c10d
        return c10d._new_process_group_helper(size, rank, ranks, backend, *args, **kwargs)
    return STOCK[1](size, rank, ranks, backend, *args, **kwargs)


@cache
def is_unasked() -> bool:
    """Tell whether the program had not imported hpcdist when this was first called."""
    return NAME not in sys.modules
