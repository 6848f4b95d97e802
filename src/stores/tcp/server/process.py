"""Server process: starts a TCPStore's server beside its owner, and ends it with the owner.

The process runs loop.py with the standard library only (no site, no torch; about 15 ms), so that rank 0's
interpreter lock does not slow it. The listening socket is made here, so that errors are raised here, and
handed down; clients can connect at once, because the kernel queues them. The process ends on a byte or the
end of its control socket, and soon after its owner has gone, which also covers ``kill -9`` and forked children that
keep the socket open.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import subprocess
import sys
import weakref
from pathlib import Path

from torch.distributed import DistStoreError

from hpcdist_stores.integers import U32

BACKLOG = 65535  # the kernel lowers it to net.core.somaxconn
END_S = 2.0
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}  # give large values back

# An empty package "hpcdist_stores" of the right path: its modules are found, but its __init__, which imports torch,
# never runs.
_START = (
    "import sys, types; package = types.ModuleType('hpcdist_stores'); package.__path__ = [sys.argv[1]]; "
    "sys.modules['hpcdist_stores'] = package; from hpcdist_stores.tcp.server.loop import main; main(sys.argv[2:])"
)
_HOME = str(Path(__file__).resolve().parents[2])
LOOPBACK = "127.0.0.1"


def listen(host: str, port: int) -> socket.socket:
    """Listen at an address of this machine, or for a name on every interface; port 0 takes a free one.

    "" and "0.0.0.0" are all IPv4 interfaces, "::" all there are; "localhost" is 127.0.0.1. Any other name is every
    interface: on Debian a host's own name means 127.0.1.1 on the host and its real address elsewhere, and torch's
    TCPStore listens on every interface too.
    """
    has_both = socket.has_dualstack_ipv6()
    host = {"": "0.0.0.0", "localhost": LOOPBACK}.get(host, host)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        host = "::" if has_both else "0.0.0.0"
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    is_dual = host == "::" and has_both
    return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=is_dual)


def take_over(fd: int, port: int) -> socket.socket:
    """Listen on a socket that the caller has bound to a port (0 is any); the descriptor is ours from then on."""
    listener = socket.socket(fileno=fd)
    if port not in (0, bound := listener.getsockname()[1]):
        raise OSError(errno.EADDRNOTAVAIL, f"the socket of master_listen_fd={listener.detach()} is bound to {bound}")
    listener.listen(BACKLOG)
    return listener


class ServerProcess:
    """Owns a server's process; the last reference to it ends the server."""

    def __init__(self, listener: socket.socket, secret: bytes | None) -> None:
        if sys.platform != "linux":
            raise DistStoreError(f"a TCPStore's server needs Linux (epoll), and this is {sys.platform}")
        name, port, *_ = listener.getsockname()
        self.host: str = LOOPBACK if name in ("0.0.0.0", "::") else name  # where its owner's client connects
        self.port: int = port
        ours, theirs = socket.socketpair()
        handed = [theirs.fileno(), listener.fileno()]
        try:
            self.process = subprocess.Popen(
                [_python(), "-I", "-S", "-c", _START, _HOME, str(os.getpid()), *map(str, handed)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=handed,
                cwd="/",
                env={**os.environ, **ALLOCATOR},
            )
            ours.sendall(U32.pack(len(secret or b"")) + (secret or b""))
        finally:
            theirs.close()
            listener.close()
        self.close = weakref.finalize(self, _end, self.process, ours, os.getpid())

    def is_alive(self) -> bool:
        return self.process.poll() is None


def _end(process: subprocess.Popen, control: socket.socket, owner: int) -> None:
    if os.getpid() != owner:  # a forked child has a copy of the handle, but no server
        process.returncode = 0  # and must not warn about a process that is not its child
        return
    with contextlib.suppress(OSError):
        control.send(b"q")  # a byte, not just a close: forked children may hold the socket too
    control.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _python() -> str:
    """Return the interpreter to start; an embedding program has its own name in sys.executable."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    embedded = not sys.executable or "python" not in Path(sys.executable).name
    path = str(Path(sys.base_exec_prefix, "bin", version)) if embedded else sys.executable
    if not os.access(path, os.X_OK):
        raise FileNotFoundError(errno.ENOENT, "found no Python that could run the store's server", path)
    return path
