"""HashStore: keys kept in this process, for threads that share them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from hpcdist_stores.base import Text, as_bytes, deadline_after
from hpcdist_stores.dict_store import DictStore
from hpcdist_stores.errors import queue_empty, wait_timeout

T = TypeVar("T")


class HashStore(DictStore):
    """Keeps keys in this process (c10d's HashStore); threads may share it.

    Unlike torch's, ``add`` wakes waiters of its key.
    """

    where = "this process's HashStore"

    def __init__(self) -> None:
        super().__init__()
        self._data: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._changed = threading.Condition()

    def _reading(self) -> threading.Condition:
        return self._changed

    _writing = _reading

    def _put(self, *pairs: tuple[bytes, bytes]) -> None:
        self._data.update(pairs)
        self._changed.notify_all()

    def _when_there(self, names: list[bytes], seconds: float, use: Callable[[], T]) -> T:
        with self._changed:
            self._wait(lambda: [name for name in names if name not in self._data], seconds)
            return use()

    def wait_until(self, names: list[bytes], seconds: float) -> None:
        with self._changed:
            self._wait(lambda: self._missing(names), seconds)

    def delete_key(self, key: Text) -> bool:
        with self._changed:
            return self._data.pop(as_bytes(key), None) is not None

    def queue_push(self, key: Text, value: Text) -> None:
        key, value = as_bytes(key), as_bytes(value, "value")
        with self._changed:
            self._queues.setdefault(key, deque()).append(value)
            self._changed.notify_all()

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        key = as_bytes(key)
        with self._changed:
            if not self._queues.get(key):
                if not block:
                    raise queue_empty(key, self.where)
                self._wait(lambda: [] if self._queues.get(key) else [key], self._seconds)
            queue = self._queues[key]
            value = queue.popleft()
            if not queue:
                del self._queues[key]
            return value

    def queue_len(self, key: Text) -> int:
        return len(self._queues.get(as_bytes(key), ()))

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> HashStore:
        """Return this store itself: its keys exist only here."""
        return self

    def _missing(self, names: list[bytes]) -> list[bytes]:
        """Return the names without a key and without values in a queue."""
        return [name for name in names if name not in self._data and not self._queues.get(name)]

    def _wait(self, absent: Callable[[], list[bytes]], seconds: float) -> None:
        start, deadline = time.monotonic(), deadline_after(seconds)
        while keys := absent():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise wait_timeout(keys, seconds, time.monotonic() - start, self.where)
            self._changed.wait(left)
