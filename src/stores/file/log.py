"""Append-only file of records that processes share: torch's FileStore format, read and written under flock.

A record is ``u32 key length, key, u32 value length, value``; the last record of a key wins, and a key with
"-" before it deletes. flock(2) on the file is shared for readers, exclusive for writers. Unlike torch's, a
record is written by one call, a torn record at the end (a writer was killed) is cut off by the next user
that sees it, and no lock is waited for beyond a deadline.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator

from torch.distributed import DistStoreError

from hpcdist_stores.integers import U32

MAX_LENGTH = (1 << 32) - 1
FIRST_KEY = b"refcount/"  # the beginning of every FileStore file
FIRST_BYTES = U32.pack(len(FIRST_KEY)) + FIRST_KEY
NOTE = b"-/\0"  # a deletion of a key that does not exist: torch skips it, we store notes there
LOCK_FIRST_PAUSE_S, LOCK_LAST_PAUSE_S = 0.0001, 0.005

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC
_WRITE_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC


def pack_record(key: bytes, value: bytes) -> bytes:
    """Return one record."""
    if max(len(key), len(value)) > MAX_LENGTH:
        raise DistStoreError(f"{key[:32]!r}: a FileStore's keys and values may have at most {MAX_LENGTH} bytes")
    return U32.pack(len(key)) + key + U32.pack(len(value)) + value


class FileLog:
    """Reads and appends records; keeps what it has read so far."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.data: dict[bytes, bytes] = {}
        self.notes: dict[bytes, bytes] = {}
        self._inode = -1
        self._offset = 0  # the position up to which the file has been read
        self._mine = threading.RLock()

    def state(self) -> tuple[int, int]:
        """Return inode and size, which change with every record, without a lock.

        It opens the file: NFS asks its server at each open, but answers stat(2) from its cache for up to 60 s.
        """
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
        except FileNotFoundError:
            return -1, -1
        return status.st_ino, status.st_size

    @contextlib.contextmanager
    def reading(self, deadline: float | None) -> Iterator[None]:
        """Bring ``data`` up to date, and keep it so for this process's threads."""
        with self._mine:
            with self._locked(_READ_FLAGS, fcntl.LOCK_SH, deadline) as fd:
                is_torn = self._load(fd)
            if is_torn:  # cut it off: torch's readers would read it again forever
                with self.writing(deadline):
                    pass
            yield

    @contextlib.contextmanager
    def writing(self, deadline: float | None, *, create: bool = False) -> Iterator[None]:
        """Hold the file exclusively, with ``data`` up to date, for ``append`` and ``clear``."""
        flags = _WRITE_FLAGS | (os.O_CREAT if create else 0)
        with self._mine, self._locked(flags, fcntl.LOCK_EX, deadline) as self._fd:
            if self._load(self._fd):
                os.ftruncate(self._fd, self._offset)
            yield

    def append(self, *pairs: tuple[bytes, bytes]) -> None:
        """Append records in one write; call within ``writing``."""
        fd, records = self._fd, b"".join(pack_record(key, value) for key, value in pairs)
        try:
            written = os.write(fd, records)
            while written < len(records):  # a write ends early on a full disk, or after 2 GiB
                written += os.write(fd, records[written:])
        except OSError as error:
            os.ftruncate(fd, self._offset)
            raise DistStoreError(f"cannot write to {self.path}: {error.strerror}") from error
        for key, value in pairs:
            self._apply(key, value)
        self._offset += len(records)

    def clear(self) -> None:
        """Start the file again; call within ``writing``."""
        os.ftruncate(self._fd, 0)
        self._forget()

    def _forget(self) -> None:
        self.data.clear()
        self.notes.clear()
        self._offset = 0

    @contextlib.contextmanager
    def _locked(self, flags: int, lock: int, deadline: float | None) -> Iterator[int]:
        pause = LOCK_FIRST_PAUSE_S
        start = time.monotonic()
        while True:
            try:
                fd = os.open(self.path, flags, 0o644)
            except FileNotFoundError as error:
                if not os.path.isdir(os.path.dirname(self.path) or "."):
                    raise DistStoreError(f"cannot write to {self.path}: there is no such folder") from error
                raise DistStoreError(
                    f"the store's file {self.path} is gone: all its users have left, or it was removed"
                ) from None
            except OSError as error:  # a full disk, or a read-only one
                raise DistStoreError(f"cannot open {self.path}: {error.strerror}") from error
            try:
                fcntl.flock(fd, lock | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # another process has the lock
                pass
            except OSError as error:
                raise DistStoreError(f"cannot lock {self.path}: {error.strerror}") from error
            else:
                if _is_at(fd, self.path):
                    yield fd
                    return
                continue  # removed (and perhaps made again) before we had the lock
            finally:
                os.close(fd)  # this also releases the lock
            if deadline is not None and time.monotonic() >= deadline:
                waited = time.monotonic() - start
                raise DistStoreError(
                    f"Wait timeout: the lock of {self.path} was held by another process for {waited:.3f} s"
                )
            time.sleep(pause)
            pause = min(pause * 2, LOCK_LAST_PAUSE_S)

    def _load(self, fd: int) -> bool:
        """Read new records; return whether the file ends in a torn record."""
        status = os.fstat(fd)
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._forget()
            self._inode = status.st_ino
        if self._offset == 0 and not FIRST_BYTES.startswith(os.pread(fd, len(FIRST_BYTES), 0)):
            raise DistStoreError(f"{self.path} is not a FileStore file (it does not begin with {FIRST_KEY!r})")
        parts = []
        at = self._offset
        while at < status.st_size and (part := os.pread(fd, status.st_size - at, at)):
            parts.append(part)
            at += len(part)
        self._offset += self._parse(b"".join(parts))
        return self._offset < status.st_size

    def _parse(self, data: bytes) -> int:
        """Apply all whole records and return where they end."""
        pos = 0
        end = len(data)
        while True:
            if end - pos < 4:
                return pos
            key_end = pos + 4 + U32.unpack_from(data, pos)[0]
            if key_end + 4 > end:
                return pos
            stop = key_end + 4 + U32.unpack_from(data, key_end)[0]
            if stop > end:
                return pos
            self._apply(data[pos + 4 : key_end], data[key_end + 4 : stop])
            pos = stop

    def _apply(self, key: bytes, value: bytes) -> None:
        if key.startswith(NOTE):
            self.notes[key] = value
        elif key.startswith(b"-"):
            self.data.pop(key[1:], None)
        else:
            self.data[key] = value


def _is_at(fd: int, path: str) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(fd))
