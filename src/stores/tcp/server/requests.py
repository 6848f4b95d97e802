"""Request handlers of the server, one function a request, found in ``HANDLERS`` by the request's first byte.

    handler(space, peer, data, pos, end, out) -> position behind the request, or -1 if it is not complete

Replies are appended to ``out``. An incomplete request sets ``peer.need`` to the position up to which
``data`` must reach before another try can succeed, so that no frame is scanned again from its start with
every segment. Standard library only: the server process imports this file without torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from struct import Struct
from struct import error as StructError
from typing import Any

from hpcdist_stores.integers import I64, U64, add_i64
from hpcdist_stores.tcp.server.keys import Peer, Refused, Space, Wait
from hpcdist_stores.tcp.wire import (
    ABSENT,
    CANCELED,
    GREETING,
    GREETING_OPEN,
    MAX_KEY,
    MAX_KEYS,
    MAX_LIST,
    MAX_VALUE,
    PRESENT,
    WOKEN,
    Request,
)

_u64 = U64.unpack_from
_pack_u64 = U64.pack
_pack_i64 = I64.pack

Handler = Callable[[Space, Peer, bytes, int, int, "list[bytes]"], int]
Reply = Sequence[bytes]


def _string(peer: Peer, data: bytes, pos: int, end: int, limit: int) -> int:
    """Return the end of the string at pos, -1 if it is not complete; refuse one that is too long."""
    if end - pos < 8:
        peer.need = pos + 8
        return -1
    (size,) = _u64(data, pos)
    if size > limit:
        raise Refused(f"a length of {size}, above the limit of {limit}")
    stop: int = pos + 8 + size
    if stop > end:
        peer.need = stop
        return -1
    return stop


def _handler(act: Callable[..., Reply], *limits: int, fixed: Struct | None = None) -> Handler:
    """Return the handler of a request that consists of strings, and fields of a fixed size after them.

    ``act(space, peer, ...)`` does what is requested and returns the reply.
    """

    def handle(space: Space, peer: Peer, data: bytes, pos: int, end: int, out: list[bytes]) -> int:
        arguments: list[Any] = []
        for limit in limits:
            if (stop := _string(peer, data, pos, end, limit)) < 0:
                return -1
            arguments.append(data[pos + 8 : stop])
            pos = stop
        if fixed is not None:
            if pos + fixed.size > end:
                peer.need = pos + fixed.size
                return -1
            arguments += fixed.unpack_from(data, pos)
            pos += fixed.size
        out += act(space, peer, *arguments)
        return pos

    return handle


def _handler_of_keys(act: Callable[[Space, Peer, list[bytes]], Reply]) -> Handler:
    """Return the handler of a request that consists of a list of keys."""

    def handle(space: Space, peer: Peer, data: bytes, pos: int, end: int, out: list[bytes]) -> int:
        keys, stop = _keys(peer, data, pos, end)
        if stop >= 0:
            out += act(space, peer, keys)
        return stop

    return handle


def _keys(peer: Peer, data: bytes, pos: int, end: int) -> tuple[list[bytes], int]:
    """Return the list of keys at pos and its end, -1 while it is not complete."""
    if end - pos < 8:
        peer.need = pos + 8
        return [], -1
    (count,) = _u64(data, pos)
    if count > MAX_KEYS:
        raise Refused(f"a list of {count} keys, above the limit of {MAX_KEYS}")
    if peer.checked is not None:  # CHECK, then MULTI_GET of the same keys: what our client's multi_get sends
        raw, known = peer.checked
        peer.checked = None
        if data.startswith(raw, pos):
            return known, pos + len(raw)
    # A list that comes in pieces is only measured, from where it was left; its keys are cut out at the end.
    keys: list[bytes] = []
    is_whole = peer.list_left is None
    left, at = peer.list_left or (count, 8)
    at += pos
    last = min(end, pos + MAX_LIST)
    while left:
        start = at + 8
        if start <= end:
            (size,) = _u64(data, at)
            stop = start + size
            if stop <= last and size <= MAX_KEY:
                if is_whole:
                    keys.append(data[start:stop])
                at = stop
                left -= 1
                continue
            if size > MAX_KEY or stop - pos > MAX_LIST:
                raise Refused(f"a key of {size} bytes, or a list above {MAX_LIST} bytes")
            peer.need = stop
        else:
            peer.need = start
        peer.list_left = (left, at - pos)
        return [], -1
    peer.list_left = None
    if not is_whole:
        start = pos + 8
        for _ in range(count):
            stop = start + 8 + _u64(data, start)[0]
            keys.append(data[start + 8 : stop])
            start = stop
    if count > 1 and at < end and data[at] == Request.MULTI_GET:
        peer.checked = (data[pos:at], keys)
    return keys, at


def _value(value: bytes) -> Reply:
    return _pack_u64(len(value)), value


def _set(space: Space, peer: Peer, key: bytes, value: bytes) -> Reply:
    space.data[key] = value
    if key in space.waits:
        space.tick_off(key)
    return ()


def _append(space: Space, peer: Peer, key: bytes, value: bytes) -> Reply:
    return _set(space, peer, key, space.data.get(key, b"") + value)


def _compare_set(space: Space, peer: Peer, key: bytes, expected: bytes, desired: bytes) -> Reply:
    value = space.data.get(key)
    if value == expected or (value is None and not expected):
        _set(space, peer, key, desired)
        return _value(desired)
    return _value(expected if value is None else value)


def _get(space: Space, peer: Peer, key: bytes) -> Reply:
    return _value(space.data.get(key, b""))


def _add(space: Space, peer: Peer, key: bytes, amount: int) -> Reply:
    try:
        total = add_i64(space.data.get(key, b"0"), amount)
    except (ValueError, OverflowError) as error:
        raise Refused(str(error)) from None
    _set(space, peer, key, total)
    return (_pack_i64(int(total)),)


def _check(space: Space, peer: Peer, keys: list[bytes]) -> Reply:
    return (PRESENT if space.data.keys() >= set(keys) or not _absent(space, keys) else ABSENT,)


def _absent(space: Space, keys: list[bytes]) -> list[bytes]:
    return [key for key in keys if key not in space.data and not space.queues.get(key)]


def _wait(space: Space, peer: Peer, keys: list[bytes]) -> Reply:
    if peer.wait is not None:
        raise Refused("a second wait while one is pending")
    if absent := list(dict.fromkeys(_absent(space, keys))):
        Wait(peer, absent, space.waits)
        return ()
    return (WOKEN,)


def _multi_get(space: Space, peer: Peer, keys: list[bytes]) -> Reply:
    get = space.data.get
    reply: list[bytes] = []
    for key in keys:
        value = get(key, b"")
        reply += (_pack_u64(len(value)), value)
    peer.heavy = True
    return reply


def _multi_set(space: Space, peer: Peer, count: int) -> Reply:
    if count > MAX_KEYS:
        raise Refused(f"{count} pairs, above the limit of {MAX_KEYS}")
    peer.pairs = count  # stored as they come, so that one value is the most that the server keeps unfinished
    return ()


def set_pairs(space: Space, peer: Peer, data: bytes, pos: int, end: int, out: list[bytes]) -> int:
    """Store the pairs of a MULTI_SET that are complete; return the position behind them, -1 if there is none."""
    store, waits, begun, left = space.data, space.waits, pos, peer.pairs
    try:
        while left:
            start = pos + 8
            middle = start + _u64(data, pos)[0]
            value = middle + 8
            stop = value + _u64(data, middle)[0]
            if stop > end or middle - start > MAX_KEY or stop - value > MAX_VALUE:
                break
            key = data[start:middle]
            store[key] = data[value:stop]
            if waits and key in waits:
                space.tick_off(key)
            left -= 1
            pos = stop
    except (StructError, OverflowError):  # a length is not there yet, or is nonsense
        pass
    peer.pairs = left
    if left:
        at = set_pair(space, peer, data, pos, end, out)  # says how much is missing, or refuses
        return at if pos == begun else pos
    return pos


def _num_keys(space: Space, peer: Peer) -> Reply:
    return (_pack_i64(len(space.data)),)


def _delete_key(space: Space, peer: Peer, key: bytes) -> Reply:
    return (_pack_i64(space.data.pop(key, None) is not None),)


def _cancel_wait(space: Space, peer: Peer) -> Reply:
    if peer.wait is not None:
        peer.wait.drop()
    return (CANCELED,)


def _ping(space: Space, peer: Peer, nonce: bytes) -> Reply:
    return (GREETING_OPEN if nonce == GREETING else nonce,)


def _queue_push(space: Space, peer: Peer, key: bytes, value: bytes) -> Reply:
    space.queues.setdefault(key, deque()).append(value)
    if key in space.waits:
        space.tick_off_one(key)
    return ()


def _queue_pop(space: Space, peer: Peer, key: bytes) -> Reply:
    if (queue := space.queues.get(key)) is None:
        return (_pack_i64(0),)
    length, value = len(queue), queue.popleft()
    if not queue:
        del space.queues[key]
    return _pack_i64(length), *_value(value)


def _queue_len(space: Space, peer: Peer, key: bytes) -> Reply:
    return (_pack_i64(len(space.queues.get(key, ()))),)


def _list_keys(space: Space, peer: Peer) -> Reply:
    reply = [_pack_i64(len(space.data))]
    for key in space.data:
        reply += _value(key)
    peer.heavy = True
    return reply


def _barrier(space: Space, peer: Peer, key: bytes, world_size: int) -> Reply:
    if peer.wait is not None:
        raise Refused("a barrier while a wait is pending")
    _add(space, peer, key, 1)
    if int(space.data[key]) < world_size:
        Wait(peer, [key], space.arrivals)
        return ()
    for arrival in space.arrivals.pop(key, ()):
        arrival.tick_off()
    return (WOKEN,)


def _refuse(space: Space, peer: Peer) -> Reply:
    raise Refused("an unknown request")


set_pair = _handler(_set, MAX_KEY, MAX_VALUE)
HANDLERS = [_handler(_refuse)] * 256
for _request, _of_request in {
    Request.SET: set_pair,
    Request.COMPARE_SET: _handler(_compare_set, MAX_KEY, MAX_VALUE, MAX_VALUE),
    Request.GET: _handler(_get, MAX_KEY),
    Request.ADD: _handler(_add, MAX_KEY, fixed=I64),
    Request.CHECK: _handler_of_keys(_check),
    Request.WAIT: _handler_of_keys(_wait),
    Request.NUM_KEYS: _handler(_num_keys),
    Request.DELETE_KEY: _handler(_delete_key, MAX_KEY),
    Request.APPEND: _handler(_append, MAX_KEY, MAX_VALUE),
    Request.MULTI_GET: _handler_of_keys(_multi_get),
    Request.MULTI_SET: _handler(_multi_set, fixed=U64),
    Request.CANCEL_WAIT: _handler(_cancel_wait),
    Request.PING: _handler(_ping, fixed=Struct(f"{len(GREETING)}s")),
    Request.QUEUE_PUSH: _handler(_queue_push, MAX_KEY, MAX_VALUE),
    Request.QUEUE_POP: _handler(_queue_pop, MAX_KEY),
    Request.QUEUE_LEN: _handler(_queue_len, MAX_KEY),
    Request.LIST_KEYS: _handler(_list_keys),
    Request.BARRIER: _handler(_barrier, MAX_KEY, fixed=I64),
}.items():
    HANDLERS[_request] = _of_request
