"""How do processes share keys over TCP?

get is one round trip: CHECK and GET in one send, and a wait only where the key is not there yet. torch's
legacy server closes the connection on a GET of a missing key; once that has happened, get takes two.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from stores.base import DEFAULT_TIMEOUT, Store, Text, Timeout, as_amount, as_bytes, as_seconds
from stores.errors import (
    DistNetworkError,
    DistStoreError,
    barrier_timeout,
    queue_empty,
    wait_timeout,
)
from stores.server_process import ServerProcess, listen, take_over
from stores.tcp_frames import check_sizes, exchange, pack_keys, pack_string, pop, wire_key, wire_keys
from stores.tcp_link import CHUNK, Link
from stores.tcp_session import Session
from stores.tcp_wire import I64, MAX_KEYS, OPCODES, PRESENT, U32, U64, Request

_pack = U64.pack
_i64 = I64.unpack_from
_R = OPCODES
_SET, _GET, _ADD = _R[Request.SET], _R[Request.GET], _R[Request.ADD]
_CHECK, _WAIT, _MULTI_GET = _R[Request.CHECK], _R[Request.WAIT], _R[Request.MULTI_GET]
_ONE = _pack(1)
_CHECK_ONE = _CHECK + _ONE
_INIT_KEY = b"init/"  # counts the clients; the only key without a leading "/"
_POLL_S = 0.01
_EVERY_INTERFACE = {
    "": "localhost",
    "0.0.0.0": "127.0.0.1",
    "::": "::1",
}  # where the server's own client goes

T = TypeVar("T")
_servers: weakref.WeakValueDictionary[int, ServerProcess] = weakref.WeakValueDictionary()


class TCPStore(Store):
    """Keeps keys in a server process that all ranks reach over TCP (c10d's TCPStore); safe between threads.

    Args:
        host_name: The server's name or address; the server listens on this address and on no other.
        port: Its port; with ``is_master`` 0 takes a free one, see ``port``.
        world_size: How many clients to expect; None when that is not known.
        is_master: Whether this process has the server.
        timeout: How long connecting, get and wait may take.
        wait_for_workers: Whether the master waits until ``world_size`` clients have come.
        multi_tenant: Whether a second server of the same port in this process joins the first.
        master_listen_fd: A bound socket for the server to take over.
        use_libuv: Accepted for torch's callers; our server has one kind, and our client talks to any.
        secret: Shared by all processes of the job: who does not prove it reaches no key (ours alone).

    Raises:
        DistNetworkError: When the server cannot listen, or cannot be reached in time.
        DistStoreError: When fewer than ``world_size`` clients came in time.
    """

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
        self._seconds = as_seconds(timeout)
        self._host = host_name
        self._use_libuv = use_libuv
        key = None if secret is None else as_bytes(secret, "secret")
        self._server = self._serve(port, key, multi_tenant, master_listen_fd) if is_master else None
        host = host_name
        if self._server is not None:
            port = self._server.port
            host = _EVERY_INTERFACE.get(host, host)
        # the owner of a server that cannot start need not try for long
        is_worth_it = self._server.is_alive if self._server is not None else lambda: True
        self._session = Session(host, port, key, self._seconds, is_worth_it)
        self._session.pipelines = use_libuv
        self.where = self._session.where
        if world_size is not None and wait_for_workers:
            self._count_in(world_size, is_master)

    def _serve(self, port: int, secret: bytes | None, is_shared: bool, fd: int | None) -> ServerProcess:
        server = _servers.get(port) if is_shared and port else None
        if server is None:
            try:
                server = ServerProcess(listen(self._host, port) if fd is None else [take_over(fd)], secret)
            except OSError as error:
                raise DistNetworkError(f"the server cannot listen at {self._host}:{port}: {error}") from error
            if is_shared:
                _servers[server.port] = server
        return server

    def _count_in(self, world_size: int, is_master: bool) -> None:
        start = time.monotonic()
        count = self._add(_INIT_KEY, 1)
        while is_master and count < world_size:
            waited = time.monotonic() - start
            if 0 <= self._seconds <= waited:
                raise DistStoreError(
                    f"Timed out after {waited:.1f} seconds waiting for clients at {self.where}. "
                    f"{count}/{world_size} clients joined."
                )
            time.sleep(_POLL_S)
            count = self._add(_INIT_KEY, 0)

    # -- keys -------------------------------------------------------------------------------------------

    def set(self, key: Text, value: Text) -> None:
        """Store a value; the server does not confirm it, the next request that has an answer does."""
        self._tell(_SET, "set", wire_key(key), as_bytes(value, "value"))

    def append(self, key: Text, value: Text) -> None:
        """Put a value behind the one that is there (not confirmed either)."""
        self._tell(_R[Request.APPEND], "append to", wire_key(key), as_bytes(value, "value"))

    def _tell(self, request: bytes, verb: str, key: bytes, value: bytes) -> None:
        session = self._session
        if session.is_ours:
            check_sizes(key, value)
        frame = request + _pack(len(key)) + key + _pack(len(value)) + value
        session.call(verb, (key,), session.limit, lambda link: link.send(frame))

    def get(self, key: Text) -> bytes:
        """Return a value, waiting for the key up to the store's timeout.

        Raises:
            DistStoreError: When the key did not come in time.
            DistNetworkError: When the server is gone, at once.
        """
        name = wire_key(key)
        packed = _pack(len(name)) + name
        session = self._session
        both = _CHECK_ONE + packed + _GET + packed

        def ask_once(link: Link) -> bytes | None:
            if link.is_ours or session.pipelines:
                link.send(both)
                data = link.recv(CHUNK)
                value = link.read_value(data[1:] if data else link.read(1)[1:])
                return value if data[:1] == PRESENT else None
            link.send(_CHECK_ONE + packed)
            if link.read(1) != PRESENT:
                return None
            link.send(_GET + packed)
            return link.read_value()

        return self._get_when_there("get", (name,), _ONE + packed, ask_once)

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        """Return several values, waiting for all keys."""
        names = wire_keys(keys)
        body = pack_keys(names)
        count = len(names)
        session = self._session

        def ask_once(link: Link) -> list[bytes] | None:
            if (link.is_ours or session.pipelines) and len(body) <= CHUNK:
                link.send(_CHECK + body + _MULTI_GET + body)
                data = link.recv(CHUNK) or link.read(1)
                values = link.read_values(count, data[1:])
                return values if data[:1] == PRESENT else None
            link.send(_CHECK + body)
            if link.read(1) != PRESENT:
                return None
            link.send(_MULTI_GET + body)
            return link.read_values(count)

        return self._get_when_there("multi_get", names, body, ask_once)

    def _get_when_there(self, verb: str, keys: Sequence[bytes], body: bytes, ask_once: Callable[[Link], T | None]) -> T:
        session = self._session
        seconds = self._seconds
        limit = session.first_limit(seconds)
        try:
            value = session.call(verb, keys, limit, ask_once)
        except DistNetworkError:
            if session.is_ours or not session.pipelines:
                raise
            session.pipelines = False  # torch's legacy server: ask in two steps from now on
            value = session.call(verb, keys, limit, ask_once)
        if value is None:
            start = time.monotonic()
            deadline = session.deadline(seconds)
            while value is None:  # a key may be deleted between the wake-up and the second question
                self._sleep(verb, keys, body, seconds, start, deadline)
                value = session.call(verb, keys, limit, ask_once)
        return value

    def _sleep(
        self,
        verb: str,
        keys: Sequence[bytes],
        body: bytes,
        seconds: float,
        start: float,
        deadline: float | None,
    ) -> None:
        session = self._session
        expired = deadline is not None and time.monotonic() >= deadline
        if expired or not session.sleep(_WAIT + body, verb, keys, deadline, session.cancel_time(seconds)):
            raise wait_timeout(self._missing(keys), seconds, time.monotonic() - start, self.where)

    def _missing(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Name the keys that are not there, for a message; all of them when that is not to be had at once."""
        if len(keys) == 1 or len(keys) > 64:
            return keys
        frame = b"".join(_CHECK_ONE + pack_string(key) for key in keys)
        session = self._session
        try:
            answers = session.call("check", keys, session.cancel_time(0), lambda link: exchange(link, frame, len(keys)))
        except DistNetworkError:
            return keys
        return [key for key, answer in zip(keys, answers, strict=True) if bytes((answer,)) != PRESENT] or keys

    def add(self, key: Text, amount: int) -> int:
        """Add to a decimal counter and return the total.

        Raises:
            DistNetworkError: When the value is no number: servers close the connection then.
        """
        return self._add(wire_key(key), as_amount(amount))

    def _add(self, key: bytes, amount: int) -> int:
        frame = _ADD + _pack(len(key)) + key + I64.pack(amount)
        return _i64(self._session.ask(frame, 8, "add to", (key,)))[0]

    def check(self, keys: Sequence[Text]) -> bool:
        """Return whether all keys (or queues that are not empty) are there, without waiting."""
        names = wire_keys(keys)
        return self._session.ask(_CHECK + pack_keys(names), 1, "check", names) == PRESENT

    def wait_until(self, keys: list[bytes], seconds: float) -> None:
        """Wait until all keys are there."""
        names = [b"/" + key for key in keys]
        body = pack_keys(names)
        session = self._session
        limit = session.first_limit(seconds)
        start = time.monotonic()
        if session.call("wait for", names, limit, lambda link: exchange(link, _CHECK + body, 1)) != PRESENT:
            self._sleep("wait for", names, body, seconds, start, session.deadline(seconds))

    def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        """Store ``desired`` if the value is ``expected``, or the key is missing and ``expected`` empty."""
        name = wire_key(key)
        before, after = as_bytes(expected, "expected"), as_bytes(desired, "desired")
        session = self._session
        if session.is_ours:
            check_sizes(name, before, after)
        frame = b"".join((_R[Request.COMPARE_SET], pack_string(name), pack_string(before), pack_string(after)))

        def use(link: Link) -> bytes:
            link.send(frame)
            return link.read_value()

        return session.call("compare_set", (name,), session.limit, use)

    def delete_key(self, key: Text) -> bool:
        """Delete a key and return whether it was there."""
        name = wire_key(key)
        frame = _R[Request.DELETE_KEY] + pack_string(name)
        return _i64(self._session.ask(frame, 8, "delete_key", (name,)))[0] == 1

    def num_keys(self) -> int:
        """Return the number of keys, the count of clients included."""
        return _i64(self._session.ask(_R[Request.NUM_KEYS], 8, "num_keys"))[0]

    def list_keys(self) -> list[str]:
        """Return all keys."""
        session = self._session

        def use(link: Link) -> list[bytes]:
            link.send(_R[Request.LIST_KEYS])
            return link.read_values(_i64(link.read(8))[0])

        keys = session.call("list_keys", (), session.limit, use)
        return [key[1:].decode() for key in keys if key.startswith(b"/")]

    def multi_set(self, keys: Sequence[Text], values: Sequence[Text]) -> None:
        """Store several values (not confirmed, as with set)."""
        pairs = [(b"/" + key, value) for key, value in self.as_pairs(keys, values)]
        session = self._session
        if session.is_ours:
            if len(pairs) > MAX_KEYS:
                raise DistStoreError(f"multi_set of {len(pairs)} keys: the server's limit is {MAX_KEYS}")
            for key, value in pairs:
                check_sizes(key, value)
        parts = [_R[Request.MULTI_SET], _pack(len(pairs))]
        for key, value in pairs:
            parts += (_pack(len(key)), key, _pack(len(value)), value)
        frame = b"".join(parts)
        session.call("multi_set", [key for key, _ in pairs], session.limit, lambda link: link.send(frame))

    # -- queues, barrier --------------------------------------------------------------------------------

    def queue_push(self, key: Text, value: Text) -> None:
        """Put a value at the end of a queue (not confirmed, as with set)."""
        self._tell(_R[Request.QUEUE_PUSH], "queue_push to", wire_key(key), as_bytes(value, "value"))

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        """Take the oldest value of a queue.

        Raises:
            QueueEmptyError: When there is none and ``block`` is False; never when it is True.
            DistStoreError: When none came within the store's timeout.
        """
        name = wire_key(key)
        packed = pack_string(name)
        session = self._session
        if not block:
            value = session.call("queue_pop from", (name,), session.limit, lambda link: pop(link, packed))
            if value is None:
                raise queue_empty(name, self.where)
            return value
        return self._get_when_there("queue_pop from", (name,), _ONE + packed, lambda link: pop(link, packed))

    def queue_len(self, key: Text) -> int:
        """Return how many values a queue holds."""
        name = wire_key(key)
        frame = _R[Request.QUEUE_LEN] + pack_string(name)
        return _i64(self._session.ask(frame, 8, "queue_len of", (name,)))[0]

    def barrier(self, key: Text, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until ``world_size`` callers have come to the same key; who comes later passes at once."""
        seconds = self._seconds if timeout is None else as_seconds(timeout)
        name = wire_key(key)
        session = self._session
        start = time.monotonic()
        deadline = session.deadline(seconds)
        # what was written before is in place once this has an answer; the barrier has a connection of its own
        nonce = U32.pack(1)
        session.call(
            "barrier",
            (name,),
            session.first_limit(seconds),
            lambda link: exchange(link, _R[Request.PING] + nonce, 4),
        )
        frame = _R[Request.BARRIER] + pack_string(name) + I64.pack(world_size)
        if not session.sleep(frame, "barrier", (name,), deadline, session.cancel_time(seconds)):
            raise barrier_timeout(as_bytes(key), world_size, seconds, time.monotonic() - start, self.where)

    # -- the store itself -------------------------------------------------------------------------------

    def set_timeout(self, timeout: Timeout) -> None:
        """Set how long get and wait may take."""
        super().set_timeout(timeout)
        self._session.set_timeout(self._seconds)

    def clone(self) -> TCPStore:
        """Return a store with connections of its own to the same server, which lives as long as either."""
        twin = TCPStore.__new__(TCPStore)
        Store.__init__(twin)
        twin._seconds = self._seconds
        twin._host, twin._use_libuv, twin._server = self._host, self._use_libuv, self._server
        old = self._session
        twin._session = Session(old.host, old.port, old.secret, self._seconds)
        twin._session.pipelines = old.pipelines
        twin.where = self.where
        return twin

    @property
    def host(self) -> str:
        """Return the server's host as it was given."""
        return self._host

    @property
    def port(self) -> int:
        """Return the server's port."""
        return self._session.port

    @property
    def libuvBackend(self) -> bool:
        """Return what was given as use_libuv (c10d's name); our server has one kind."""
        return self._use_libuv
