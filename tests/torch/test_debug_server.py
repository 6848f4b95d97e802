"""torch's debug server starts without torchrun's variables."""

import os
import time
import urllib.request

import pytest
import torch
import torch.distributed as torch_dist

import hpcdist as dist
from hpcdist.c10d import debug_server
from tests.ports import free_port

_store = pytest.importorskip("torch.distributed.debug._store", reason="torch has this server since 2.10")
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def without_torchruns_variables(world, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("without_torchruns_variables")
def test_its_ranks_find_each_other_by_a_store_of_torchs(rank, size):
    with debug_server.torchruns_variables():
        assert (_store.get_rank(), _store.get_world_size()) == (rank, size)
        store = _store.tcpstore_client()
        assert isinstance(store.underlying_store, torch_dist.TCPStore)
        store.set(f"rank{rank}", str(rank))
        assert [store.get(f"rank{r}") for r in range(size)] == [str(r).encode() for r in range(size)]
    assert not any(name in os.environ for name in VARIABLES)
    dist.barrier()


@pytest.mark.usefixtures("without_torchruns_variables")
def test_a_store_that_rank_0_cannot_open_is_an_error_on_all_ranks(monkeypatch):
    def fail():
        raise OSError("no ports left")

    monkeypatch.setattr(debug_server, "open_store", fail)
    with (
        pytest.raises(dist.DistBackendError, match=r"start_debug_server failed on rank 0 .*no ports left"),
        debug_server.torchruns_variables(),
    ):
        pass
    dist.barrier()


def page(port, seconds=20):
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/stacks", timeout=seconds) as answer:
                return answer.read().decode()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@pytest.mark.usefixtures("without_torchruns_variables")
def test_its_page_shows_every_rank(rank, size):
    pytest.importorskip("aiohttp", reason="torch's debug server needs aiohttp")
    for module in ("jinja2", "tabulate"):
        pytest.importorskip(module, reason=f"torch's debug server needs {module}")
    port = [free_port()]
    dist.broadcast_object_list(port)
    torch.distributed.debug.start_debug_server(port[0])
    try:
        if rank == 0:
            text = page(port[0])
            assert all(f"Rank {r}" in text for r in range(size))
        dist.barrier()
    finally:
        if rank == 0:
            torch.distributed.debug.stop_debug_server()
