"""How does a client hold one connection to a server, within deadlines?

Every read and write has a limit, so that a stopped server costs a client its timeout and no more. An
answer that did not come in time leaves the connection out of step; whoever sees that closes it.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable

from stores.errors import DistNetworkError, connect_timeout
from stores.tcp_wire import (
    GREETING,
    GREETING_OPEN,
    GREETING_SECRET,
    HELLO,
    NONCE_SIZE,
    PROOF_SIZE,
    U64,
    is_proof,
    proof,
)

CHUNK = 64 * 1024
FIRST_PAUSE_S, LAST_PAUSE_S = 0.005, 0.25

_u64 = U64.unpack_from


class Link:
    """Holds one greeted connection."""

    __slots__ = ("is_ours", "limit", "recv", "send", "sock")

    def __init__(self, sock: socket.socket, limit: float | None) -> None:
        self.sock = sock
        self.send = sock.sendall
        self.recv = sock.recv
        self.limit = limit
        self.is_ours = False
        sock.settimeout(limit)

    def set_limit(self, limit: float | None) -> None:
        """Set how long one read or write may take; None is for ever."""
        self.limit = limit
        self.sock.settimeout(limit)

    def read(self, size: int, data: bytes = b"") -> bytes:
        """Return exactly so many bytes, the given ones included."""
        if size - len(data) > CHUNK:
            return self._read_large(size, data)
        while len(data) < size:
            more = self.recv(size - len(data))
            if not more:
                raise ConnectionResetError("the server closed the connection")
            data += more
        return data

    def _read_large(self, size: int, data: bytes) -> bytes:
        # grows with what comes: a length that was only announced costs nothing
        parts = [data]
        left = size - len(data)
        while left:
            more = self.recv(min(left, 1 << 20))
            if not more:
                raise ConnectionResetError("the server closed the connection")
            parts.append(more)
            left -= len(more)
        return b"".join(parts)

    def read_value(self, data: bytes = b"") -> bytes:
        """Return one string; the given bytes are its beginning."""
        if len(data) < 8:
            data += self.recv(CHUNK) if not data else b""
            data = self.read(8, data)
        size = _u64(data)[0] + 8
        return self.read(size, data)[8:]

    def read_values(self, count: int, data: bytes = b"") -> list[bytes]:
        """Return so many strings; the given bytes are their beginning."""
        values: list[bytes] = []
        add = values.append
        pos = 0
        end = len(data)
        while len(values) < count:
            start = stop = pos + 8
            if start <= end:
                stop += _u64(data, pos)[0]
                if stop <= end:
                    add(data[start:stop])
                    pos = stop
                    continue
            data = data[pos:]
            if stop - pos > CHUNK:
                data = self.read(stop - pos, data)
            else:
                more = self.recv(CHUNK)
                if not more:
                    raise ConnectionResetError("the server closed the connection")
                data += more
            pos, end = 0, len(data)
        return values

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()


def connect(
    host: str,
    port: int,
    secret: bytes | None,
    seconds: float,
    limit: float | None,
    *,
    is_worth_it: Callable[[], bool] = lambda: True,
) -> Link:
    """Connect and greet, trying again until the time is over.

    Args:
        host: Name or address of the server.
        port: Its port.
        secret: The job's secret, or None.
        seconds: How long to try; negative: for ever.
        limit: How long each later read or write may take.
        is_worth_it: Asked after each failure: whether to try again.

    Returns:
        The connection.

    Raises:
        DistNetworkError: When no server answered in time, or secrets do not match.
    """
    deadline = None if seconds < 0 else time.monotonic() + max(seconds, 0.05)
    pause = FIRST_PAUSE_S
    tries = 0
    while True:
        tries += 1
        left = None if deadline is None else max(deadline - time.monotonic(), 0.01)
        try:
            return _try(host, port, secret, left, limit)
        except OSError as error:
            now = time.monotonic()
            pause = min(pause * 2, LAST_PAUSE_S) * random.uniform(0.6, 1.0)
            if not is_worth_it() or (deadline is not None and now + pause >= deadline):
                raise connect_timeout(f"{host}:{port}", seconds, tries, error) from error
        time.sleep(pause)


def _try(host: str, port: int, secret: bytes | None, left: float | None, limit: float | None) -> Link:
    link = Link(_open(host, port, left), left)
    try:
        with contextlib.suppress(OSError):
            link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.send(HELLO)
        reply = link.read(4)
        if reply == GREETING_SECRET:
            _prove(link, secret, f"{host}:{port}")
        elif secret is not None:
            raise DistNetworkError(
                f"{host}:{port} asks for no secret, but secret= was given: another server has this address"
            )
        elif reply not in (GREETING, GREETING_OPEN):
            raise ConnectionError(f"the answer to the greeting was {reply!r}: another service has this port")
        link.is_ours = reply != GREETING
        link.set_limit(limit)
        return link
    except BaseException:
        link.close()
        raise


def _open(host: str, port: int, left: float | None) -> socket.socket:
    if host.replace(".", "").isdigit():  # a plain IPv4 address: no name service, no list
        sock = socket.socket()
        try:
            sock.settimeout(left)
            sock.connect((host, port))
            return sock
        except BaseException:
            sock.close()
            raise
    return socket.create_connection((host, port), left)


def _prove(link: Link, secret: bytes | None, where: str) -> None:
    if secret is None:
        raise DistNetworkError(f"{where} asks for the job's secret: pass secret= to TCPStore")
    theirs = link.read(NONCE_SIZE)
    ours = os.urandom(NONCE_SIZE)
    link.send(ours + proof(secret, b"client", theirs, ours))
    try:
        answer = link.read(PROOF_SIZE)
    except ConnectionError as error:
        raise DistNetworkError(f"{where} does not accept this secret") from error
    if not is_proof(answer, proof(secret, b"server", theirs, ours)):
        raise DistNetworkError(f"{where} does not know the secret: another server has this address")
