"""Questions and reports of up to 16,384 ranks: the watchdog's own code on a network of this process, with its own time.

Datagrams are lost, a node is dead, and one is slow. What each rank sends and receives is counted. The figures of
docs/explanation/scaling.md are those that this prints with HPCDIST_TEST_LARGE=1 and ``pytest -s``.
"""

from __future__ import annotations

import heapq
import os
import random
import socket
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from hpcdist.core.ranks import runs_of
from hpcdist.watch import channel as module
from hpcdist.watch.channel import Channel
from hpcdist.watch.endpoint import Endpoints
from hpcdist.watch.liveness import Liveness
from hpcdist.watch.question import FAN, expand, merge
from hpcdist.watch.report import LINES, Collective, Report, compose, judge_of

LATENCY = 50e-6  # seconds that a datagram takes
WORK = 100e-6  # seconds that a rank takes for one that has come
SLOW_WORK = 20e-3  # the same on the slow node
ROOM = 256  # datagrams that a socket holds
LOST = 0.01  # part of the datagrams that are lost
NODE = 64  # ranks of one
NUMBER = 7  # of the call that the ranks wait in


class Network:
    """A network of sockets, whose time goes on while somebody waits in ``readable``."""

    def __init__(self, seed: int = 1) -> None:
        self.now = 0.0
        self.sockets: dict[int, Socket] = {}
        self.made: list[Socket] = []
        self.burst = 0  # the most datagrams that a socket sends at one moment
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order, self._random = count(), random.Random(seed)

    def at(self, when: float, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def send(self, data: bytes, source: int, target: int) -> None:
        receiver = self.sockets.get(target)
        if receiver is not None and self._random.random() >= LOST:
            self.at(self.now + LATENCY, lambda: receiver.deliver(data, source))

    def readable(self, sources: Iterable[Any], seconds: float) -> list[Any]:
        sources, end = list(sources), self.now + max(0.0, seconds)
        while not (ready := [each for each in sources if each.waiting]):
            if not self._events or self._events[0][0] > end:
                self.now = end
                return []
            self.now, _, event = heapq.heappop(self._events)
            event()
        return ready


class Socket:
    """One of its sockets."""

    def __init__(self, network: Network) -> None:
        self.network, self.port = network, len(network.made) + 1
        network.sockets[self.port] = self
        network.made.append(self)
        self.waiting: deque[tuple[bytes, Any]] = deque()
        self.arrived: Callable[[], object] = lambda: None
        self.sent: Counter[int] = Counter()  # datagrams by the second
        self.received: Counter[int] = Counter()
        self.burst_began, self.burst = -1.0, 0

    def deliver(self, data: bytes, source: int) -> None:
        self.received[int(self.network.now)] += 1
        if len(self.waiting) < ROOM:
            self.waiting.append((data, ("", source)))
            self.arrived()

    def sendto(self, data: bytes, target: tuple[str, int]) -> None:
        assert len(data) <= 65_000
        self.sent[int(self.network.now)] += 1
        self.burst_began, self.burst = (
            (self.network.now, 0) if self.network.now > self.burst_began else (self.burst_began, self.burst)
        )
        self.burst += 1
        self.network.burst = max(self.network.burst, self.burst)
        self.network.send(data, self.port, target[1])

    def recvfrom(self, most: int) -> tuple[bytes, Any]:
        if not self.waiting:
            raise BlockingIOError
        return self.waiting.popleft()

    def getsockname(self) -> tuple[str, int]:
        return "", self.port

    def bind(self, _: object) -> None: ...

    def setblocking(self, _: object) -> None: ...


class Rank:
    """One rank, which answers in a thread of its own."""

    def __init__(self, network: Network, rank: int, work: float) -> None:
        self.network, self.work = network, work
        self.channel = Channel(rank)
        host = f"n{rank // NODE}"
        self.channel.own = self.channel.own._replace(
            addresses=(host,), pid=rank, machine=host, node_key=host, host=host
        )
        self.is_busy = self.is_dead = False
        self.due = 0.0
        self.channel.socket.arrived = self.wake  # type: ignore[attr-defined]

    def wake(self) -> None:
        if not self.is_busy and not self.is_dead:
            self.is_busy = True
            self.network.at(self.network.now + self.work, self.serve)

    def serve(self) -> None:
        """Take in one datagram, and go on with the questions that are relayed."""
        own, self.is_busy = self.channel.socket, False
        if self.is_dead:
            return
        rest, own.waiting = own.waiting, deque()  # type: ignore[attr-defined]
        if rest:
            own.waiting.append(rest.popleft())  # type: ignore[attr-defined]
        self.channel.answer()
        own.waiting.extend(rest)  # type: ignore[attr-defined]
        due = self.channel.push()
        if due != self.due and due < 1e9:
            self.due = due
            self.network.at(due, self.wake)
        if rest:
            self.wake()


class Job:
    """Ranks on a network, all of which know each other."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.network = Network()
        made = {"socket": lambda *_: Socket(self.network), "create_server": lambda *_, **__: Socket(self.network)}
        monkeypatch.setattr(module, "socket", SimpleNamespace(**{**vars(socket), **made}))
        monkeypatch.setattr(module, "wait_readable", self.network.readable)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.network.now))
        self.dead_node, self.slow_node = size // NODE - 1, size // NODE // 2
        self.ranks = [
            Rank(self.network, rank, SLOW_WORK if rank // NODE == self.slow_node else WORK) for rank in range(size)
        ]
        endpoints = {rank: each.channel.own for rank, each in enumerate(self.ranks)}
        first = self.ranks[0].channel
        first.learn(endpoints, endpoints.values())
        for rank, each in enumerate(self.ranks):
            each.channel.endpoints, each.channel.numbering = first.endpoints, first.numbering
            peers = range(rank // NODE * NODE, min(size, rank // NODE * NODE + NODE))
            each.channel.node_peers = {peer: endpoints[peer] for peer in peers}
            Liveness(each.channel)
        for each in self.ranks[self.dead_node * NODE : self.dead_node * NODE + NODE]:
            each.is_dead = True

    def most(self, which: str) -> int:
        """Return the most datagrams that a rank sends or receives within a second."""
        return max(max(getattr(each, which).values(), default=0) for each in self.network.made)

    def answer_where(self, late: set[int]) -> list[int]:
        """Have all ranks answer where they are; some of them are outside the call. Returns who gets the report."""
        told: list[int] = []

        def where(rank: int) -> dict[str, Any]:
            call = {
                "group": "g",
                "label": "group 'g'",
                "name": "all_reduce",
                "dtype": "float32",
                "where": "train.py:7",
                "state": "running",
                "message": False,
                "background": False,
                "has_asker": True,
                "number": NUMBER,
                "peer": None,
                "root": None,
                "shape": [4],
                "seconds": 60 + rank % 2,
            }
            is_late = rank in late
            calls = [] if is_late else [call]
            return {"entered": NUMBER - is_late, "calls": calls, "main": "io.py:3", "leaving": False, "halted": []}

        for rank, each in enumerate(self.ranks):
            each.channel.register("where", lambda _, rank=rank: where(rank))
            each.channel.register("report", lambda _, rank=rank: told.append(rank) or {})
        return told


def report(job: Job) -> tuple[list[str], float, list[int], list[int]]:
    """Have rank 0 ask, and send its report; return the lines, the seconds, who has answered, and who got the report."""
    size, asker = len(job.ranks), job.ranks[0].channel
    told = job.answer_where({size // 3, size // 3 + 2})
    others, began = list(range(1, size)), job.network.now
    answers = asker.ask(others, "where", 1.0, group="g", about=["g", NUMBER, "all_reduce"], dump=True)
    call = job.ranks[0].channel._handlers["where"]({})["calls"][0]  # type: ignore[index]
    liveness = Liveness(asker)
    lines = compose(call, 0, range(size), answers, judge_of(liveness, answers))
    made = Report(Collective("g", NUMBER, "all_reduce"), 0, "all_reduce #7", lines, True, True)
    asker.ask(made.receivers(answers), "report", 0.5, report=made)
    return lines, job.network.now - began, sorted(answers), told


@pytest.mark.parametrize("size", [128, 1024, *([16_384] if os.environ.get("HPCDIST_TEST_LARGE") else [])])
def test_a_report_is_there_within_seconds_and_no_rank_sends_much(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(size, monkeypatch)
    lines, seconds, answered, told = report(job)
    living = {each for each in range(size) if each // NODE != job.dead_node}
    assert set(answered) == living - {0}
    assert living - {0, size // 3, size // 3 + 2} <= set(told)
    assert seconds < 10
    assert len(lines) < LINES
    assert lines[0].startswith(f"ranks {size // 3}, {size // 3 + 2} have not entered all_reduce #7")
    sent, received = job.most("sent"), job.most("received")
    print(f"{size} ranks: {seconds:.1f} s; a rank sends {sent} datagrams a second at most and receives {received}")
    print(*lines, sep="\n")
    assert received <= 6 * FAN
    assert sent <= 6 * FAN + 4 * NODE  # one rank asks those of the dead node again and again
    assert job.network.burst <= 2 * FAN  # for two questions


def test_who_counts_the_ranks_otherwise_relays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a job shrinks: such a relay would ask other processes in the ranks' names."""
    job = Job(128, monkeypatch)
    relay = job.ranks[1].channel
    relay.numbering, relay.endpoints = "other", Endpoints(dict.fromkeys(relay.endpoints, relay.own))
    for rank, each in enumerate(job.ranks):
        each.channel.register("which", lambda _, rank=rank: {"rank": rank})
    answers = job.ranks[0].channel.ask(range(1, 64), "which", 1.0)
    assert {rank: answer["rank"] for rank, answer in answers.items()} == {rank: rank for rank in range(1, 64)}


def test_the_table_of_all_ranks_keeps_a_few_bytes_for_each() -> None:
    ranks, own = 4096, Channel(0).own
    endpoints = {
        rank: own._replace(port=rank, key=f"{rank:064x}", pid=rank, birth=str(rank or ""), host=f"n{rank // NODE}")
        for rank in range(ranks)
    }
    tracemalloc.start()
    table = Endpoints(endpoints)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 80 * ranks
    assert dict(table) == endpoints
    assert table.of_processes({endpoints[7].process, (own.machine, ranks)}) == {7}
    assert table.get(ranks) is None
    some = Endpoints({rank: endpoints[rank] for rank in (9, 3)})
    assert list(some.items()) == [(3, endpoints[3]), (9, endpoints[9])]


def test_ranks_are_given_as_runs_and_equal_answers_once() -> None:
    ranks = [0, 1, 2, 5, 7, 8]
    assert runs_of(ranks) == [[0, 2], [5, 5], [7, 8]]
    assert expand(runs_of(ranks)) == ranks
    answers = {rank: {"at": rank % 2, "text": "x" * 30_000} for rank in ranks}
    several = merge(answers)
    assert [len(each["answers"]) for each in several] == [1, 1]  # too long for one datagram
    assert {tuple(expand(runs)) for each in several for _, runs in each["answers"]} == {(0, 2, 8), (1, 5, 7)}
