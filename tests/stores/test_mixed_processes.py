"""Processes with our stores and torch's work together, on both servers, and under torch's gloo."""

import pytest
import torch.distributed as dist

import hpcdist_stores as stores
from tests.stores import store_workers

WORLD = 4


@pytest.fixture(params=["ours", "torchs"])
def port(request, torchs_server):
    if request.param == "torchs":
        yield torchs_server(use_libuv=True)
    else:
        store = stores.TCPStore("127.0.0.1", 0, None, True)
        yield store.port


def test_counters_compare_set_queues_and_barrier(port, processes):
    stores.TCPStore("127.0.0.1", port).set("cas", "0 -1")
    count = 25
    kinds = [True, False, True, False, True, True]
    results = processes(
        store_workers.tcp_work, *[(port, kind, rank, len(kinds), count) for rank, kind in enumerate(kinds)]
    )
    everything = len(kinds) * count
    assert sorted(total for totals, _ in results for total in totals) == list(range(1, everything + 1))
    popped = [value for _, values in results for value in values]
    assert sorted(popped) == sorted(f"{rank}/{i}".encode() for rank in range(len(kinds)) for i in range(count))
    assert stores.TCPStore("127.0.0.1", port).get("cas").split()[0] == b"%d" % everything


@pytest.mark.parametrize(
    "make",
    [
        store_workers.make_tcp,
        store_workers.make_prefixed_tcp,
        store_workers.make_torch_prefixed_tcp,
        store_workers.make_file,
    ],
)
def test_torchs_gloo_over_a_store(make, tmp_path, processes):
    server = stores.TCPStore("127.0.0.1", 0, None, True)
    place = str(tmp_path / "store") if make is store_workers.make_file else server.port
    results = processes(store_workers.gloo, *[(make, (place,), rank, WORLD) for rank in range(WORLD)])
    for tensor, gathered, objects in results:
        assert tensor == [6.0] * 4
        assert gathered == [0, 1, 2, 3]
        assert objects == [{"rank": rank} for rank in range(WORLD)]


def test_torchs_gloo_over_a_hash_store_of_threads(processes):
    store = dist.PrefixStore("threads", stores.HashStore())  # nothing else refers to the HashStore
    (result,) = processes(store_workers.gloo_alone, (1,))
    assert result == [1.0]
    store.set("k", "1")
    assert store.get("k") == b"1"
