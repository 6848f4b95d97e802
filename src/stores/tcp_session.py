"""How does a client run its requests, from several threads and within deadlines?

One connection carries all short requests, in the order in which they were made. Who has to wait takes
another one, so that a waiting thread does not block the others; the short request before it (CHECK) has
an answer, so everything this process wrote is in place by then. A connection that fell out of step is
closed, and the next request opens a new one.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from stores.base import deadline_after
from stores.errors import DistNetworkError, lost_server, name_keys, no_answer
from stores.tcp_link import Link, connect
from stores.tcp_wire import CANCELED, OPCODES, WOKEN, Request

PATIENCE_S = 1.0  # the least that a short request's answer may take, however short the store's timeout
WAIT_LEAST_S = 0.05  # the same for the first answer of a request with a deadline
CANCEL_S, CANCEL_SHARE = (
    0.02,
    0.05,
)  # a canceled wait is confirmed within so long, or this share of its timeout
IDLE_LINKS = 4

T = TypeVar("T")
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


class Session:
    """Holds a store's connections to its server."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes | None,
        seconds: float,
        is_worth_it: Callable[[], bool] = lambda: True,
    ) -> None:
        self.host = host
        self.port = port
        self.secret = secret
        self.where = f"{host}:{port}"
        self.lock = threading.Lock()
        self.idle: list[Link] = []  # connections for waiting
        self.set_timeout(seconds)
        self.link: Link | None = connect(host, port, secret, seconds, self.limit, is_worth_it=is_worth_it)
        self.is_ours = self.link.is_ours
        self.pipelines = True  # CHECK and GET in one send; off for torch's legacy server
        _sessions.add(self)

    def set_timeout(self, seconds: float) -> None:
        """Set the store's timeout, and with it how long any answer may take."""
        self.seconds = seconds
        self.limit = None if seconds < 0 else max(seconds, PATIENCE_S)

    def call(self, verb: str, keys: Sequence[bytes], limit: float | None, use: Callable[[Link], T]) -> T:
        """Run one exchange on the connection for short requests.

        Args:
            verb: What is done, for messages.
            keys: With which keys, for messages.
            limit: How long the answer may take; None is for ever.
            use: Sends and reads.

        Returns:
            What ``use`` returns.

        Raises:
            DistNetworkError: When the connection ended or no answer came.
        """
        start = time.monotonic()
        if not self.lock.acquire(timeout=-1 if limit is None else limit):
            raise no_answer(f"{verb} {name_keys(keys)} (another thread waits for its own)", self.where, limit or 0)
        link = self.link
        try:
            if link is None:  # the last exchange failed, or this process was forked
                link = self.link = self.connect(limit)
            if link.limit != limit:
                link.set_limit(limit)
            return use(link)
        except BaseException as error:
            # also on an interrupt: the answer that is still to come would be taken for the next request's
            self.link = None
            if link is not None:
                link.close()
            self.explain(error, verb, keys, start)
            raise
        finally:
            self.lock.release()

    def connect(self, limit: float | None) -> Link:
        """Open one more connection to a server that was there before: no second try."""
        seconds = -1.0 if limit is None else limit
        return connect(self.host, self.port, self.secret, seconds, self.limit, is_worth_it=lambda: False)

    def explain(self, error: BaseException, verb: str, keys: Sequence[bytes], start: float) -> None:
        """Raise torch's error class for a failed exchange; return for errors that speak for themselves."""
        waited = time.monotonic() - start
        if isinstance(error, TimeoutError):
            raise no_answer(f"{verb} {name_keys(keys)}", self.where, waited) from error
        if isinstance(error, DistNetworkError):  # from opening the connection anew
            raise DistNetworkError(f"{verb} {name_keys(keys)}: {error}") from error
        if isinstance(error, OSError):
            raise lost_server(f"{verb} {name_keys(keys)}", self.where, waited, error) from error

    def ask(self, frame: bytes, size: int, verb: str, keys: Sequence[bytes] = ()) -> bytes:
        """Send a request and return its answer of a known size."""

        def use(link: Link) -> bytes:
            link.send(frame)
            data = link.recv(size)
            return data if len(data) == size else link.read(size, data)

        return self.call(verb, keys, self.limit, use)

    def first_limit(self, seconds: float) -> float | None:
        """Return how long the first answer of a request with a deadline may take."""
        if seconds < 0:
            return None
        return max(seconds, WAIT_LEAST_S) if seconds else PATIENCE_S

    def sleep(self, frame: bytes, verb: str, keys: Sequence[bytes], deadline: float | None, cancel_s: float) -> bool:
        """Wait on the server, on a connection of its own, until it wakes us or the deadline has come.

        Args:
            frame: A WAIT or BARRIER request.
            verb: What is done, for messages.
            keys: With which keys, for messages.
            deadline: On the monotonic clock; None for never.
            cancel_s: How long the answer to a cancel may take.

        Returns:
            Whether the server woke us.
        """
        start = time.monotonic()
        left = None if deadline is None else max(deadline - start, 0.001)
        try:
            link = self.idle.pop()
        except IndexError:
            try:
                link = self.connect(None if left is None else max(left, WAIT_LEAST_S))
            except DistNetworkError as error:
                self.explain(error, verb, keys, start)
                raise
        is_in_step = False
        try:
            link.set_limit(left)
            link.send(frame)
            try:
                link.read(1)
                is_in_step = True
                return True
            except TimeoutError:
                link.set_limit(cancel_s)
                link.send(OPCODES[Request.CANCEL_WAIT])
            try:
                reply = link.read(1)
                if reply == WOKEN:  # it was on its way: then the confirmation follows
                    link.read(1)
            except TimeoutError:
                return False
            is_in_step = True
            return reply != CANCELED
        except OSError as error:
            self.explain(error, verb, keys, start)
            raise
        finally:
            if is_in_step and len(self.idle) < IDLE_LINKS:
                self.idle.append(link)
            else:
                link.close()

    def cancel_time(self, seconds: float) -> float:
        """Return how long the answer to a cancel may take."""
        return max(CANCEL_S, seconds * CANCEL_SHARE)

    def deadline(self, seconds: float) -> float | None:
        """Return when a timeout is over; None for never."""
        return deadline_after(seconds)

    def __del__(self) -> None:
        if hasattr(self, "link"):
            self.close()

    def close(self) -> None:
        """Close all connections."""
        link, self.link = self.link, None
        for each in [*self.idle, *([link] if link else [])]:
            each.close()
        self.idle.clear()


def _forget_parents() -> None:
    # two processes on one connection would read each other's answers: a forked child opens its own
    for session in list(_sessions):
        session.lock = threading.Lock()
        session.close()


os.register_at_fork(after_in_child=_forget_parents)
