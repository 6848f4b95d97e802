"""Contents of a server: its keys, its queues, and the clients that wait for them.

Standard library only: the server process imports this file without torch.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable

from hpcdist_stores.tcp.wire import WOKEN


class Refused(Exception):
    """Closes the connection: the protocol has no error reply."""


class Wait:
    """Holds the keys that one WAIT or BARRIER of a peer still misses."""

    __slots__ = ("keys", "missing", "peer", "table")

    def __init__(self, peer: Peer, keys: list[bytes], table: dict[bytes, dict[Wait, None]]) -> None:
        self.peer = peer
        self.keys = keys
        self.missing = len(keys)
        self.table = table
        for key in keys:
            table.setdefault(key, {})[self] = None
        peer.wait = self

    def tick_off(self) -> bool:
        """Count one key as there; wake the peer with the last one, and return whether it was that."""
        self.missing -= 1
        if not self.missing:
            self.peer.wait = None
            self.peer.transmit(self.peer, [WOKEN])
        return not self.missing

    def drop(self) -> None:
        """Take the wait off every list it is on."""
        self.peer.wait = None
        for key in self.keys:
            if (waits := self.table.get(key)) is not None:
                waits.pop(self, None)
                if not waits:
                    del self.table[key]


class Peer:
    """Holds one connection: its socket, its unfinished frame, its unsent replies, and what its requests are at."""

    def __init__(self, sock: socket.socket, transmit: Callable[[Peer, list[bytes]], None]) -> None:
        self.transmit = transmit
        self.sock = sock
        self.fd = sock.fileno()
        self.recv = sock.recv
        self.send = sock.send
        self.buf: bytearray | None = None
        self.unsent: deque[bytes | memoryview] | None = None
        self.is_open = False  # has greeted (and proved the secret)
        self.nonce: bytes | None = None
        self.born = self.touched = time.monotonic()
        self.wait: Wait | None = None
        self.need = 0  # absolute position in data; the server makes it a length
        self.pairs = 0  # pairs of a MULTI_SET still to come
        self.list_left: tuple[int, int] | None = None  # of an unfinished list: keys left, place of the next


class Space:
    """Holds keys, queues and waits."""

    __slots__ = ("arrivals", "data", "queues", "waits")

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}
        self.waits: dict[bytes, dict[Wait, None]] = {}
        self.arrivals: dict[bytes, dict[Wait, None]] = {}

    def tick_off(self, key: bytes) -> None:
        """Tick a written key off all waits; it stays ticked off even if it is deleted meanwhile."""
        for wait in self.waits.pop(key):
            wait.tick_off()

    def tick_off_one(self, key: bytes) -> None:
        """Tick a queue that got one value off its waits until one is woken: the value is for one of them."""
        waits = self.waits[key]
        for wait in list(waits):
            del waits[wait]
            if wait.tick_off():
                break
        if not waits:
            del self.waits[key]
