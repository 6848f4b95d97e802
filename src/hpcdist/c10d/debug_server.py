"""``torch.distributed.debug.start_debug_server`` under mpirun and srun.

torch's server finds its ranks by a store and by variables that torchrun sets. Without them the default group provides
both: rank 0 opens a store of torch's, and the variables are set while the server starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch.distributed as c10d

from hpcdist.core.world import WORLD
from hpcdist.launch import environment, rendezvous
from hpcdist.torch_bridge.features import has
from hpcdist.torch_bridge.replaced import replace

CALL = "start_debug_server"
STORES: list[Any] = []  # on rank 0; kept, because their servers end with them


def open_store() -> int:
    """Open a store of torch's and return its port."""
    server: Any = c10d.TCPStore  # type: ignore[attr-defined]  # missing from torch's stub
    STORES.append(server("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    return int(STORES[-1].port)


@contextmanager
def torchruns_variables() -> Iterator[None]:
    """Set the variables of torchrun, for a store that rank 0 opens; every rank of the default group calls this."""
    if (group := WORLD.default) is None:
        raise ValueError(
            f"{CALL}: MASTER_ADDR and MASTER_PORT are not set; call init_process_group before, or set them"
        )
    with group.during(CALL):
        host, port = rendezvous.opened_by_rank_0(group.any_backend(), CALL, open_store)
    given = {"RANK": group.rank(), "WORLD_SIZE": group.size(), "MASTER_ADDR": host, "MASTER_PORT": port}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update({name: str(value) for name, value in given.items()})
    try:
        yield
    finally:
        for name in given:
            os.environ.pop(name, None)  # the code inside may have removed it
        os.environ.update({name: value for name, value in before.items() if value is not None})


def start_debug_server(stock: Any, *args: Any, **kwargs: Any) -> None:
    """Start torch's server, also without torchrun."""
    launch = environment.detect()
    is_mpi = WORLD.default is not None and launch is not None and launch.starts_mpi  # no server answers at the address
    has_all = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"} <= os.environ.keys() and not is_mpi
    with nullcontext() if has_all else torchruns_variables():
        stock(*args, **kwargs)


if has("`torch.distributed.debug`"):
    replace(CALL, start_debug_server, import_module("torch.distributed.debug"))
