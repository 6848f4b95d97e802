"""Proxy before a store's server that delays its replies: a server on a busy host or behind a slow network."""

import contextlib
import random
import socket
import threading
import time


class SlowProxy:
    """Forwards connections to a server on loopback; ``delay()`` is how many seconds the next reply is held."""

    def __init__(self, port):
        self.server_port = port
        self.delay = lambda: 0.0
        self.sockets = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def hold(self, most, *, least=None, seed=1):
        """Hold every reply for so many seconds, or for a random time between two."""
        chance = random.Random(seed)
        self.delay = (lambda: most) if least is None else (lambda: chance.uniform(least, most))

    def accept(self):
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.server_port))
                self.sockets += (client, server)
                for source, target, is_reply in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self.forward, args=(source, target, is_reply), daemon=True).start()

    def forward(self, source, target, is_reply):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_reply:
                    time.sleep(self.delay())
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self):
        for each in (self.listener, *self.sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
