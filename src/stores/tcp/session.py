"""Session: a client's connections to its server, shared by several threads, with a limit on each request.

One connection carries all short requests, in the order in which they were made. A request that waits takes
another one, so that a waiting thread does not block the others; the short request before it (CHECK) has
been answered, so all earlier writes of this process are in place by then. A connection that is out of step is
closed, and the next request opens a new one.

Threads that find the connection in use put their requests in a queue. The thread that has it hands it to the first
of them, and does not take it again before that. The next one sends what is queued with its own request, reads all
answers, and hands each thread its own: one round trip and one change of threads for several requests. Only requests
with the same limit go together, so that none fails before its time, and only to our server: if it closes the
connection at a request, it has not carried out the following ones, and they are sent again.

A session knows no timeout of its own: each call brings its limit.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, DistStoreError

from hpcdist_stores.errors import NoAnswerError, ServerClosedError, lost_server, name_keys
from hpcdist_stores.tcp.connection import Connection, connect, open_connection
from hpcdist_stores.tcp.wire import MAX_KEY, MAX_VALUE, OPCODES, WOKEN, Request

PATIENCE_S = 1.0  # seconds that a short request's answer may take at least, even if the store's timeout is shorter
FIRST_ANSWER_S = 0.05  # the same for the first answer of a request with a deadline
CANCEL_S, CANCEL_SHARE = 0.02, 0.05  # seconds, or share of its timeout, within which a canceled wait is confirmed
IDLE_CONNECTIONS = 4
SENT_TOGETHER = 16 * 1024  # bytes of several threads' requests in one send: the server reads them together
LATE_SHARE = 1 / 16  # a thread that has waited for this share of its limit sends only its own request

T = TypeVar("T")
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def answer_limit(seconds: float) -> float | None:
    """Return the limit of a short request's answer, for a store's timeout."""
    return None if seconds < 0 else max(seconds, PATIENCE_S)


def first_answer_limit(seconds: float) -> float | None:
    """Return the limit of the first answer of a request with a deadline."""
    return max(seconds, FIRST_ANSWER_S) if seconds > 0 else answer_limit(seconds)


def cancel_limit(seconds: float) -> float:
    """Return the limit of the answer to a cancel."""
    return max(CANCEL_S, seconds * CANCEL_SHARE)


def _until(deadline: float | None, least: float) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), least)


class _Request:
    """Holds the request of a thread that waits for the connection, and its result."""

    __slots__ = ("answer", "error", "frame", "has_connection", "is_done", "is_sent", "limit", "read", "turn")

    def __init__(self, frame: bytes, read: Callable[[Connection], Any], limit: float | None) -> None:
        self.frame = frame
        self.read = read
        self.limit = limit
        self.turn = threading.Lock()  # released once, by the thread that takes the request off the queue
        self.turn.acquire()
        self.has_connection = False  # its thread has the connection, and must send it itself
        self.is_sent = False
        self.is_done = False
        self.answer: Any = None
        self.error: Exception | None = None

    def fail(self, error: BaseException) -> None:
        """Let the thread raise this error."""
        if not isinstance(error, Exception):
            error = ConnectionAbortedError("the thread that sent the request was interrupted")
        self.error = error
        self.turn.release()


def _fail(requests: list[_Request], error: BaseException) -> None:
    """Fail requests behind one that failed, or have them sent again if the server has not carried them out."""
    for each in requests:
        if isinstance(error, ServerClosedError):
            each.turn.release()
        else:
            each.fail(error)


class Session:
    """Holds a store's connections to its server; the arguments are those of ``connect``."""

    def __init__(
        self, host: str, port: int, secret: bytes | None, seconds: float, is_worth_it: Callable[[], bool] = lambda: True
    ) -> None:
        self.host = host
        self.port = port
        self.secret = secret
        self.where = f"{host}:{port}"
        self.lock = threading.Lock()  # held by the thread that has the connection
        self.queue: deque[_Request] = deque()  # requests of threads that wait for the lock's holder; empty if none
        self.guard = threading.Lock()  # held, never for long, to use the queue and to release the lock
        self.idle: list[Connection] = []  # connections for waiting
        self.connection: Connection | None = connect(host, port, secret, seconds, is_worth_it)
        self.is_ours = self.connection.is_ours
        self.pipelines = True  # CHECK and GET in one send; off for torch's legacy server
        _sessions.add(self)

    def check_sizes(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Raise for sizes at which our server would close the connection."""
        if not self.is_ours:
            return
        if (size := max(map(len, keys))) > MAX_KEY:
            raise DistStoreError(f"a key of {size} bytes: the server's limit is {MAX_KEY}")
        sizes = list(map(len, values))
        if (size := max(sizes)) > MAX_VALUE:
            key = name_keys([keys[sizes.index(size) % len(keys)]])  # one key may have two values
            raise DistStoreError(f"{key}: a value of {size} bytes: the server's limit is {MAX_VALUE}")

    def call(
        self, verb: str, keys: Sequence[bytes], limit: float | None, frame: bytes, read: Callable[[Connection], T]
    ) -> T:
        """Send a request's frame on the connection for short requests, and return the answer that ``read`` reads.

        The limit includes the wait for the connection. Verb and keys are for messages.
        """
        start = time.monotonic()
        left = limit
        while not self.lock.acquire(blocking=False):
            request = _Request(frame, read, limit)
            is_woken = self._wait(request, left)
            if request.error is not None:
                self._explain(request.error, verb, keys, start)
                raise request.error
            if request.is_done:
                return request.answer
            waited = time.monotonic() - start
            if not is_woken and not request.has_connection:
                note = "" if request.is_sent else " (another thread is waiting for its own answer)"
                raise NoAnswerError(f"{verb} {name_keys(keys)}{note}", self.where, waited)
            left = None if limit is None else max(limit - waited, 0.0)
            if request.has_connection:
                break
        if left is not limit and limit is not None and left is not None and left < limit * (1 - LATE_SHARE):
            limit = max(left, FIRST_ANSWER_S)  # a unique limit: it is sent alone
        connection = self.connection
        others: list[_Request] = []
        try:
            if connection is None:  # after a failed exchange, or in a forked child
                connection = self.connection = open_connection(self.host, self.port, self.secret, limit)
            if connection.limit != limit:
                connection.set_limit(limit)
            if self.queue and connection.is_ours:
                others = self._take_others(limit, len(frame))
                frame = b"".join((frame, *(each.frame for each in others)))
            connection.send(frame)
            answer = read(connection)
            if others:
                self._answer(others, connection)
            return answer
        except BaseException as error:
            # also on an interrupt: the pending answer would be read as the next request's
            self.connection = None
            if connection is not None:
                connection.close()
            _fail([each for each in others if not each.is_done], error)
            self._explain(error, verb, keys, start)
            raise
        finally:
            self._hand_on()

    def _wait(self, request: _Request, seconds: float | None) -> bool:
        """Wait until the thread that has the connection wakes this one; return False at the end of its time."""
        with self.guard:
            if self.lock.acquire(blocking=False):  # it was released meanwhile
                request.has_connection = True
                return True
            self.queue.append(request)
        try:
            if request.turn.acquire(timeout=-1 if seconds is None else seconds):
                return True
            self._withdraw(request)
            return False
        except BaseException:  # an interrupt
            self._withdraw(request)
            if request.has_connection:
                self._hand_on()
            raise

    def _withdraw(self, request: _Request) -> None:
        """Take a request off the queue, unless it has been sent or its thread has the connection now."""
        with self.guard, contextlib.suppress(ValueError):
            self.queue.remove(request)

    def _hand_on(self) -> None:
        """Hand the connection to the thread that has waited longest, or release it."""
        with self.guard:
            if self.queue:
                request = self.queue.popleft()
                request.has_connection = True
                request.turn.release()
            else:
                self.lock.release()

    def _take_others(self, limit: float | None, size: int) -> list[_Request]:
        """Take waiting requests with this limit off the queue, as many as may be sent with one of this size."""
        others: list[_Request] = []
        # an interrupt, which reaches only the main thread, must not lose the others' answers
        if threading.current_thread() is threading.main_thread():
            return others
        with self.guard:
            while self.queue:
                each = self.queue[0]
                size += len(each.frame)
                if each.limit != limit or size > SENT_TOGETHER:
                    break
                each.is_sent = True
                others.append(self.queue.popleft())
        return others

    def _answer(self, requests: list[_Request], connection: Connection) -> None:
        """Read the answers to other threads' requests; an error is raised in their threads."""
        for i, each in enumerate(requests):
            try:
                each.answer = each.read(connection)
            except Exception as error:
                self.connection = None
                connection.close()
                each.fail(error)
                _fail(requests[i + 1 :], error)
                break
            each.is_done = True
            each.turn.release()

    def _explain(self, error: BaseException, verb: str, keys: Sequence[bytes], start: float) -> None:
        """Raise torch's error class for a failed exchange; return for errors that explain themselves."""
        waited = time.monotonic() - start
        what = f"{verb} {name_keys(keys)}"
        if isinstance(error, TimeoutError):
            raise NoAnswerError(what, self.where, waited) from error
        if isinstance(error, DistNetworkError):  # from reopening the connection
            raise DistNetworkError(f"{what}: {error}") from error
        if isinstance(error, OSError):
            raise lost_server(what, self.where, waited, error) from error

    def sleep(self, frame: bytes, verb: str, keys: Sequence[bytes], seconds: float, deadline: float | None) -> bool:
        """Send a WAIT or BARRIER on a connection of its own, and wait until the server wakes us or the deadline comes.

        The timeout in seconds ends at the deadline (None: never). Returns whether the server woke us; False always
        means that the deadline has come, in whatever state the server or the connection is.
        """
        start = time.monotonic()
        connection: Connection | None = None
        is_in_step = False
        try:
            try:
                connection = self.idle.pop()
            except IndexError:
                limit = _until(deadline, FIRST_ANSWER_S)
                connection = open_connection(self.host, self.port, self.secret, limit)
            connection.set_limit(_until(deadline, 0.001))
            connection.send(frame)
            connection.read(1)
            is_in_step = True
            return True
        except (OSError, DistNetworkError) as error:
            if deadline is None or time.monotonic() < deadline:
                self._explain(error, verb, keys, start)
            is_woken = None
            if isinstance(error, TimeoutError) and connection is not None:
                is_woken = _cancel(connection, cancel_limit(seconds))
                is_in_step = is_woken is not None
            return bool(is_woken)
        finally:
            if connection is not None:
                if is_in_step and len(self.idle) < IDLE_CONNECTIONS:
                    self.idle.append(connection)
                else:
                    connection.close()

    def __del__(self) -> None:
        if hasattr(self, "connection"):
            self.close()

    def close(self) -> None:
        connection, self.connection = self.connection, None
        for each in [*self.idle, *([connection] if connection else [])]:
            each.close()
        self.idle.clear()


def _cancel(connection: Connection, limit: float) -> bool | None:
    """End a wait; return whether the server's wake-up was under way, None if it did not confirm the end."""
    try:
        connection.set_limit(limit)
        reply = connection.exchange(OPCODES[Request.CANCEL_WAIT], 1)
        if reply == WOKEN:  # the confirmation follows it
            connection.read(1)
        return reply == WOKEN
    except OSError:
        return None


def _forget_parents() -> None:
    # two processes on one connection would read each other's answers: a forked child opens its own
    for session in list(_sessions):
        session.lock, session.guard = threading.Lock(), threading.Lock()
        session.queue = deque()
        session.close()


os.register_at_fork(after_in_child=_forget_parents)
