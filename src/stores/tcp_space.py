"""What does the server hold: keys, queues, and who waits for them?

Standard library alone: the server process imports this file without torch.
"""

from __future__ import annotations

from collections import deque

from stores.tcp_wire import WOKEN


class Refused(Exception):
    """Closes the connection: the protocol has no other way to say no."""


class Wait:
    """Holds what one WAIT or BARRIER of a peer still misses."""

    __slots__ = ("keys", "missing", "peer", "table")

    def __init__(self, peer: Peer, keys: list[bytes], table: dict[bytes, dict[Wait, None]]) -> None:
        self.peer = peer
        self.keys = keys
        self.missing = len(keys)
        self.table = table
        for key in keys:
            table.setdefault(key, {})[self] = None
        peer.wait = self

    def drop(self) -> None:
        """Take the wait off every list it is on."""
        self.peer.wait = None
        for key in self.keys:
            waits = self.table.get(key)
            if waits is not None:
                waits.pop(self, None)
                if not waits:
                    del self.table[key]


class Peer:
    """Holds what the requests need to know of one connection (the server adds the socket)."""

    __slots__ = ("checked", "heavy", "list_left", "need", "pairs", "wait")

    def __init__(self) -> None:
        self.wait: Wait | None = None
        self.need = 0  # absolute position in data; the server makes it a length
        self.heavy = False  # a large reply was made: send before going on
        self.pairs = 0  # pairs of a MULTI_SET still to come
        self.list_left: tuple[int, int] | None = None  # of an unfinished list: keys left, place of the next
        self.checked: tuple[bytes, list[bytes]] | None = None  # a list that is asked for twice, raw and parsed

    def wake(self, reply: bytes) -> None:
        """Send a late reply."""
        raise NotImplementedError


class Space:
    """Holds keys, queues and those who wait for them."""

    __slots__ = ("arrivals", "data", "queues", "waits")

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}
        self.waits: dict[bytes, dict[Wait, None]] = {}
        self.arrivals: dict[bytes, dict[Wait, None]] = {}

    def tick_off(self, key: bytes) -> None:
        """Tell all waits that a key was written; it stays ticked off even if deleted meanwhile."""
        for wait in self.waits.pop(key):
            wait.missing -= 1
            if not wait.missing:
                wait.peer.wait = None
                wait.peer.wake(WOKEN)

    def tick_off_one(self, key: bytes) -> None:
        """Tell the waits of a queue that one value came: only one of them is woken."""
        waits = self.waits[key]
        for wait in list(waits):
            del waits[wait]
            wait.missing -= 1
            if not wait.missing:
                wait.peer.wait = None
                wait.peer.wake(WOKEN)
                break
        if not waits:
            del self.waits[key]
