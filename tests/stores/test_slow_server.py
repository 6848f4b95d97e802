"""Calls with a deadline on a server that answers late, not at all, or is gone."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import hpcdist_stores as stores
from tests.stores import store_workers
from tests.stores.deadlines import ends_at
from tests.stores.slow_proxy import SlowProxy


@pytest.fixture(params=["ours", "torch's libuv", "torch's legacy"])
def server(request, owner):
    """A server process: its port, and its pid."""
    if request.param == "ours":
        return owner(store_workers.own_server)[1]
    process, port = owner(store_workers.own_server_of_torch, "libuv" in request.param)
    return port, process.pid


@pytest.fixture
def proxy(server):
    proxy = SlowProxy(server[0])
    yield proxy
    proxy.close()


@pytest.mark.parametrize("seconds", [0.001, 0.1])
def test_a_deadline_that_is_over_is_a_wait_timeout(proxy, seconds):
    store = stores.TCPStore("127.0.0.1", proxy.port, None, False, timedelta(seconds=30))
    store.set("there", "1")
    assert store.get("there") == b"1"
    limit = timedelta(seconds=seconds)
    for most in (0.0, 0.15):  # the second: later than the 50 ms that a first answer has at least
        proxy.hold(most)
        for call, pattern in (
            (lambda: store.wait(["missing"], limit), "wait timeout .*missing"),
            (lambda: store.wait(["missing", "too"], limit), "wait timeout .*missing"),
            (lambda: store.barrier("b", 1000, limit), "barrier timeout .*key: b"),
        ):
            with pytest.raises(dist.DistStoreError, match=pattern):
                call()
        store.set_timeout(limit)
        for call in (lambda: store.get("missing"), lambda: store.multi_get(["missing", "too"])):
            with pytest.raises(dist.DistStoreError, match=r"wait timeout .*missing"):
                call()
        store.set_timeout(timedelta(seconds=30))
    assert store.get("there") == b"1", "slow is not gone"
    proxy.hold(0.0)
    assert store.add("n", 1) == 1, "no late answer is taken for this one"


def test_answers_that_come_around_the_deadline(proxy):
    store = stores.TCPStore("127.0.0.1", proxy.port, None, False, timedelta(seconds=30))
    proxy.hold(0.12, least=0.0)
    for i in range(25):
        with pytest.raises(dist.DistStoreError, match=r"wait timeout"):
            store.wait(["missing"], timedelta(seconds=0.06))
        assert store.add("n", 1) == i + 1


def test_a_server_that_was_killed_is_not_a_timeout(server):
    port, pid = server
    store = stores.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=15))
    store.set("k", "1")
    assert store.get("k") == b"1"
    os.kill(pid, signal.SIGKILL)
    for _ in range(3):  # the first call finds the old connection closed, the others none
        with pytest.raises(dist.DistNetworkError, match=f"lost the connection to 127.0.0.1:{port} in get") as caught:
            store.get("k")
        assert "timed out" not in str(caught.value)
    assert "refused" in str(caught.value)


def stop(pid):
    """Stop a process, and wait until all its threads have stopped."""
    os.kill(pid, signal.SIGSTOP)
    while any(b") T " not in task.joinpath("stat").read_bytes() for task in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.001)


@pytest.mark.parametrize("seconds", [0.3, 1.1])
def test_a_stopped_server_costs_the_timeout_and_no_more(server, seconds):
    port, pid = server
    store = stores.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    store.set("k", "1")
    assert store.get("k") == b"1"
    store.set_timeout(timedelta(seconds=seconds))
    stop(pid)
    try:
        for call in (lambda: store.get("k"), lambda: store.wait(["k"])):
            ends_at(seconds, call, dist.DistStoreError, r"wait timeout .*k.*is the server stopped")
        # a call without a deadline of its own has at least a second
        ends_at(max(seconds, 1.0), lambda: store.add("n", 1), dist.DistNetworkError, r"no answer .*add to /n")
    finally:
        os.kill(pid, signal.SIGCONT)
    store.set_timeout(timedelta(seconds=60))
    assert store.get("k") == b"1", "the connection that fell out of step was replaced"


def test_a_server_stopped_in_the_middle_of_a_wait(server):
    port, pid = server
    store = stores.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    store.wait_until([], 60.0)

    def wait_while_it_stops():
        timer = threading.Timer(0.2, stop, (pid,))
        timer.start()
        try:
            store.wait(["x"], timedelta(seconds=1))
        finally:
            timer.join()
            os.kill(pid, signal.SIGCONT)
            assert store.check([]), "it is awake before the next round"

    ends_at(1.0, wait_while_it_stops, dist.DistStoreError, r"wait timeout .*/x")


def test_torchs_legacy_server_has_no_queues(torchs_server):
    port = torchs_server(use_libuv=False)
    ours = stores.TCPStore("127.0.0.1", port, use_libuv=False)
    torchs = dist.TCPStore("127.0.0.1", port, None, False, use_libuv=False)
    for store in (ours, torchs, ours.clone()):
        for call in (
            lambda store=store: store.queue_push("q", "1"),
            lambda store=store: store.queue_pop("q"),
            lambda store=store: store.queue_pop("q", False),
            lambda store=store: store.queue_len("q"),
        ):
            with pytest.raises(NotImplementedError):
                call()
        store.set("k", "1")
        assert store.get("k") == b"1"
