"""FileStore: keys in a file that all ranks reach."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import SupportsIndex, TypeVar

from hpcdist_stores.base import Store, Text, as_amount, as_bytes, as_key_list, deadline_after
from hpcdist_stores.errors import wait_timeout
from hpcdist_stores.file.log import FileLog
from hpcdist_stores.file.users import FileUser

FIRST_PAUSE_S, LAST_PAUSE_S = 0.001, 0.01

T = TypeVar("T")


def _key(key: Text) -> bytes:
    return b"/" + as_bytes(key)


class FileStore(Store):
    """Keeps keys in a file that all ranks reach (c10d's FileStore, and its format).

    Args:
        file_name: The file; made if it is not there. All ranks must share its folder, and flock(2) must work there.
        world_size: If 0 or more, the last user removes the file once so many have left; -1 leaves it.

    Raises:
        DistStoreError: If the file is left from an earlier run, or is not a FileStore file.
    """

    def __init__(self, file_name: str, world_size: SupportsIndex = -1) -> None:
        super().__init__()
        self._path = os.fspath(file_name)
        self.where = f"the file {self._path}"
        self._log = FileLog(self._path)
        self._user = FileUser(self._log, world_size.__index__(), deadline_after(self._seconds))

    @property
    def path(self) -> str:
        return self._path

    def set(self, key: Text, value: Text) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[Text], values: Sequence[Text]) -> None:
        """Store several values in one step."""
        names, given = self.as_lists(keys, values)
        pairs = zip([b"/" + name for name in names], given, strict=True)
        with self._log.writing(self._deadline()) as fd:
            self._log.append(fd, *pairs)

    def get(self, key: Text) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        wanted = [b"/" + key for key in as_key_list(keys)]
        return self._when_there(wanted, self._seconds, lambda data: [data[key] for key in wanted])

    def append(self, key: Text, value: Text) -> None:
        name, value = _key(key), as_bytes(value, "value")
        with self._log.writing(self._deadline()) as fd:
            self._log.append(fd, (name, self._log.data.get(name, b"") + value))

    def add(self, key: Text, amount: int) -> int:
        """Add to a decimal counter and return the total.

        Raises:
            ValueError: If the value is not a number.
            IndexError: If the value does not fit into 64 bits (torch's class for it).
        """
        name, amount = _key(key), as_amount(amount)
        with self._log.writing(self._deadline()) as fd:
            try:
                total = self._log.total(name, amount)
            except OverflowError as error:
                raise IndexError(f"add to {name[1:]!r}: {error}") from None
            self._log.append(fd, total)
            return int(total[1])

    def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        name, expected, desired = _key(key), as_bytes(expected, "expected"), as_bytes(desired, "desired")
        with self._log.writing(self._deadline()) as fd:
            value = self._log.data.get(name)
            if value == expected or (value is None and not expected):
                self._log.append(fd, (name, desired))
                return desired
            return expected if value is None else value

    def check(self, keys: Sequence[Text]) -> bool:
        wanted = [b"/" + key for key in as_key_list(keys)]
        with self._log.reading(self._deadline()) as data:
            return all(key in data for key in wanted)

    def wait_until(self, keys: list[bytes], seconds: float) -> None:
        self._when_there([b"/" + key for key in keys], seconds, lambda data: None)

    def delete_key(self, key: Text) -> bool:
        """Delete a key; returns True even if it was not there, as torch's does."""
        name = _key(key)
        with self._log.writing(self._deadline()) as fd:
            self._log.append(fd, (b"-" + name, b""))
        return True

    def num_keys(self) -> int:
        """Return the number of keys, the counters of users included."""
        with self._log.reading(self._deadline()) as data:
            return len(data)

    def list_keys(self) -> list[str]:
        """Return all keys, without the counters of users."""
        with self._log.reading(self._deadline()) as data:
            return [key[1:].decode() for key in data if key.startswith(b"/")]

    def has_extended_api(self) -> bool:
        """Return False, as torch's FileStore does (append, multi_get and multi_set work all the same)."""
        return False

    def clone(self) -> FileStore:
        """Return another store on the same file; the two count as one user."""
        twin = FileStore.__new__(FileStore)
        Store.__init__(twin)
        twin._path, twin.where, twin._user = self._path, self.where, self._user
        twin._log = FileLog(self._path)
        return twin

    def _deadline(self) -> float | None:
        # at least one second, so that a busy file is not an error
        return None if self._seconds < 0 else time.monotonic() + max(self._seconds, 1.0)

    def _when_there(self, keys: list[bytes], seconds: float, use: Callable[[dict[bytes, bytes]], T]) -> T:
        start = time.monotonic()
        deadline = deadline_after(seconds)
        lock_deadline = None if deadline is None else max(deadline, start + 0.05)
        pause = FIRST_PAUSE_S
        while True:
            seen = self._log.state()  # before reading, so that what is written meanwhile changes it
            with self._log.reading(lock_deadline) as data:
                missing = [key for key in keys if key not in data]
                if not missing:
                    return use(data)
            while True:
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    raise wait_timeout(missing, seconds, now - start, self.where)
                time.sleep(pause if deadline is None else min(pause, deadline - now))
                pause = min(pause * 1.5, LAST_PAUSE_S)
                if self._log.state() != seen:
                    break
