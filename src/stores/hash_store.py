"""HashStore: keys kept in this process, for threads that share them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from hpcdist_stores.base import Store, Text, as_amount, as_bytes, as_key_list, deadline_after
from hpcdist_stores.errors import queue_empty, wait_timeout
from hpcdist_stores.integers import parse_i64, wrap_i64


class HashStore(Store):
    """Keeps keys in this process (c10d's HashStore); threads may share it.

    Unlike torch's, ``add`` wakes waiters of its key.
    """

    where = "this process's HashStore"

    def __init__(self) -> None:
        super().__init__()
        self._data: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._changed = threading.Condition()

    def set(self, key: Text, value: Text) -> None:
        self.multi_set([key], [value])

    def get(self, key: Text) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        wanted = as_key_list(keys)
        with self._changed:
            self._wait(lambda: [key for key in wanted if key not in self._data], self._seconds)
            return [self._data[key] for key in wanted]

    def multi_set(self, keys: Sequence[Text], values: Sequence[Text]) -> None:
        """Store several values in one step."""
        pairs = zip(*self.as_lists(keys, values), strict=True)
        with self._changed:
            self._data.update(pairs)
            self._changed.notify_all()

    def append(self, key: Text, value: Text) -> None:
        key, value = as_bytes(key), as_bytes(value, "value")
        with self._changed:
            self._data[key] = self._data.get(key, b"") + value
            self._changed.notify_all()

    def add(self, key: Text, amount: int) -> int:
        """Add to a decimal counter and return the total.

        Raises:
            ValueError: If the value is not a number.
            IndexError: If the value does not fit into 64 bits (torch's class for it).
        """
        key, amount = as_bytes(key), as_amount(amount)
        with self._changed:
            try:
                total = wrap_i64(parse_i64(self._data.get(key) or b"0") + amount)
            except OverflowError as error:
                raise IndexError(f"add to {key!r}: {error}") from None
            self._data[key] = b"%d" % total
            self._changed.notify_all()
            return total

    def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        key, expected, desired = as_bytes(key), as_bytes(expected, "expected"), as_bytes(desired, "desired")
        with self._changed:
            value = self._data.get(key)
            if value == expected or (value is None and not expected):
                value = self._data[key] = desired
                self._changed.notify_all()
            return expected if value is None else value

    def check(self, keys: Sequence[Text]) -> bool:
        """Return whether all keys (or queues that are not empty) are there."""
        wanted = as_key_list(keys)
        with self._changed:
            return not self._missing(wanted)

    def wait_until(self, keys: list[bytes], seconds: float) -> None:
        with self._changed:
            self._wait(lambda: self._missing(keys), seconds)

    def delete_key(self, key: Text) -> bool:
        with self._changed:
            return self._data.pop(as_bytes(key), None) is not None

    def num_keys(self) -> int:
        return len(self._data)

    def list_keys(self) -> list[str]:
        with self._changed:
            return [key.decode() for key in self._data]

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

    def clone(self) -> HashStore:
        """Return this store itself: its keys live nowhere else."""
        return self

    def _missing(self, keys: list[bytes]) -> list[bytes]:
        return [key for key in keys if key not in self._data and not self._queues.get(key)]

    def _wait(self, absent: Callable[[], list[bytes]], seconds: float) -> None:
        start, deadline = time.monotonic(), deadline_after(seconds)
        while keys := absent():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise wait_timeout(keys, seconds, time.monotonic() - start, self.where)
            self._changed.wait(left)
