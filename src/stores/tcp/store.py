"""TCPStore: keys in a server process that all ranks reach over TCP.

get is one round trip: CHECK and GET in one send, and a wait only if the key is missing. torch's legacy server
closes the connection on a GET of a missing key; after that, get takes two.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistNetworkError, DistStoreError

from hpcdist_stores.base import DEFAULT_TIMEOUT, Store, Text, Timeout, as_amount, as_bytes, as_seconds
from hpcdist_stores.errors import NoAnswerError, barrier_timeout, queue_empty, wait_timeout, wrong_kind
from hpcdist_stores.integers import I64, U32, U64
from hpcdist_stores.tcp.connection import CHUNK, Connection
from hpcdist_stores.tcp.server.process import ServerProcess, listen, take_over
from hpcdist_stores.tcp.session import Session, answer_limit, cancel_limit, first_answer_limit
from hpcdist_stores.tcp.wire import MAX_KEY, MAX_VALUE, OPCODES, PRESENT, Request, pack_keys, pack_strings, string_parts

_pack = U64.pack
_i64 = I64.unpack_from
_R = OPCODES
_SET, _GET, _ADD = _R[Request.SET], _R[Request.GET], _R[Request.ADD]
_CHECK, _WAIT, _MULTI_GET = _R[Request.CHECK], _R[Request.WAIT], _R[Request.MULTI_GET]
_ONE = _pack(1)
_CHECK_ONE = _CHECK + _ONE
_INIT_KEY = b"init/"  # counts the clients; the only key without a leading "/"
_POLL_S = 0.01
MAX_PORT = 65535
# A multi_set goes out in requests of so many pairs, so that packing and storing may overlap, and of about so many
# bytes, because torch's server reads a frame from its beginning again for each 64 KiB that arrive: a MULTI_SET of
# 16 MiB took it 25 s.
_PAIRS = 256
_FRAME_BYTES = 1 << 18
_MOST_NAMED = 64  # after a wait for more keys than this, the error does not check which of them are missing

T = TypeVar("T")
_servers: weakref.WeakValueDictionary[int, ServerProcess] = weakref.WeakValueDictionary()


def _read_nothing(connection: Connection) -> None:
    """Read nothing: the request has no answer."""


def _read_byte(connection: Connection) -> bytes:
    return connection.read(1)


class TCPStore(Store):
    """Keeps keys in a server process that all ranks reach over TCP (c10d's TCPStore); threads may share it.

    Args:
        host_name: The server's name or address. The server listens on this address; for a name, on every
            interface, because a name may mean another address on another host ("localhost" means loopback only).
        port: Its port; with ``is_master`` 0 takes a free one, see ``port``.
        world_size: The number of clients; None, or a negative number as in older scripts of torch, if unknown.
        is_master: Whether this process has the server.
        timeout: The limit of connecting, get and wait.
        wait_for_workers: Whether the master waits until ``world_size`` clients have come.
        multi_tenant: Whether a second server of the same port in this process joins the first.
        master_listen_fd: A socket for the server to take over, bound to ``port``.
        use_libuv: False for a client of torch's legacy server: get takes two round trips, and there are no queues.
            Our own server has one kind.
        secret: Shared by all processes of the job: a client that does not prove it reaches no key (not in torch).

    Raises:
        ValueError: If ``world_size`` is 0.
        DistNetworkError: If the server cannot listen, or cannot be reached in time.
        DistStoreError: If fewer than ``world_size`` clients came in time.
    """

    _prefix = b"/"

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        secret: Text | None = None,
    ) -> None:
        super().__init__()
        if secret is not None and not secret:
            raise ValueError("secret: expected at least one byte (or None for no secret), got nothing")
        if not hasattr(port, "__index__") or not 0 <= port.__index__() <= MAX_PORT:
            raise wrong_kind("port", port, f"an int from 0 to {MAX_PORT}")
        if world_size == 0:
            raise ValueError("TCPStore world size cannot be 0: expected the number of clients, or None for any number")
        self.set_timeout(timeout)
        self._host = host_name
        self._use_libuv = use_libuv
        key = None if secret is None else as_bytes(secret, "secret")
        server = self._server = self._serve(port, key, multi_tenant, master_listen_fd) if is_master else None
        if server is None:
            self._session = Session(host_name, port, key, self._seconds)
        else:
            # if this process's own server has ended, a retry is useless
            self._session = Session(server.host, server.port, key, self._seconds, server.is_alive)
        self._session.pipelines = use_libuv
        self.where = self._session.where
        if wait_for_workers and world_size is not None and world_size > 0:
            self._count_in(world_size, is_master)

    def _serve(self, port: int, secret: bytes | None, is_shared: bool, fd: int | None) -> ServerProcess:
        server = _servers.get(port) if is_shared and port else None
        if server is None:
            try:
                server = ServerProcess(listen(self._host, port) if fd is None else take_over(fd, port), secret)
            except OSError as error:
                raise DistNetworkError(f"the server cannot listen at {self._host}:{port}: {error}") from error
            if is_shared:
                _servers[server.port] = server
        return server

    def _count_in(self, world_size: int, is_master: bool) -> None:
        start = time.monotonic()
        seconds = self._seconds
        count = self._add(_INIT_KEY, 1)
        while is_master and count < world_size:
            waited = time.monotonic() - start
            if 0 <= seconds <= waited:
                raise DistStoreError(
                    f"Timed out after {waited:.1f} seconds waiting for clients at {self.where}. "
                    f"{count}/{world_size} clients joined."
                )
            time.sleep(_POLL_S)
            count = self._add(_INIT_KEY, 0)

    # -- keys -------------------------------------------------------------------------------------------

    @property
    def _limit(self) -> float | None:
        return answer_limit(self._seconds)

    def _ask(self, frame: bytes, size: int, verb: str, keys: Sequence[bytes] = ()) -> bytes:
        return self._session.call(verb, keys, self._limit, frame, lambda connection: connection.read(size))

    def set(self, key: Text, value: Text) -> None:
        """Store a value; the server does not confirm it, the next request that has an answer does."""
        self._send(_SET, "set", self._name(key), as_bytes(value, "value"))

    def append(self, key: Text, value: Text) -> None:
        """Append to a value (not confirmed either); a missing key counts as empty."""
        self._send(_R[Request.APPEND], "append to", self._name(key), as_bytes(value, "value"))

    def _send(self, request: bytes, verb: str, key: bytes, value: bytes) -> None:
        frame = request + _pack(len(key)) + key + _pack(len(value)) + value
        if len(frame) > MAX_KEY:
            self._session.check_sizes((key,), (value,))
        self._session.call(verb, (key,), self._limit, frame, _read_nothing)

    def get(self, key: Text) -> bytes:
        name = self._name(key)
        packed = _pack(len(name)) + name
        return self._get("get", (name,), _ONE + packed, _GET + packed, Connection.read_value)

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        names = self._names(keys)
        body = pack_keys(names)
        count = len(names)
        return self._get("multi_get", names, body, _MULTI_GET + body, lambda connection: connection.read_values(count))

    def _get(self, verb: str, keys: Sequence[bytes], body: bytes, frame: bytes, read: Callable[[Connection], T]) -> T:
        """Send a request's frame, once the keys (packed in ``body``) are there, and return its answer."""
        session, check = self._session, _CHECK + body

        def read_both(connection: Connection) -> T | None:
            is_there = connection.read(1) == PRESENT
            value = read(connection)
            return value if is_there else None

        def ask_once(limit: float | None) -> T | None:
            if (session.is_ours or session.pipelines) and len(frame) <= CHUNK:
                try:
                    return session.call(verb, keys, limit, check + frame, read_both)
                except DistNetworkError as error:
                    if session.is_ours or isinstance(error, NoAnswerError):
                        raise
                session.pipelines = False  # with torch's legacy server two steps work, from now on
            if session.call(verb, keys, limit, check, _read_byte) != PRESENT:
                return None
            return session.call(verb, keys, limit, frame, read)

        return self._when_there(verb, keys, body, ask_once)

    def _when_there(
        self, verb: str, keys: Sequence[bytes], body: bytes, ask_once: Callable[[float | None], T | None]
    ) -> T:
        """Call ``ask_once`` until its result is not None, and wait for the keys (packed in ``body``) in between."""
        seconds = left = self._seconds
        start = time.monotonic()
        try:
            # a key may be deleted between the wake-up and the next question
            while (value := ask_once(first_answer_limit(left))) is None:
                self._sleep(verb, keys, body, seconds, start)
                left = -1.0 if seconds < 0 else max(start + seconds - time.monotonic(), 0.001)
        except NoAnswerError as error:
            raise wait_timeout(keys, seconds, time.monotonic() - start, self.where, f"; {error}") from error
        return value

    def _sleep(self, verb: str, keys: Sequence[bytes], body: bytes, seconds: float, start: float) -> None:
        deadline = None if seconds < 0 else start + seconds
        is_over = deadline is not None and time.monotonic() >= deadline
        if is_over or not self._session.sleep(_WAIT + body, verb, keys, seconds, deadline):
            raise wait_timeout(self._missing(keys, seconds), seconds, time.monotonic() - start, self.where)

    def _missing(self, keys: Sequence[bytes], seconds: float) -> Sequence[bytes]:
        """Return the keys missing after a wait of so many seconds; all keys if the server does not answer at once."""
        if len(keys) == 1 or len(keys) > _MOST_NAMED:
            return keys
        frame = b"".join(_CHECK_ONE + pack_strings(key) for key in keys)
        try:
            answers = self._session.call("check", keys, cancel_limit(seconds), frame, lambda c: c.read(len(keys)))
        except DistNetworkError:
            return keys
        return [key for key, answer in zip(keys, answers, strict=True) if bytes((answer,)) != PRESENT] or keys

    def add(self, key: Text, amount: int) -> int:
        """Add to a decimal counter and return the total.

        Raises:
            DistNetworkError: If the value is not a number: servers close the connection then.
        """
        return self._add(self._name(key), as_amount(amount))

    def _add(self, key: bytes, amount: int) -> int:
        frame = _ADD + _pack(len(key)) + key + I64.pack(amount)
        return _i64(self._ask(frame, 8, "add to", (key,)))[0]

    def check(self, keys: Sequence[Text]) -> bool:
        names = self._names(keys)
        return self._ask(_CHECK + pack_keys(names), 1, "check", names) == PRESENT

    def wait_until(self, names: list[bytes], seconds: float) -> None:
        body = pack_keys(names)
        start = time.monotonic()
        limit = first_answer_limit(seconds)
        try:
            if self._session.call("wait for", names, limit, _CHECK + body, _read_byte) != PRESENT:
                self._sleep("wait for", names, body, seconds, start)
        except NoAnswerError as error:
            raise wait_timeout(names, seconds, time.monotonic() - start, self.where, f"; {error}") from error

    def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        name = self._name(key)
        before, after = as_bytes(expected, "expected"), as_bytes(desired, "desired")
        frame = _R[Request.COMPARE_SET] + pack_strings(name, before, after)
        if len(frame) > MAX_KEY:
            self._session.check_sizes((name,), (before, after))
        return self._session.call("compare_set", (name,), self._limit, frame, Connection.read_value)

    def delete_key(self, key: Text) -> bool:
        name = self._name(key)
        frame = _R[Request.DELETE_KEY] + pack_strings(name)
        return _i64(self._ask(frame, 8, "delete_key", (name,)))[0] == 1

    def num_keys(self) -> int:
        """Return the number of keys, the count of clients included."""
        return _i64(self._ask(_R[Request.NUM_KEYS], 8, "num_keys"))[0]

    def list_keys(self) -> list[str]:
        def read(connection: Connection) -> list[bytes]:
            return connection.read_values(_i64(connection.read(8))[0])

        return self._listed(self._session.call("list_keys", (), self._limit, _R[Request.LIST_KEYS], read))

    def multi_set(self, keys: Sequence[Text], values: Sequence[Text]) -> None:
        """Store several values (not confirmed, as with set)."""
        names, given = self._pairs(keys, values)
        if not names:
            return
        session, limit = self._session, self._limit
        size = sum(map(len, given))
        if size > MAX_VALUE or max(map(len, names)) > MAX_KEY:  # one of them may be too long
            session.check_sizes(names, given)
        step = max(min(_PAIRS, _FRAME_BYTES // (size // len(given) + 1)), 1)
        for at in range(0, len(names), step):
            some = names[at : at + step]
            frame = (_R[Request.MULTI_SET], _pack(len(some)), *string_parts(some, given[at : at + step]))
            session.call("multi_set", names, limit, b"".join(frame), _read_nothing)

    def has_extended_api(self) -> bool:
        return True

    # -- queues, barrier --------------------------------------------------------------------------------

    def _queue_key(self, key: Text) -> bytes:
        if not self._use_libuv:
            raise NotImplementedError(
                "a TCPStore made with use_libuv=False has no queues, because torch's legacy server has none; "
                "make it with use_libuv=True, the default, or use a HashStore"
            )
        return self._name(key)

    def queue_push(self, key: Text, value: Text) -> None:
        """Put a value at the end of a queue (not confirmed, as with set)."""
        self._send(_R[Request.QUEUE_PUSH], "queue_push to", self._queue_key(key), as_bytes(value, "value"))

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        name = self._queue_key(key)
        packed = pack_strings(name)

        def read(connection: Connection) -> bytes | None:
            length = _i64(connection.read(8))[0]
            return connection.read_value() if length else None

        def pop(limit: float | None) -> bytes | None:
            return self._session.call("queue_pop from", (name,), limit, _R[Request.QUEUE_POP] + packed, read)

        if block:
            return self._when_there("queue_pop from", (name,), _ONE + packed, pop)
        if (value := pop(self._limit)) is None:
            raise queue_empty(name, self.where)
        return value

    def queue_len(self, key: Text) -> int:
        name = self._queue_key(key)
        return _i64(self._ask(_R[Request.QUEUE_LEN] + pack_strings(name), 8, "queue_len of", (name,)))[0]

    def barrier(self, key: Text, world_size: int, timeout: Timeout | None = None) -> None:
        seconds = self._seconds if timeout is None else as_seconds(timeout)
        name = self._name(key)
        session = self._session
        start = time.monotonic()
        deadline = None if seconds < 0 else start + seconds
        ping = _R[Request.PING] + U32.pack(1)
        frame = _R[Request.BARRIER] + pack_strings(name) + I64.pack(world_size)
        note = ""
        try:
            # its answer means that earlier writes are in place; the barrier has a connection of its own
            session.call("barrier", (name,), first_answer_limit(seconds), ping, lambda c: c.read(4))
            if session.sleep(frame, "barrier", (name,), seconds, deadline):
                return
        except NoAnswerError as error:
            note = f"; {error}"
        raise barrier_timeout(as_bytes(key), world_size, seconds, time.monotonic() - start, self.where, note)

    # -- the store itself -------------------------------------------------------------------------------

    def clone(self) -> TCPStore:
        """Return a store with connections of its own to the same server, which lives as long as either."""
        old = self._session
        twin = TCPStore(old.host, old.port, timeout=self.timeout, use_libuv=self._use_libuv, secret=old.secret)
        twin._host, twin._server, twin._session.pipelines = self._host, self._server, old.pipelines
        return twin

    @property
    def host(self) -> str:
        return self._host

    @property
    def port(self) -> int:
        return self._session.port

    @property
    def libuvBackend(self) -> bool:
        """Return the value of ``use_libuv`` (c10d's name)."""
        return self._use_libuv
