"""torch.distributed on gloo beside hpcdist on the same ranks."""

from datetime import timedelta

import pytest
import torch.distributed as td

import hpcdist as dist


@pytest.fixture(scope="package", autouse=True)
def world():
    from hpcdist.backends.mpi.process import runtime

    world = runtime.world()
    rank, size = world.Get_rank(), world.Get_size()
    limit = timedelta(seconds=60)
    store = td.TCPStore("127.0.0.1", 0, size, True, limit, wait_for_workers=False) if rank == 0 else None
    port = world.bcast(store.port if rank == 0 else None, 0)
    if rank:
        store = td.TCPStore("127.0.0.1", port, size, False, limit, wait_for_workers=False)
    td.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    dist.init_process_group()
    yield dist.group.WORLD
    dist.destroy_process_group()
    td.destroy_process_group()
