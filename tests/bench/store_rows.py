"""Measurements behind the rows of the store's comparison.

The time of a single call depends on whether client and server share a core, by a factor of several: on one core it is
two context switches, on two cores the wake-up of a sleeping core. The scheduler picks either, so these rows are
measured in both places, with the processes pinned.
"""

from __future__ import annotations

import multiprocessing.pool
import os
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reports each refused connection at length
import torch.distributed as dist

import hpcdist_stores as stores

SOON = timedelta(seconds=60)
NAMES = [f"key{i:04}" for i in range(1000)]
CORES = sorted(os.sched_getaffinity(0))
# where the client and where the server may run
PLACES = {"one core": (CORES[:1], CORES[:1]), "two cores": (CORES[:1], CORES[1:2] or CORES[:1])}


def _own_server(pipe: Any, is_ours: bool) -> None:
    raise_limit()
    store = (stores if is_ours else dist).TCPStore("127.0.0.1", 0, None, True, SOON)
    pipe.send((store.port, store._server.process.pid if is_ours else os.getpid()))
    while (asked := pipe.recv()) != "stop":
        if asked == "spin":
            while not pipe.poll():  # in Python, but for this question
                for _ in range(10_000):
                    pass


def raise_limit() -> None:
    """Allow as many connections as the system does."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Server:
    """Runs one server in a process of its own."""

    def __init__(self, context: Any, is_ours: bool) -> None:
        self.is_ours = is_ours
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_own_server, args=(theirs, is_ours))
        self.process.start()
        self.port, self.pid = self.pipe.recv()

    def pin(self, cores: list[int]) -> None:
        """Let every thread of the server run on these cores alone."""
        for thread in os.listdir(f"/proc/{self.pid}/task"):
            os.sched_setaffinity(int(thread), cores)

    @contextmanager
    def busy_owner(self) -> Iterator[None]:
        """Keep the owner's main thread in pure Python."""
        self.pipe.send("spin")
        try:
            yield
        finally:
            self.pipe.send("rest")

    def stop(self) -> None:
        """End the server."""
        self.pipe.send("stop")
        self.process.join(5)
        self.process.kill()


class Setting(NamedTuple):
    """Which server and whose client are measured, and where other processes come from."""

    server: Server
    is_ours: bool  # the client
    context: Any
    pool: multiprocessing.pool.Pool

    def client(self) -> Any:
        """Connect a client."""
        return _client(self.server.port, self.is_ours)


def _client(port: int, is_ours: bool) -> Any:
    return (stores if is_ours else dist).TCPStore("127.0.0.1", port, None, False, SOON)


def _micros(call: Callable[[], Any], count: int = 2000) -> float:
    for _ in range(count // 10):
        call()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count * 1e6


def placed(name: str, place: str, at: Setting) -> float:
    """Measure a call of the table, or a wake-up, with this thread and the server pinned to the cores of a place."""
    mine, its = PLACES[place]
    os.sched_setaffinity(0, mine)
    at.server.pin(its)
    try:
        return wake_up(at, mine) if name == "wake-up" else call(name, at)
    finally:
        os.sched_setaffinity(0, CORES)
        at.server.pin(CORES)


def multi_set(client: Any) -> None:
    """Set a thousand keys; the get that follows says that the server has taken them."""
    client.multi_set(NAMES, NAMES)
    client.get(NAMES[-1])


# name -> a call on a client, for which there are the key ``key`` and a thousand others, and how often it is made
CALLS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "get": (lambda client: client.get("key"), 2000),
    "add": (lambda client: client.add("count", 1), 2000),
    "check": (lambda client: client.check(["key"]), 2000),
    "compare_set": (lambda client: client.compare_set("key", "y", "z"), 2000),  # which changes nothing
    "set": (lambda client: client.set("key", b"x" * 32), 2000),  # which has no answer
    "multi_get of 1000": (lambda client: client.multi_get(NAMES), 50),
    "multi_set of 1000": (multi_set, 50),
}


def call(name: str, at: Setting) -> float:
    """Return the microseconds of a call of the table."""
    client, (make, count) = at.client(), CALLS[name]
    client.set("key", b"x" * 32)
    multi_set(client)
    result = _micros(lambda: make(client), count)
    client.get("key")  # what was sent has been taken before the next kind is measured
    return result


def _answer(port: int, is_ours: bool, count: int, tag: str, cores: list[int]) -> None:
    os.sched_setaffinity(0, cores)
    client = _client(port, is_ours)
    for i in range(count):
        client.wait([f"{tag}/ask{i}"])
        client.set(f"{tag}/answer{i}", "1")


def wake_up(at: Setting, cores: list[int]) -> float:
    """Let two processes on these cores wake each other in turn; half a round is one wake-up, in microseconds."""
    count, tag = 300, str(time.monotonic_ns())
    other = at.context.Process(target=_answer, args=(at.server.port, at.is_ours, count, tag, cores))
    other.start()
    client = at.client()
    start = 0.0
    for i in range(count):
        if i == count // 10:
            start = time.perf_counter()
        client.set(f"{tag}/ask{i}", "1")
        client.wait([f"{tag}/answer{i}"])
    took = time.perf_counter() - start
    other.join(10)
    return took / (count - count // 10) / 2 * 1e6


def _count_calls(port: int, is_ours: bool, start_at: float, seconds: float) -> int:
    client = _client(port, is_ours)
    time.sleep(max(0.0, start_at - time.time()))
    end = time.perf_counter() + seconds
    count = 0
    while time.perf_counter() < end:
        for _ in range(20):
            client.add("count", 1)
        count += 20
    return count


def rate(at: Setting, processes: int) -> float:
    """Return the calls a second of several processes together."""
    seconds = 0.5
    jobs = [(at.server.port, at.is_ours, time.time() + 0.2, seconds)] * processes
    return sum(at.pool.starmap(_count_calls, jobs, chunksize=1)) / seconds


def threads_rate(at: Setting, threads: int) -> float:
    """Return the calls a second of several threads of one client together."""
    client, seconds, done = at.client(), 0.5, []

    def call() -> None:
        end, count = time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            for _ in range(20):
                client.add("count", 1)
            count += 20
        done.append(count)

    started = [threading.Thread(target=call) for _ in range(threads)]
    for each in started:
        each.start()
    for each in started:
        each.join()
    return sum(done) / seconds


def slow_get(at: Setting) -> float:
    """Return the 99th percentile of a get's milliseconds while the server's owner spins in Python."""
    client = at.client()
    client.set("key", b"x" * 32)
    times = []
    with at.server.busy_owner():
        for _ in range(2000):
            start = time.perf_counter()
            client.get("key")
            times.append(time.perf_counter() - start)
    return statistics.quantiles(times, n=100)[98] * 1e3


def kept_rate(at: Setting) -> float:
    """Return which part of a process's calls a second is left while the server's owner spins in Python."""
    idle = rate(at, 1)
    with at.server.busy_owner():
        return rate(at, 1) / idle


def _connect(port: int, is_ours: bool, start_at: float, count: int) -> float:
    time.sleep(max(0.0, start_at - time.time()))
    clients = [_client(port, is_ours) for _ in range(count)]
    end = time.time()
    del clients
    return end


def bring_up(at: Setting, count: int) -> float:
    """Return the milliseconds until many clients of eight processes are connected that come at once."""
    start = time.time() + 0.2
    ends = at.pool.starmap(_connect, [(at.server.port, at.is_ours, start, count // 8)] * 8, chunksize=1)
    time.sleep(0.1)  # the server takes note of the ends
    return (max(ends) - start) * 1e3
