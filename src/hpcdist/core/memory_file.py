"""Memory files: memory that processes of one machine share, as files of /dev/shm whose names are soon removed.

The kernel frees such memory when the last process that maps it has unmapped it or ended, by whatever cause. So no rank
waits for another at the end, and a forked child has the memory too.

A process that is killed between ``create`` and ``remove`` leaves the name. So each holds a lock on its files (flock(2))
while they have one, which the kernel releases when the process has ended, and later processes of the user remove files
without a lock. Unlike a process id, the lock counts in every container.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

FOLDER = Path("/dev/shm")
UNLIMITED = sys.maxsize
PREFIX, NUMBER_BYTES = "hpcdist-", 12  # of a name: its beginning, and the bytes of the random number after it


def free_bytes() -> int | None:
    """Return how many bytes are free in /dev/shm, ``UNLIMITED`` if it has no limit, None if there is none."""
    try:
        state = os.statvfs(FOLDER)
    except OSError:
        return None
    return state.f_bavail * state.f_frsize if state.f_blocks else UNLIMITED  # tmpfs(5), size=0


def device_id() -> int:
    """Return an identifier of /dev/shm, the same for all processes that see the same one."""
    return FOLDER.stat().st_dev


def create(nbytes: int) -> tuple[int, str]:
    """Create a file that takes no memory yet, and return its descriptor and its name, for ``remove``."""
    remove_left_behind()
    while True:
        name = f"{PREFIX}{secrets.token_hex(NUMBER_BYTES)}"
        descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:  # else another process has seen it without the lock
            break
        os.close(descriptor)
    os.ftruncate(descriptor, nbytes)
    return descriptor, name


@cache  # once in each process
def remove_left_behind() -> None:
    """Remove the names that killed processes of this user have left."""
    for path in FOLDER.glob(PREFIX + NUMBER_BYTES * "[0-9a-f][0-9a-f]"):  # not a file that the user has named so
        with suppress(OSError):  # another user's, or removed meanwhile
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if its process lives
                path.unlink()
            finally:
                os.close(descriptor)


def open_by_name(name: str) -> int:
    return os.open(FOLDER / name, os.O_RDWR | os.O_CLOEXEC)


def remove(name: str) -> None:
    """Remove a file's name, if it has one; the memory stays for those that have opened it."""
    if name:
        (FOLDER / name).unlink(missing_ok=True)


def reserve(descriptor: int, nbytes: int) -> None:
    """Reserve a file's memory, filled with zeros, or raise OSError: writing to a full /dev/shm would be a SIGBUS."""
    os.posix_fallocate(descriptor, 0, nbytes)


def no_room(host: str, there: int | None, needed: int) -> str:
    """Return the message for a host whose /dev/shm has no room."""
    return (
        f"{FOLDER} of host {host} has {there} bytes free, and {needed} are needed: mount -o remount,size=90% /dev/shm, "
        "or in a container --shm-size"
    )
