"""Debug socket, by which ``python -m hpcdist debug`` finds a rank; without torch.

It is an abstract socket with the process's id in its name, which leaves no file behind. Each side asks the kernel for
the other's user, and accepts only the same user (or root). The client gets the address of the rank's watchdog and its
key; all other questions go there, over the ``channel``.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hpcdist.watch.endpoint import Endpoint

PREFIX = "hpcdist-"
SLURM_JOB = "SLURM_JOB_ID"  # identifies a job inside its allocation
SECRET_VARIABLE = "HPCDIST_DEBUG_SECRET"
CREDENTIALS = struct.Struct("3i")  # process, user, group
TIME = struct.Struct("@ll")  # C's struct timeval: seconds, microseconds
CLIENT_SECONDS = 2.0  # seconds that a rank may take to answer
LARGEST = 1 << 16  # bytes that it may send


class JobRank(NamedTuple):
    """The answer of a rank to a client."""

    endpoint: Endpoint
    rank: int
    job: str  # the same on all its ranks
    program: str
    slurm_job: str


def is_same_user(connection: socket.socket) -> bool:
    """Tell whether the process at the other end of a socket of the kernel's is this user's, or root's."""
    _, user, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return user in (0, os.getuid())


class DebugSocket:
    """The socket at which processes of the same user on this machine find a rank."""

    def __init__(self) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sockets = [made]  # none without abstract sockets: then a job is found by its address only
        try:
            made.bind(f"\0{PREFIX}{os.getuid()}-{os.getpid()}")
            made.listen(8)
            made.setblocking(False)
        except OSError:
            self.sockets = []

    def close(self) -> None:
        for each in self.sockets:
            each.close()

    def answer(self, answer: JobRank) -> None:
        """Answer a process of this user that has connected; refuse others."""
        with suppress(OSError):
            client, _ = self.sockets[0].accept()
            with client:
                client.setblocking(False)  # it has room for this
                if is_same_user(client):
                    client.send(json.dumps(answer).encode())


def ranks_on_this_machine() -> list[JobRank]:
    """Return the answers of this user's ranks on this machine."""
    own, found = f"@{PREFIX}{os.getuid()}-", list[JobRank]()
    names = {line.split()[-1] for line in Path("/proc/net/unix").read_text(errors="replace").split("\n") if own in line}
    for name in sorted(names):
        # its answer may be of another version
        nothing = suppress(OSError, ValueError, TypeError, RecursionError)
        with nothing, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            # not settimeout, which fails at once while others wait for an answer
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIME.pack(int(CLIENT_SECONDS), 0))
            client.connect("\0" + name[1:])
            client.settimeout(CLIENT_SECONDS)
            if not is_same_user(client):  # another user may listen at any name
                continue
            text = b""
            while len(text) < LARGEST and (part := client.recv(LARGEST)):
                text += part
            endpoint, *job = json.loads(text)
            found.append(JobRank(Endpoint(*endpoint), *job))
    return found
