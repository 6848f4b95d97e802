"""Inspection of a running job: what a rank tells ``python -m hpcdist debug``, and the door by which it is found.

The door is a socket of the machine's kernel with the process's id in its name, which leaves no file behind. Only
processes of the same user (or root) are let in: the kernel says whose they are. They are told where the rank's watchdog
listens and its secret; everything else is asked for there, by ``side_channel``'s questions.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcdist.core.group import Group
from hpcdist.core.world import WORLD
from hpcdist.watch import calls_under_way, timing
from hpcdist.watch.report import label
from hpcdist.watch.side_channel import Place
from hpcdist.watch.timing import WAIT, TimedCall

PREFIX = "hpcdist-"
SECRET_VARIABLE = "HPCDIST_DEBUG_SECRET"
LEASE_SECONDS = 10.0  # how long calls are timed after the last question
FRAMES, ROWS, PLACES = 25, 20, 80  # as many as fit into a datagram
CREDENTIALS = struct.Struct("3i")  # process, user, group


class Door:
    """The socket by which processes of the same user on this machine find a rank.

    Attributes:
        sockets: it; none on a system without such names, where a job is found by its address only.
    """

    def __init__(self) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sockets = [made]
        try:
            made.bind(f"\0{PREFIX}{os.getuid()}-{os.getpid()}")
            made.listen(8)
            made.setblocking(False)
        except OSError:
            self.sockets = []

    def close(self) -> None:
        """Close the socket."""
        for each in self.sockets:
            each.close()

    def answer(self, said: dict[str, Any]) -> None:
        """Tell what is asked for to a process of this user that has connected; turn others away."""
        with suppress(OSError):
            visitor, _ = self.sockets[0].accept()
            with visitor:
                credentials = visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
                if CREDENTIALS.unpack(credentials)[1] in (0, os.getuid()):
                    visitor.sendall(json.dumps(said).encode())


def doors() -> list[dict[str, Any]]:
    """Return what the ranks of this user on this machine say at their doors."""
    own, found = f"@{PREFIX}{os.getuid()}-", []
    names = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if own in line}
    for name in sorted(names):
        with suppress(OSError, ValueError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
            visitor.settimeout(2.0)
            visitor.connect("\0" + name[1:])
            said = b"".join(iter(lambda: visitor.recv(65536), b""))  # called at once
            found.append(json.loads(said))
    return found


class Inspection:
    """What this rank tells about itself, and the times of its calls, which are taken while somebody asks."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str, bool], list[int]] = {}
        self._began = self._until = 0.0

    def tell(self, places: dict[int, Place], first: int) -> dict[str, Any]:
        """Return what is asked for.

        Args:
            places: where the ranks listen.
            first: the first of those to be told; a negative number for none.
        """
        now = time.monotonic()
        if self._until == 0.0:
            self._began = now
            timing.listen(self._tally)
        self._until = now + LEASE_SECONDS
        blocked = [(each.record, each.thread) for each in calls_under_way.under_way() if not each.in_background]
        part = sorted(places)[first : first + PLACES] if first >= 0 else []
        return {
            "stack": [
                f"{frame['filename']}:{frame['line']} ({frame['name']})"
                for frame in calls_under_way.stack(*next(iter(blocked), (None,)))[:FRAMES]
            ],
            "groups": {each.group_name: told(each) for each in list(WORLD.groups.values())[:ROWS]},
            "calls": [[*key, *numbers] for key, numbers in self._longest()],
            "seconds": round(now - self._began, 3),
            "places": [[rank, list(places[rank])] for rank in part],
            "size": len(places),
        }

    def look(self, now: float) -> None:
        """Stop to take times when nobody has asked for a while; the watchdog calls this now and then."""
        if self._until and now > self._until:
            timing.leave(self._tally)
            self._until = 0.0
            self._tallies = {}

    def _tally(self, call: TimedCall) -> None:
        name = f"wait({call.name})" if call.kind == WAIT else call.name
        numbers = self._tallies.setdefault((name, call.where, call.is_async), [0, 0, 0, 0])
        numbers[0] += 1
        numbers[1] += call.nbytes
        numbers[2] += call.end - call.begin
        numbers[3] = max(numbers[3], call.end - call.begin)

    def _longest(self) -> list[tuple[tuple[str, str, bool], list[int]]]:
        """Return the calls by line that took most time: calls, bytes, nanoseconds, and those of the longest one."""
        found = list(self._tallies.items())  # the program's threads add others meanwhile
        return sorted(found, key=lambda each: -each[1][2])[:ROWS]


def told(group: Group) -> dict[str, Any]:
    """Return what is told of a group."""
    return {
        "label": label(group.group_name, group.group_desc),
        "rank": group.rank(),
        "size": group.size(),
        "collectives": group.journal.sequence,
        "messages": group.journal.messages,
        "backend": group.config,
    }


def slurm_job() -> str:
    """Return the number of the Slurm job that this process runs in, or nothing."""
    return os.environ.get("SLURM_JOB_ID", "")


def program() -> str:
    """Return the program that this process runs."""
    return " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]])[:80]
