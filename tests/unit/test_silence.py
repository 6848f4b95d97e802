"""Limits on silent hosts are set on MPI's connections only."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from hpcdist.backends.mpi.process import silence

SETTINGS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    *((socket.IPPROTO_TCP, each) for each in (*silence.KEEP_ALIVE, socket.TCP_USER_TIMEOUT)),
]


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pair(opened: ExitStack, server: socket.socket) -> list[socket.socket]:
    """Return both ends of a connection to a server."""
    client = opened.enter_context(socket.create_connection(server.getsockname()))
    return [client, opened.enter_context(server.accept()[0])]


def settings(connection: socket.socket) -> list[int]:
    return [connection.getsockopt(*each) for each in SETTINGS]


def test_connections_of_other_libraries_stay_as_they_are(opened: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    listen = lambda: opened.enter_context(socket.create_server(("127.0.0.1", 0)))  # noqa: E731
    earlier, servers = listen(), []
    monkeypatch.setattr(silence, "PORTS", set())
    silence.noting_ports(lambda: servers.append(listen()))
    later = listen()
    assert {servers[0].getsockname()[1]} == silence.PORTS
    mpis = pair(opened, servers[0])
    others = [*pair(opened, earlier), *pair(opened, later), opened.enter_context(socket.socket())]
    configured = pair(opened, servers[0])
    for each in configured:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    before = [settings(each) for each in (*others, *configured, *servers, earlier, later)]
    watched: list[silence.Socket] = []
    monkeypatch.setattr(silence, "limit_receivers", watched.extend)
    silence.limit(silence.PORTS)
    assert [settings(each) for each in (*others, *configured, *servers, earlier, later)] == before
    assert all(settings(each)[:4] == [1, 5, 5, 2] for each in mpis)
    for thread in threading.enumerate():
        if thread.name == "hpcdist silence":
            thread.join(10)
    assert sorted(number for number, _ in watched) == sorted(each.fileno() for each in mpis)


def test_a_receivers_limit_is_set_on_a_change_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What MPI itself sets later stays."""
    looks = [(0, 0), (2, 0), (0, 2), (0, 0), (0, 0)]  # retransmissions and probes since the last answer
    limits: list[int] = []

    class Connection(ExitStack):
        def getsockopt(self, level: int, option: int, size: int) -> bytes:
            return bytes([0, 0, *looks.pop(0)])

        def setsockopt(self, level: int, option: int, value: int) -> None:
            assert option == socket.TCP_USER_TIMEOUT
            limits.append(value)

    monkeypatch.setattr(silence, "duplicate", lambda number, inode: Connection())
    monkeypatch.setattr(silence.time, "sleep", lambda seconds: looks[0])  # IndexError after the last one
    with pytest.raises(IndexError):
        silence.limit_receivers([(3, 4)])
    assert limits == [silence.UNANSWERED_MILLISECONDS, 0]
