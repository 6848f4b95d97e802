"""Threads that share a TCPStore: requests sent together, in order, each with its own answer, error and limit."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import hpcdist_stores as stores
from hpcdist_stores.tcp.connection import Connection
from hpcdist_stores.tcp.session import _Request
from tests.stores.test_slow_server import stop
from tests.stores.test_tcp_store import interruptible  # noqa: F401 - a fixture

LONG_S = 60


@pytest.fixture
def store():
    return stores.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=LONG_S))


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as pool:
        yield pool


@contextmanager
def stopped(store):
    """Stop the server for the time of the body."""
    pid = store._server.process.pid
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def queue_up(store, pool, *calls):
    """Let a thread each make these calls while the connection is in use; return their futures once all wait for it.

    The connection is free then, and the next call finds them waiting.
    """
    session, futures = store._session, []
    with session.lock:
        for call in calls:
            futures.append(pool.submit(call))
            while len(session.queue) < len(futures) and not any(future.done() for future in futures):
                time.sleep(0.001)
    return futures


def count_sends(store):
    """Return a list to which every send on the store's connection adds its frame."""
    connection, sent = store._session.connection, []
    send = connection.send
    connection.send = lambda frame: (sent.append(frame), send(frame))
    return sent


def test_requests_that_wait_are_sent_together_and_each_gets_its_own_answer(store, pool):
    values = {"empty": b"", "one": b"1", "some": bytes(range(256)) * 40, "many": b"x" * 200_000}
    store.multi_set(list(values), list(values.values()))
    sent = count_sends(store)
    futures = queue_up(
        store,
        pool,
        *[lambda name=name: store.get(name) for name in values],
        lambda: store.set("new", "2"),
        lambda: store.get("new"),
        lambda: store.add("n", 5),
        lambda: store.multi_get(["some", "empty", "one"]),
        lambda: store.check(["missing"]),
        lambda: store.compare_set("one", "1", "3"),
        lambda: store.get("one"),
    )
    assert pool.submit(store.add, "n", 1).result(LONG_S) == 1
    answers = [future.result(LONG_S) for future in futures]
    several = [values["some"], b"", b"1"]
    assert answers == [*values.values(), None, b"2", 6, several, False, b"3", b"3"]
    assert len(sent) == 1


def test_what_was_set_before_is_there_for_other_threads(store, pool):
    """set has no answer: only the order of the requests makes it visible."""
    is_over = threading.Event()
    rounds, told, asked = 300, SimpleQueue(), SimpleQueue()

    def load(name):
        count = 0
        while not is_over.is_set():
            count += 1
            assert store.add(name, 1) == count

    def ask():
        for i in range(rounds):
            key = told.get(timeout=LONG_S)
            assert store.check([key])
            assert store.get(key) == b"%d" % i
            asked.put(i)

    loads = [pool.submit(load, f"count{i}") for i in range(6)]
    asking = pool.submit(ask)
    try:
        for i in range(rounds):
            store.set(f"key{i}", str(i))
            told.put(f"key{i}")
            asked.get(timeout=LONG_S)
    finally:
        is_over.set()
    for future in (*loads, asking):
        future.result(LONG_S)


def test_a_request_that_the_server_refuses_costs_the_others_nothing(store, pool):
    """The server closes the connection then, with what came after it not done."""
    store.set("text", "text")
    for place in range(4):
        calls = [lambda: store.add("n", 1)] * 4
        calls[place] = lambda: store.add("text", 1)
        futures = queue_up(store, pool, *calls)
        leader = pool.submit(store.add, "n", 1)
        errors = [future.exception(LONG_S) for future in futures]
        assert "add to /text" in str(errors.pop(place))
        assert isinstance(futures[place].exception(), stores.DistNetworkError)
        assert errors == [None] * 3
        counts = [leader.result(LONG_S), *(each.result() for each in futures if each.exception() is None)]
        assert sorted(counts) == [4 * place + i for i in (1, 2, 3, 4)], "each was done once"
    futures = queue_up(store, pool, *[lambda: store.add("n", 1)] * 3)
    assert pool.submit(store.add, "text", 1).exception(LONG_S) is not None
    assert sorted(future.result(LONG_S) for future in futures) == [17, 18, 19]


def test_a_stopped_server_costs_each_thread_its_timeout_and_no_more(store, pool):
    seconds = 3.0
    store.set_timeout(timedelta(seconds=seconds))

    def call(i):
        start = time.monotonic()
        with pytest.raises(dist.DistNetworkError, match=f"no answer from {store.where} to add to /n{i} "):
            store.add(f"n{i}", 1)
        return time.monotonic() - start

    for is_together in (False, True):
        with stopped(store):
            if is_together:
                futures = queue_up(store, pool, *[lambda i=i: call(i) for i in range(7)])
                futures.append(pool.submit(call, 7))
            else:
                futures = [pool.submit(call, i) for i in range(8)]
            took = [future.result(LONG_S) for future in futures]
        assert min(took) > 0.9 * seconds, took
        assert max(took) < 1.6 * seconds, took  # twice: once for the connection, once for the answer
        store.set_timeout(timedelta(seconds=LONG_S))
        assert sorted(pool.map(lambda _: store.add("after", 1), range(8))) == [8 * is_together + i for i in range(1, 9)]
        store.set_timeout(timedelta(seconds=seconds))


@pytest.mark.parametrize("leads", ["long", "short"])
def test_limits_of_threads_are_their_own(store, pool, leads):
    with stopped(store):
        long = [lambda: store.add("n", 1)] * 3
        short = [lambda: store.wait(["missing"], timedelta(seconds=1))] * 3
        futures = queue_up(store, pool, *long, *short)
        leader = pool.submit((short if leads == "short" else long)[0])
        for future in futures[3:]:
            with pytest.raises(dist.DistStoreError, match=r"wait timeout .*missing"):
                future.result(LONG_S / 2)
        if leads == "short":
            assert isinstance(leader.exception(LONG_S / 2), dist.DistStoreError)
        assert not any(future.done() for future in futures[:3])
    counts = [future.result(LONG_S) for future in futures[:3]]
    if leads == "long":
        counts.append(leader.result(LONG_S))
    assert sorted(counts) == list(range(1, len(counts) + 1))


def test_a_thread_that_has_waited_long_does_not_shorten_the_time_of_others(store, pool):
    seconds, session = 4.0, store._session
    store.set_timeout(timedelta(seconds=seconds))
    with stopped(store):
        session.lock.acquire()
        late = pool.submit(store.add, "n", 1)
        time.sleep(seconds / 2)  # half of its time, with the connection in use
        early = pool.submit(store.add, "n", 1)
        while len(session.queue) < 2:
            time.sleep(0.001)
        session._hand_on()
        with pytest.raises(dist.DistNetworkError, match=r"no answer .*add to /n"):
            late.result(LONG_S)
    assert early.result(LONG_S) in (1, 2)  # 2 if the server has done the late one all the same


def test_the_connection_goes_to_the_thread_that_has_waited_longest(store, pool):
    session, order, futures = store._session, [], []
    session.lock.acquire()
    for i in range(3):  # each with a limit of its own, so that none is sent with another
        futures.append(pool.submit(session.call, "test", (), i + 1.0, b"", lambda _, i=i: order.append(i)))
        while len(session.queue) <= i:
            time.sleep(0.001)
    session._hand_on()
    for future in futures:
        future.result(LONG_S)
    assert not session.lock.locked()
    assert order == [0, 1, 2]


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_no_request_is_left_in_the_queue_of_a_free_connection(store, is_interrupted):
    session = store._session
    first, late, other = (_Request(b"", Connection.read_value, None) for _ in range(3))
    assert session._wait(first, LONG_S), "released just before it was queued"
    assert first.has_connection

    def hand_on(timeout):
        """Give the connection to a thread just when its time is over, or when it is interrupted."""
        session.queue.append(other)
        session._hand_on()
        if is_interrupted:
            raise KeyboardInterrupt
        return False

    late.turn = SimpleNamespace(acquire=hand_on, release=lambda: None)
    if is_interrupted:
        with pytest.raises(KeyboardInterrupt):
            session._wait(late, 0.0)
    else:
        assert not session._wait(late, 0.0)
        assert late.has_connection, "so it sends its request, or the connection would be in use for ever"
        session._hand_on()
    assert other.turn.acquire(blocking=False)
    assert other.has_connection
    session._hand_on()
    assert not session.lock.locked()


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("waits", [False, True])
def test_an_interrupt_costs_the_other_threads_nothing(store, pool, waits):
    """It reaches the main thread: with the connection, or while it waits for it."""
    session = store._session

    def interrupt():
        while not (session.queue if waits else session.lock.locked()):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    with stopped(store):
        if waits:
            futures = [pool.submit(store.add, "n", 1)]
            while not session.lock.locked():
                time.sleep(0.001)
        else:
            futures = queue_up(store, pool, *[lambda: store.add("n", 1)] * 4)
        interrupting = threading.Thread(target=interrupt)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come before the thread's start has returned
            interrupting.start()
            store.add("main's", 1)
        futures += [pool.submit(store.add, "n", 1) for _ in range(3)]
    counts = [future.result(LONG_S) for future in futures]
    assert sorted(counts) == list(range(1, len(counts) + 1))
    assert not session.queue
    assert not (waits and store.check(["main's"])), "what waited has not been sent"
