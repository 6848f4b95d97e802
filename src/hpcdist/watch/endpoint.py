"""Endpoint: the address of a rank's watchdog, and its process; and a table of all ranks' endpoints."""

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
    """The address of one rank's watchdog, and its process."""

    addresses: tuple[str, ...]
    port: int
    stream_port: int  # a TCP port: connections to it end with the process (``liveness``)
    key: str  # hexadecimal
    pid: int
    birth: str  # the start of the process, in the kernel's ticks: distinguishes it from a later one with its id
    machine: str  # the same for processes that see each other's process ids
    node_key: str  # ``environment.node_key``
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def process(self) -> Process:
        """The identifier of the process on all nodes, independent of its rank."""
        return self.machine, self.pid

    @property
    def node(self) -> tuple[str, str]:
        """The identifier of the processes that see each other."""
        return self.machine, self.node_key


# one rank's own part: key, ports, process id, birth, number of the node
RECORD = Struct("<32sHHIQI")


class Endpoints(Mapping[int, Endpoint]):
    """The endpoints of ranks, in 52 bytes for each rank; the common part of a node's ranks is stored once."""

    def __init__(self, endpoints: Mapping[int, Endpoint]) -> None:
        places: dict[tuple[Any, ...], int] = {}
        ranks = sorted(endpoints)
        self._ranks = range(len(ranks)) if ranks == list(range(len(ranks))) else array("q", ranks)
        records = []
        for rank in ranks:
            at, port, stream_port, key, pid, birth, *place = endpoints[rank]
            number = places.setdefault((tuple(at), *place), len(places))
            records.append(RECORD.pack(bytes.fromhex(key), port, stream_port, pid, int(birth or 0), number))
        self._records, self._places = b"".join(records), list(places)

    def __getitem__(self, rank: int) -> Endpoint:
        try:
            index = self._ranks.index(rank)
        except ValueError:
            raise KeyError(rank) from None
        key, port, stream_port, pid, birth, number = RECORD.unpack_from(self._records, index * RECORD.size)
        at, *place = self._places[number]
        return Endpoint(at, port, stream_port, key.hex(), pid, str(birth or ""), *place)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def of_processes(self, processes: Container[Process]) -> set[int]:
        """Return the ranks of some processes, without making all endpoints."""
        machines = [machine for _, machine, *_ in self._places]
        found = enumerate(RECORD.iter_unpack(self._records))
        return {self._ranks[i] for i, (*_, pid, _, number) in found if (machines[number], pid) in processes}


@cache
def machine() -> str:
    """Return an identifier of this kernel and its namespace of process ids."""
    return addresses.kernel_id("pid") or secrets.token_hex(8)


def process_status(pid: int) -> tuple[str, str]:
    """Return the letter of a process's state in ``/proc``, "" if it has ended, ? if unknown, and its start.

    ``/proc`` may be missing, and may hide processes, also this user's (``hidepid``, other containers).
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
