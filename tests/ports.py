"""TCP ports that a test names before anybody listens there, or that nobody ever does."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

# Linux takes from here on, 32768 if nobody changed it, for sockets that ask for any port.
FIRST_OF_KERNEL = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
FREE_PORTS = range(FIRST_OF_KERNEL - 20000, FIRST_OF_KERNEL - 8000)  # above it lies torchrun's 29500
GIVEN: set[int] = set()


def free_port() -> int:
    """Return a port that nobody listens on, that the kernel hands to nobody, and another one each time.

    A port that the kernel chose, and that the test closed again, may go to any other program meanwhile. A client that
    comes before its server, or that has none, then reaches that program: an srun took the first bytes of a store's
    client for an order to abort its job.
    """
    while True:
        port = secrets.choice(FREE_PORTS)
        if port in GIVEN:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:  # taken
                continue
        GIVEN.add(port)
        return port
