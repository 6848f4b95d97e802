"""Bytes on the wire: what each node has sent to the others, as its network devices count it.

The counters are the kernel's for network interfaces, and those of InfiniBand's ports, whose traffic the kernel does not
see. Both count everything that leaves the node, so a figure holds a little of what else goes on there.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from hpcdist.launch import addresses

INTERFACES = Path("/sys/class/net")
PORTS = Path("/sys/class/infiniband")
WORD = 4  # InfiniBand's port_xmit_data counts words of 4 bytes


class Wire:
    """The counters of all nodes of a job; every rank makes one."""

    def __init__(self, comm: Any) -> None:
        networks = comm.allgather(addresses.network())
        mine = networks[comm.Get_rank()]
        self.nodes = len(set(networks))  # how many nodes the ranks are on
        is_first = networks.index(mine) == comm.Get_rank()
        self._files: list[tuple[Path, int]] = []
        if self.nodes > 1 and is_first:  # one rank of a node reads for all of them
            self._files = [(INTERFACES / name / "statistics" / "tx_bytes", 1) for name in addresses.interfaces()]
            self._files += [(path, WORD) for path in sorted(PORTS.glob("*/ports/*/counters/port_xmit_data"))]

    def sent(self) -> int:
        """Return the bytes that this rank's node has sent; 0 on the ranks that do not read for their node."""
        total = 0
        for path, unit in self._files:
            with contextlib.suppress(OSError, ValueError):
                total += int(path.read_text()) * unit
        return total
