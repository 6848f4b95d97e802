"""Users of a FileStore's file: counts them in and out, and finds a file that is left from an earlier run.

As in torch, ``refcount/`` counts the present users and ``cleanup/`` those that have left; the last one removes
the file once ``world_size`` have left. If a world_size is given, each of our users also stores a note of its
host, boot, pid namespace, pid and start time, which torch skips. By these notes a file whose world is complete
and whose users have all died is started again; if that cannot be decided (torch's users, other hosts), opening
it is an error.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import weakref
from pathlib import Path

from torch.distributed import DistError, DistStoreError

from hpcdist_stores.file.log import FIRST_KEY, NOTE, FileLog
from hpcdist_stores.integers import parse_i64

LEFT_KEY = b"cleanup/"
HERE, LEFT = b"here", b"left"
LEAVE_S = 2.0  # seconds that a leaving user waits for the lock


def _start_time(pid: int) -> str:
    """Return when a process began (clock ticks since boot); "" if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def _place() -> str:
    """Return text that identifies this machine, boot and pid namespace."""
    boot = space = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {boot} {space}"


def _may_live(note: bytes) -> bool | None:
    """Return whether the user of a note lives; None if this machine cannot tell."""
    host, boot, space, pid, start, _ = note[len(NOTE) :].decode().split(" ")
    our_host, our_boot, our_space = _place().split(" ")
    if host != our_host or (boot == our_boot and space != our_space):
        return None
    return boot == our_boot and _start_time(int(pid)) == start


class FileUser:
    """Counts one user in; the last reference to it counts the user out."""

    _serial = 0

    def __init__(self, log: FileLog, world_size: int, deadline: float | None) -> None:
        FileUser._serial += 1
        pid = os.getpid()
        note = f"{_place()} {pid} {_start_time(pid)} {FileUser._serial}".encode() if world_size >= 0 else None
        with log.writing(deadline, create=True):
            if world_size > 0:
                _refuse_stale(log, world_size)
            log.append(_counted(log, FIRST_KEY, 1), *_noted(note, HERE))
        self.leave = weakref.finalize(self, _leave, log, world_size, note, pid)


def _leave(log: FileLog, world_size: int, note: bytes | None, pid: int) -> None:
    if os.getpid() != pid:  # a forked child is not a user of its own
        return
    with contextlib.suppress(DistError, OSError, ValueError), log.writing(time.monotonic() + LEAVE_S):
        if _count(log, FIRST_KEY) <= 1 and 0 <= world_size <= _count(log, LEFT_KEY) + 1:
            os.unlink(log.path)
        else:
            log.append(_counted(log, LEFT_KEY, 1), _counted(log, FIRST_KEY, -1), *_noted(note, LEFT))


def _count(log: FileLog, key: bytes) -> int:
    return parse_i64(log.data.get(key) or b"0")


def _counted(log: FileLog, key: bytes, amount: int) -> tuple[bytes, bytes]:
    return key, b"%d" % (_count(log, key) + amount)


def _noted(note: bytes | None, state: bytes) -> list[tuple[bytes, bytes]]:
    return [] if note is None else [(NOTE + note, state)]


def _refuse_stale(log: FileLog, world_size: int) -> None:
    there, gone = _count(log, FIRST_KEY), _count(log, LEFT_KEY)
    if there + gone < world_size:
        return  # the world is not complete, and this user belongs to it
    users = [_may_live(note) for note, state in log.notes.items() if state == HERE]
    if any(users):
        return
    if there <= 0 or (len(users) >= there and None not in users):
        log.clear()  # all have left or died
        return
    raise DistStoreError(
        f"{log.path} looks left from an earlier run: {there + gone} users came to it before, {there} did not "
        f"leave, world_size is {world_size}, and none of them is known to live. Remove the file, or choose "
        "another name."
    )
