"""Event loop of the server: one thread serves many peers, also hostile ones, in bounded memory.

Each readable peer is read once, all complete requests are answered with one send, and the
rest of an unfinished frame is kept. A peer that does not read its replies is not read either. If the unfinished
frames of all peers together hold more than ``UNFINISHED_LIMIT`` bytes, those that get no more are closed. Nothing is
allocated for a length that was only announced.

Standard library only. process.py starts ``main`` in a process of its own, without torch.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from hpcdist_stores.integers import U32
from hpcdist_stores.tcp.server.keys import Peer, Refused, Space
from hpcdist_stores.tcp.server.requests import PIECES, perform
from hpcdist_stores.tcp.wire import GREETING_SECRET, HELLO, NONCE_SIZE, PROOF_SIZE, is_proof, proof

READ_SIZE = 64 * 1024
UNFINISHED_LIMIT = 8 * 1024 * 1024  # bytes in unfinished frames of all peers, above which those that stall are closed
JOIN_MAX = 256 * 1024  # replies up to this size are joined into one send
STALL_S = 1.0  # seconds without data after which a frame stalls
TICK_S = 0.25
GREET_S = 10.0  # seconds that a peer may take to prove the secret, or to begin when descriptors run out

READ = select.EPOLLIN
WRITE = select.EPOLLOUT


class Server:
    """Serves one key space on a listening socket until it is told to stop."""

    def __init__(self, listener: socket.socket, secret: bytes | None, owner: int) -> None:
        self.listener = listener
        self.owner = owner  # the parent process
        self.secret = secret
        self.space = Space()
        self.epoll = select.epoll()
        self.connections: dict[int, Peer] = {}
        self.callbacks: dict[int, Callable[[], None]] = {}
        self.running = True
        self.unfinished = 0
        self.is_full = False
        listener.setblocking(False)
        for level, option in ((socket.IPPROTO_TCP, socket.TCP_NODELAY), (socket.SOL_SOCKET, socket.SO_KEEPALIVE)):
            listener.setsockopt(level, option, 1)  # accepted sockets inherit it from their listener
        self.watch(listener.fileno(), self.accept_all)

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        self.callbacks[fd] = callback
        self.epoll.register(fd, READ)

    def stop(self) -> None:
        """End the loop after the current events: their replies are still sent."""
        self.running = False

    def run(self) -> None:
        connections, callbacks, poll = self.connections, self.callbacks, self.epoll.poll
        next_tick = 0.0
        while self.running:
            if (now := time.monotonic()) >= next_tick:
                self.tick(now)
                next_tick = now + TICK_S
            for fd, mask in poll(TICK_S):
                if (peer := connections.get(fd)) is None:
                    if (callback := callbacks.get(fd)) is not None:
                        callback()
                elif mask & WRITE:
                    self.flush(peer)
                elif mask & READ:
                    self.read(peer)
                else:
                    self.close(peer)

    def accept_all(self) -> None:
        """Accept all waiting connections."""
        while True:
            try:
                sock, _ = self.listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self.is_full = True  # without a free descriptor connections stay in the backlog
                    self.epoll.modify(self.listener.fileno(), 0)
                    return
                continue  # that client left before
            sock.setblocking(False)
            peer = Peer(sock, self.transmit)
            self.connections[peer.fd] = peer
            self.epoll.register(peer.fd, READ)

    def tick(self, now: float) -> None:
        """Run the periodic checks: the owner's life, descriptors, late proofs, frames that stall."""
        if os.getppid() != self.owner:
            self.stop()
        if self.is_full or self.secret:
            self.close_all(p for p in self.connections.values() if not p.is_open and now - p.born > GREET_S)
        if self.is_full:
            self.is_full = False
            self.epoll.modify(self.listener.fileno(), READ)
        if self.unfinished > UNFINISHED_LIMIT:
            begun = (p for p in self.connections.values() if p.buf is not None and p.unsent is None)
            self.close_all(p for p in begun if now - p.touched > STALL_S)

    def read(self, peer: Peer) -> None:
        """Read once and answer all complete requests."""
        try:
            data = peer.recv(READ_SIZE)
        except BlockingIOError:
            return
        except OSError:
            self.close(peer)
            return
        if not data:
            self.close(peer)
            return
        if (buf := peer.buf) is not None:
            buf += data
            peer.touched = time.monotonic()
            self.unfinished += len(data)
            if len(buf) < peer.need:
                return
            data = bytes(buf)
            self.forget(peer)
        self.answer(peer, data)

    def forget(self, peer: Peer) -> None:
        """Drop a peer's unfinished frame."""
        if peer.buf is not None:
            self.unfinished -= len(peer.buf)
            peer.buf = None

    def answer(self, peer: Peer, data: bytes) -> None:
        """Answer all whole requests in data and keep the rest."""
        out: list[bytes] = []
        try:
            pos = 0 if peer.is_open else self.greet(peer, data)
            if peer.is_open:
                pos = perform(self.space, peer, data, pos, out)
        except (Refused, MemoryError):
            if out:
                self.transmit(peer, out)
            self.close(peer)
            return
        if out:
            self.transmit(peer, out)
        if pos < len(data) and peer.fd in self.connections:
            if peer.need == pos and peer.unsent is None:  # complete requests are left; the replies are sent first
                peer.unsent = deque()
                self.epoll.modify(peer.fd, WRITE)
            peer.buf = bytearray(memoryview(data)[pos:])
            peer.touched = time.monotonic()
            peer.need -= pos
            self.unfinished += len(peer.buf)

    def greet(self, peer: Peer, data: bytes) -> int:
        """Check the beginning of a connection; return the number of bytes used."""
        if peer.nonce is None:
            peer.need = 5 if self.secret is None else len(HELLO)
            if not HELLO.startswith(data[: peer.need]):
                raise Refused("no greeting")
            if len(data) < peer.need:
                return 0
            if self.secret is None:
                peer.is_open = True
                return 5
            if len(data) > peer.need:
                raise Refused("requests before the secret is proved")
            peer.nonce = os.urandom(NONCE_SIZE)
            self.transmit(peer, [GREETING_SECRET, peer.nonce])
            return len(data)
        peer.need = NONCE_SIZE + PROOF_SIZE
        if len(data) < peer.need:
            return 0
        theirs, given = data[:NONCE_SIZE], data[NONCE_SIZE : peer.need]
        secret = self.secret or b""
        if not is_proof(given, proof(secret, b"client", peer.nonce, theirs)):
            raise Refused("a wrong proof")
        peer.is_open = True
        self.transmit(peer, [proof(secret, b"server", peer.nonce, theirs)])
        return peer.need

    def transmit(self, peer: Peer, out: list[bytes]) -> None:
        """Send replies, and queue the part that the peer does not take now."""
        if peer.unsent is not None:
            peer.unsent.extend(out)
            return
        if len(out) == 1:
            data = out[0]
        elif sum(map(len, out)) <= JOIN_MAX:
            data = b"".join(out)
        else:
            peer.unsent = deque(out)
            self.epoll.modify(peer.fd, WRITE)
            return
        try:
            sent = peer.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close(peer)
            return
        if sent < len(data):
            peer.unsent = deque([memoryview(data)[sent:]])
            self.epoll.modify(peer.fd, WRITE)

    def flush(self, peer: Peer) -> None:
        """Send a peer's queued replies, part by part; then continue with its requests."""
        unsent = peer.unsent
        assert unsent is not None, "only peers with queued replies are watched for writing"
        if unsent:
            try:
                sent = peer.sock.sendmsg(list(islice(unsent, PIECES)))
            except BlockingIOError:
                return
            except OSError:
                self.close(peer)
                return
            while unsent and sent >= len(unsent[0]):
                sent -= len(unsent.popleft())
            if sent:
                unsent[0] = memoryview(unsent[0])[sent:]
        if not unsent:
            peer.unsent = None
            self.epoll.modify(peer.fd, READ)
            if peer.buf is not None and peer.need == 0:
                data = bytes(peer.buf)
                self.forget(peer)
                self.answer(peer, data)

    def close_all(self, peers: Iterable[Peer]) -> None:
        for peer in list(peers):
            self.close(peer)

    def close(self, peer: Peer) -> None:
        """Remove a peer: its wait, its unfinished frame, its descriptor."""
        if self.connections.pop(peer.fd, None) is None:
            return
        if peer.wait is not None:
            peer.wait.drop()
        self.forget(peer)
        peer.unsent = None
        peer.sock.close()  # epoll removes a closed descriptor by itself


def main(arguments: list[str]) -> None:
    """Run a server process: owner's pid, control descriptor, listening descriptor.

    The control socket brings the secret as a u32 length (0: no secret) and its bytes; one more byte, or the
    socket's end, ends the server.
    """
    owner, control_fd, listen_fd = map(int, arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # ranks that write a checkpoint on SIGTERM still need their store
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    control = socket.socket(fileno=control_fd)
    (size,) = U32.unpack(control.recv(4, socket.MSG_WAITALL))
    secret = control.recv(size, socket.MSG_WAITALL) if size else None
    server = Server(socket.socket(fileno=listen_fd), secret, owner)
    server.watch(control_fd, server.stop)
    gc.disable()  # there are no reference cycles here, and a collection over many keys takes milliseconds
    server.run()
