"""How does a server start beside its owner, and end with it?

A helper process runs tcp_helper.py with the standard library alone (no site, no torch; about 15 ms), so
that rank 0's interpreter lock has no say in it. The listening sockets are made here, where errors can be
raised, and handed down; clients can connect at once, since the kernel queues them. The helper ends on a
byte or the end of its control socket, and when its owner's pid goes away (pidfd), which also covers
``kill -9`` and forked children that keep the socket open.
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

from stores.tcp_wire import U32

BACKLOG = 65535  # the kernel lowers it to net.core.somaxconn
PORT_TRIES = 16
END_S = 2.0
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}  # give large values back

# An empty package "stores" of the right path: its modules are found, its __init__, which imports torch,
# never runs.
_START = (
    "import sys, types; package = types.ModuleType('stores'); package.__path__ = [sys.argv[1]]; "
    "sys.modules['stores'] = package; from stores.tcp_helper import main; main(sys.argv[2:])"
)


def listen(host: str, port: int) -> list[socket.socket]:
    """Listen on every address that the host name means, and on no other.

    A name that means only the loopback here is known to other machines by another address (Debian writes
    ``127.0.1.1 NAME``), so it stands for all IPv4 interfaces; "localhost" and "127.0.1.1" do not.

    Args:
        host: A name or address of this machine; "" and "0.0.0.0" are all IPv4 interfaces, "::" all there are.
        port: The port; 0 takes a free one.

    Returns:
        The listening sockets, all on one port.

    Raises:
        OSError: When the name is unknown, is no address of this machine, or the port is in use.
    """
    found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    if _is_name(host) and all(ipaddress.ip_address(address[0]).is_loopback for _, address in addresses):
        addresses = [(socket.AF_INET, ("0.0.0.0", port))]
    for _ in range(PORT_TRIES):
        with contextlib.ExitStack() as failed:
            listeners: list[socket.socket] = []
            absent: OSError | None = None
            try:
                for family, (name, _, *scope) in addresses:
                    taken = listeners[0].getsockname()[1] if listeners else port
                    try:
                        listeners.append(failed.enter_context(_bind(family, (name, taken, *scope))))
                    except OSError as error:
                        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                            raise
                        absent = error  # of several addresses one may not be configured here, such as ::1
            except OSError as error:
                if port == 0 and listeners and error.errno == errno.EADDRINUSE:
                    continue  # the port that was free at the first address is taken at the second
                raise
            if absent is not None and not listeners:
                raise absent
            failed.pop_all()
            return listeners
    raise OSError(errno.EADDRINUSE, f"found no port that is free at all addresses of {host!r}")


def _is_name(host: str) -> bool:
    """Tell whether a host is given by a name of its own: not by an address, nor as "localhost"."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return bool(host) and "localhost" not in host
    return False


def _bind(family: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address[0] != "::")
        listener.bind(address)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def take_over(fd: int) -> socket.socket:
    """Listen on a socket that the caller has bound; the caller's descriptor is used up."""
    listener = socket.socket(fileno=fd)
    listener.listen(BACKLOG)
    return listener


class ServerProcess:
    """Owns a server's helper process; the last reference to it ends the server."""

    def __init__(self, listeners: list[socket.socket], secret: bytes | None) -> None:
        self.host, self.port = listeners[0].getsockname()[:2]
        ours, theirs = socket.socketpair()
        handed = [theirs.fileno(), *(listener.fileno() for listener in listeners)]
        home = str(Path(__file__).resolve().parent)
        try:
            self.process = subprocess.Popen(
                [_python(), "-I", "-S", "-c", _START, home, str(os.getpid()), *map(str, handed)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=handed,
                cwd="/",
                env={**os.environ, **ALLOCATOR},
            )
            ours.sendall(U32.pack(len(secret or b"")) + (secret or b""))
        finally:
            theirs.close()
            for listener in listeners:
                listener.close()
        self.close = weakref.finalize(self, _end, self.process, ours, os.getpid())

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self.process.poll() is None


def _end(process: subprocess.Popen, control: socket.socket, owner: int) -> None:
    if os.getpid() != owner:  # a forked child has a copy of the handle, not of the server
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
        raise FileNotFoundError(errno.ENOENT, "found no Python to run the store's server with", path)
    return path
