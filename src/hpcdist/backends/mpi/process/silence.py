"""Limit on the silence of other hosts: ends MPI's TCP connections to a lost host (no power, no link).

A host that has not answered for about 15 s is lost; the kernel of a stopped process still answers. Connections of other
libraries are not touched: MPI's are those to the ports at which the ranks listen since their MPI_Init.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from errno import EBADF
from stat import S_ISSOCK
from threading import Thread

KEEP_ALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 2}  # s, s, of an idle connection
UNANSWERED_MILLISECONDS = 15_000  # of one that sends
# in Linux's struct tcp_info: retransmissions, and probes of a closed window, since the last answer
UNANSWERED = slice(2, 4)
PORTS: set[int] = set()  # ports at which MPI listens in this process

Socket = tuple[int, int]  # its descriptor and inode: after a close another file may get the number


def noting_ports(start: Callable[[], object]) -> None:
    """Start MPI, and record the ports at which this process listens afterwards."""
    before = listening()
    start()
    PORTS.update(listening() - before)


def limit(ports: Collection[int]) -> None:
    """Let the kernel end MPI's connections, at the ports where the ranks listen, whose other host is silent."""
    found = []
    for each, connection in sockets():
        if not is_listening(connection) and is_of_ports(connection, ports) and is_untouched(connection):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEP_ALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            found.append(each)
    Thread(target=limit_receivers, args=(found,), name="hpcdist silence", daemon=True).start()


def sockets() -> Iterator[tuple[Socket, socket.socket]]:
    """Yield the TCP sockets of this process, each by a duplicate descriptor."""
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:  # there is no /proc
        return
    for number in map(int, numbers):
        with suppress(OSError), duplicate(number) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                yield (number, os.fstat(number).st_ino), found


def listening() -> set[int]:
    return {found.getsockname()[1] for _, found in sockets() if is_listening(found)}


def is_listening(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def is_of_ports(connection: socket.socket, ports: Collection[int]) -> bool:
    """Tell whether a connection is to one of these ports of another process, or to one of PORTS here."""
    with suppress(OSError):  # it is not connected
        return connection.getpeername()[1] in ports or connection.getsockname()[1] in PORTS
    return False


def is_untouched(connection: socket.socket) -> bool:
    """Tell whether a connection has no limit of silence yet: MPI's own settings stay as they are."""
    return not connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and not connection.getsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
    )


def duplicate(number: int, inode: int | None = None) -> socket.socket:
    """Return a socket of this process by its descriptor; OSError if it is not a socket, or another one."""
    status = os.fstat(number)
    if not S_ISSOCK(status.st_mode) or inode not in (None, status.st_ino):
        raise OSError(EBADF, os.strerror(EBADF))
    return socket.socket(fileno=os.dup(number))


def limit_receivers(found: list[Socket]) -> None:
    """Find, once a second, the connections whose data is not acknowledged, and limit their time.

    A limit for all would also end those whose other side does not read for so long, although its kernel answers: a rank
    that computes, or is stopped, while others send to it (tcp(7), TCP_USER_TIMEOUT).
    """
    limits = dict.fromkeys(found, 0)
    while True:
        for (number, inode), before in limits.items():
            with suppress(OSError), duplicate(number, inode) as connection:
                tried = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, UNANSWERED.stop)[UNANSWERED]
                limit = UNANSWERED_MILLISECONDS if max(tried) > 1 else 0
                if limit != before:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
                    limits[number, inode] = limit
        time.sleep(1)
