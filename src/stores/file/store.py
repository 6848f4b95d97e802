"""FileStore: keys in a file that all ranks reach."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import SupportsIndex, TypeVar

from hpcdist_stores.base import Store, Text, deadline_after
from hpcdist_stores.dict_store import DictStore
from hpcdist_stores.errors import wait_timeout
from hpcdist_stores.file.log import FileLog
from hpcdist_stores.file.users import FileUser

FIRST_PAUSE_S, LAST_PAUSE_S = 0.001, 0.01

T = TypeVar("T")


class FileStore(DictStore):
    """Keeps keys in a file that all ranks reach (c10d's FileStore, and its format).

    Args:
        file_name: The file; made if it is not there. All ranks must share its folder, and flock(2) must work there.
        world_size: If 0 or more, the last user removes the file once this number have left; -1 keeps it.

    Raises:
        DistStoreError: If the file is left from an earlier run, or is not a FileStore file.
    """

    _prefix = b"/"

    def __init__(self, file_name: str, world_size: SupportsIndex = -1) -> None:
        super().__init__()
        self._open(os.fspath(file_name))
        self._user = FileUser(self._log, world_size.__index__(), deadline_after(self._seconds))

    def _open(self, path: str) -> None:
        self._path, self.where = path, f"the file {path}"
        self._log = FileLog(path)
        self._data = self._log.data

    @property
    def path(self) -> str:
        return self._path

    def delete_key(self, key: Text) -> bool:
        """Delete a key; returns True even if it was not there, as torch's does."""
        name = self._name(key)
        with self._writing():
            self._put((b"-" + name, b""))
        return True

    def clone(self) -> FileStore:
        """Return another store on the same file; the two count as one user."""
        twin = FileStore.__new__(FileStore)
        Store.__init__(twin)
        twin._open(self._path)
        twin._user = self._user
        return twin

    def _deadline(self) -> float | None:
        # at least one second, so that a busy file is not an error
        return None if self._seconds < 0 else time.monotonic() + max(self._seconds, 1.0)

    def _reading(self) -> AbstractContextManager[None]:
        return self._log.reading(self._deadline())

    def _writing(self) -> AbstractContextManager[None]:
        return self._log.writing(self._deadline())

    def _put(self, *pairs: tuple[bytes, bytes]) -> None:
        self._log.append(*pairs)

    def _when_there(self, names: list[bytes], seconds: float, use: Callable[[], T]) -> T:
        start = time.monotonic()
        deadline = deadline_after(seconds)
        lock_deadline = None if deadline is None else max(deadline, start + 0.05)
        pause = FIRST_PAUSE_S
        while True:
            seen = self._log.state()  # before reading, so that writes in between change it
            with self._log.reading(lock_deadline):
                if not (missing := self._missing(names)):
                    return use()
            while True:
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    raise wait_timeout(missing, seconds, now - start, self.where)
                time.sleep(pause if deadline is None else min(pause, deadline - now))
                pause = min(pause * 1.5, LAST_PAUSE_S)
                if self._log.state() != seen:
                    break
