"""Endpoint: where the watchdog of one rank listens, and which process it belongs to; and a table of all ranks'."""

from __future__ import annotations

import os
import secrets
from array import array
from collections.abc import Container, Iterator, Mapping
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

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


# of one rank, without what ranks of one node have in common: key, ports, process id, birth, number of the node
RECORD = Struct("<32sHHIQI")
SENDER_BYTES = 8


class Endpoints(Mapping[int, Endpoint]):
    """The endpoints of ranks, in 60 bytes for each rank and what ranks of one node have in common once."""

    def __init__(self, endpoints: Mapping[int, Endpoint]) -> None:
        places: dict[tuple[Any, ...], int] = {}
        ranks = sorted(endpoints)
        self._ranks = range(len(ranks)) if ranks == list(range(len(ranks))) else array("q", ranks)
        records, senders = [], []
        for rank in ranks:
            at, port, stream_port, key, sender, pid, birth, *place = endpoints[rank]
            number = places.setdefault((tuple(at), *place), len(places))
            records.append(RECORD.pack(bytes.fromhex(key), port, stream_port, pid, int(birth or 0), number))
            senders.append(bytes.fromhex(sender).ljust(SENDER_BYTES, b"\0"))
        self._records, self._senders, self._places = b"".join(records), b"".join(senders), list(places)

    def _at(self, index: int) -> Endpoint:
        key, port, stream_port, pid, birth, number = RECORD.unpack_from(self._records, index * RECORD.size)
        at, *place = self._places[number]
        sender = self._senders[index * SENDER_BYTES : (index + 1) * SENDER_BYTES].hex()
        return Endpoint(at, port, stream_port, key.hex(), sender, pid, str(birth or ""), *place)

    def __getitem__(self, rank: int) -> Endpoint:
        try:
            return self._at(self._ranks.index(rank))
        except ValueError:
            raise KeyError(rank) from None

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def of_processes(self, processes: Container[Process]) -> list[int]:
        """Return the ranks whose processes are among some, without the time that all endpoints would take."""
        machines = [machine for _, machine, *_ in self._places]
        found = enumerate(RECORD.iter_unpack(self._records))
        return [self._ranks[i] for i, (*_, pid, _, number) in found if (machines[number], pid) in processes]

    def of_sender(self, sender: bytes) -> Endpoint | None:
        """Return the endpoint whose datagrams begin so, or None."""
        at = self._senders.find(sender)
        while at >= 0 and at % SENDER_BYTES:
            at = self._senders.find(sender, at + 1)
        return None if at < 0 else self._at(at // SENDER_BYTES)


@cache
def machine() -> str:
    """Return what is the same for all processes that share this kernel and its process ids."""
    return addresses.kernel_id("pid") or secrets.token_hex(8)


def process_status(pid: int) -> tuple[str, str]:
    """Return the letter of a process's state in ``/proc`` and when it was started; "" if it has gone, ? if unknown.

    There may be no ``/proc``, and it may hide processes, also this user's (``hidepid``, in containers of their own).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0].decode(), fields[19].decode()
    except (FileNotFoundError, ProcessLookupError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return "", ""
        except PermissionError:  # another user's
            pass
    except (OSError, IndexError):  # this process may have no descriptor left
        pass
    return "?", ""
