"""Connection: one greeted connection of a client to a server, with a limit on every read and write.

So a stopped server costs a client at most its timeout. After an answer that did not come in time the connection
is out of step; the caller that gets the TimeoutError closes it.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable

from torch.distributed import DistNetworkError

from hpcdist_stores.errors import ServerClosedError, connect_timeout
from hpcdist_stores.integers import U64
from hpcdist_stores.tcp import wire

CHUNK = 64 * 1024
FEW = 4 * 1024  # for most answers; a buffer of 64 KiB costs 3 µs more
FIRST_PAUSE_S, LAST_PAUSE_S = 0.005, 0.25
LONGEST_LIMIT_S = 2e6  # 23 days; Python cuts milliseconds to 31 bits

_u64 = U64.unpack_from


class Connection:
    """Sends requests and reads replies."""

    __slots__ = ("at", "is_ours", "limit", "recv", "rest", "send", "sock")

    def __init__(self, sock: socket.socket, limit: float | None) -> None:
        self.sock = sock
        self.send = sock.sendall
        self.recv = sock.recv
        self.rest, self.at = b"", 0  # the last data, and how far it was read: several answers may come together
        self.is_ours = False
        self.set_limit(limit)

    def set_limit(self, limit: float | None) -> None:
        """Set the limit of one read or write; None for no limit."""
        self.limit = limit
        self.sock.settimeout(None if limit is None else min(limit, LONGEST_LIMIT_S))

    def exchange(self, frame: bytes, size: int) -> bytes:
        self.send(frame)
        return self.read(size)

    def read(self, size: int) -> bytes:
        """Return exactly ``size`` bytes."""
        begin, end = self.at, self.at + size
        if end > len(self.rest):
            self._receive(size)
            begin, end = 0, size
        self.at = end
        return self.rest[begin:end]

    def _receive(self, size: int) -> None:
        """Receive until there are ``size`` bytes."""
        data = self.rest[self.at :] or self.recv(FEW)
        if (left := size - len(data)) > 0:
            parts = [data]
            while left > 0:
                # the buffer grows with the data: an announced length costs nothing
                parts.append(self.recv(min(max(left, CHUNK), 1 << 20)))
                if not parts[-1]:
                    raise ServerClosedError("the server closed the connection")
                left -= len(parts[-1])
            data = b"".join(parts)
        self.rest = data

    def read_value(self) -> bytes:
        return self.read(_u64(self.read(8))[0])

    def read_values(self, count: int) -> list[bytes]:
        values, self.at = wire.cut_strings(self.rest, self.at, len(self.rest), count)
        while len(values) < count:
            values.append(self.read_value())  # receives more
            more, self.at = wire.cut_strings(self.rest, self.at, len(self.rest), count - len(values))
            values += more
        return values

    def close(self) -> None:
        self.sock.close()


def connect(host: str, port: int, secret: bytes | None, seconds: float, is_worth_it: Callable[[], bool]) -> Connection:
    """Open a connection, trying again for so many seconds (negative: for ever) as long as ``is_worth_it`` says so."""
    deadline = None if seconds < 0 else time.monotonic() + max(seconds, 0.05)
    pause = FIRST_PAUSE_S
    tries = 0
    while True:
        tries += 1
        left = None if deadline is None else max(deadline - time.monotonic(), 0.01)
        try:
            return open_connection(host, port, secret, left)
        except OSError as error:
            now = time.monotonic()
            pause = min(pause * 2, LAST_PAUSE_S) * random.uniform(0.6, 1.0)
            if not is_worth_it() or (deadline is not None and now >= deadline):
                raise connect_timeout(f"{host}:{port}", seconds, tries, error) from error
        time.sleep(pause if deadline is None else min(pause, deadline - now))


def open_connection(host: str, port: int, secret: bytes | None, limit: float | None) -> Connection:
    """Connect and greet, with one try; the limit is that of connecting and of each read or write (None: for ever)."""
    connection = Connection(socket.create_connection((host, port), limit), limit)
    try:
        with contextlib.suppress(OSError):
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        reply = connection.exchange(wire.HELLO, 4)
        if reply == wire.GREETING_SECRET:
            _prove(connection, secret, f"{host}:{port}")
        elif secret is not None:
            raise DistNetworkError(
                f"{host}:{port} asks for no secret, but secret= was given: another server has this address"
            )
        elif reply not in (wire.GREETING, wire.GREETING_OPEN):
            raise ConnectionError(f"the answer to the greeting was {reply!r}: another service has this port")
        connection.is_ours = reply != wire.GREETING
        return connection
    except BaseException:
        connection.close()
        raise


def _prove(connection: Connection, secret: bytes | None, where: str) -> None:
    if secret is None:
        raise DistNetworkError(f"{where} asks for the job's secret: pass secret= to TCPStore")
    theirs = connection.read(wire.NONCE_SIZE)
    ours = os.urandom(wire.NONCE_SIZE)
    connection.send(ours + wire.proof(secret, b"client", theirs, ours))
    try:
        answer = connection.read(wire.PROOF_SIZE)
    except ConnectionError as error:
        raise DistNetworkError(f"{where} does not accept this secret") from error
    if not wire.is_proof(answer, wire.proof(secret, b"server", theirs, ours)):
        raise DistNetworkError(f"{where} does not know the secret: another server has this address")
