"""Main program of the server's process: serves until the owner says so, closes the control socket, or dies.

Standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket

from hpcdist_stores.integers import U32
from hpcdist_stores.tcp.server.loop import Server


def main(arguments: list[str]) -> None:
    """Run a server process: owner's pid, control descriptor, listening descriptors...

    The control socket brings the secret as a u32 length (0: no secret) and its bytes; one more byte, or the
    socket's end, ends the server.
    """
    owner, control_fd, *listen_fds = map(int, arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # ranks that save a checkpoint on SIGTERM still need their store
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    control = socket.socket(fileno=control_fd)
    (size,) = U32.unpack(control.recv(4, socket.MSG_WAITALL))
    secret = control.recv(size, socket.MSG_WAITALL) if size else None
    server = Server([socket.socket(fileno=fd) for fd in listen_fds], secret)
    server.watch(control_fd, server.stop)
    try:
        server.watch(os.pidfd_open(owner), server.stop)
    except (AttributeError, OSError):  # before Linux 5.3: look at every tick
        server.ticks.append(lambda: None if os.getppid() == owner else server.stop())
    if os.getppid() != owner:
        return
    gc.disable()  # no cycles are made here, and a collection over many keys takes milliseconds
    server.run()
