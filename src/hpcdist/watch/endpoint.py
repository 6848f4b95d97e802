"""Endpoint: where the watchdog of one rank listens, and which process it belongs to."""

from __future__ import annotations

import os
import secrets
from functools import cache
from typing import NamedTuple

from hpcdist.launch import addresses

Process = tuple[str, int]  # machine and process id


class Endpoint(NamedTuple):
    """Where the watchdog of one rank listens, and what its process is."""

    addresses: tuple[str, ...]
    port: int
    stream_port: int  # of TCP: connections there end with the process (``liveness``)
    key: str  # hexadecimal
    sender: str  # what its datagrams begin with; hexadecimal
    pid: int
    birth: str  # when the process was started, by the kernel's count: tells it from a later one with its id
    machine: str  # tells processes that see each other's process ids apart from others
    node_key: str  # ``environment.node_key``
    host: str

    @property
    def process(self) -> Process:
        """What names the process on all nodes, however its rank is numbered."""
        return self.machine, self.pid

    @property
    def node(self) -> tuple[str, str]:
        """What is the same for the processes that see each other."""
        return self.machine, self.node_key


@cache
def machine() -> str:
    """Return what is the same for all processes that share this kernel and its process ids."""
    return addresses.kernel_id("pid") or secrets.token_hex(8)


def process_status(pid: int) -> tuple[str, str]:
    """Return the letter of a process's state in ``/proc`` and when it was started; "" if it has gone, ? if unknown."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fields = os.read(descriptor, 4096).rpartition(b")")[2].split()
        finally:
            os.close(descriptor)
        return fields[0].decode(), fields[19].decode()
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    except (OSError, IndexError):  # this process may have no descriptor left
        return "?", ""
