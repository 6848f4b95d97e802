"""Requests of the server: the parser and the action of each, in ``REQUESTS`` by its first byte.

An incomplete request sets ``peer.need`` to the position up to which the data must reach before another try can
succeed, so that no frame is scanned again from its start with every segment. Standard library only: the server
process imports this file without torch.
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
    cut_strings,
    string_parts,
)

PIECES = 512  # replies (or parts of them) in one send; more are sent before the next request is carried out
A_LIST = -1  # of keys, in place of a number of strings

_u64 = U64.unpack_from
_pack_u64 = U64.pack
_pack_i64 = I64.pack
_MULTI_GET = int(Request.MULTI_GET)  # attributes of an Enum take time

Reply = Sequence[bytes]


def perform(space: Space, peer: Peer, data: bytes, pos: int, out: list[bytes]) -> int:
    """Carry out the complete requests in ``data`` from a position on; return the position of the first one left.

    Replies are appended to ``out``. If the next request only waits for the replies to be sent, ``peer.need`` is its
    position.
    """
    end = len(data)
    raw, keys = b"", list[bytes]()
    while pos < end:
        if peer.pairs:
            pos = _set_pairs(space, peer, data, pos, end)
            if peer.pairs:
                break
            continue
        act, strings, fixed = REQUESTS[data[pos]]
        at = pos + 1
        arguments: list[Any] = []
        if strings == A_LIST:
            if raw and data.startswith(raw, at):  # CHECK, then MULTI_GET of the same keys: our client's multi_get
                at += len(raw)
            else:
                keys, at = _keys(peer, data, at, end)
                if at < 0:
                    break
            raw = data[pos + 1 : at] if at < end and data[at] == _MULTI_GET else b""
            arguments = [keys]
        elif strings:
            arguments, at = cut_strings(data, at, end, strings)
            if len(arguments) < strings:
                _expect(peer, data, at, MAX_VALUE if arguments else MAX_KEY)
                break
            if len(arguments[0]) > MAX_KEY:
                raise Refused("a key above the limit")
        if fixed is not None:
            pos_of_fixed, at = at, at + fixed.size
            if at > end:
                peer.need = at
                break
            arguments += fixed.unpack_from(data, pos_of_fixed)
        out += act(space, peer, *arguments)
        pos = at
        if len(out) > PIECES:
            peer.need = pos
            break
    return pos


def _expect(peer: Peer, data: bytes, pos: int, limit: int) -> None:
    """Set the end of the unfinished string at a position, as far as known; refuse one that is too long."""
    peer.need = pos + 8
    if peer.need <= len(data):
        (size,) = _u64(data, pos)
        if size > limit:
            raise Refused(f"a length of {size}, above the limit of {limit}")
        peer.need += size


def _keys(peer: Peer, data: bytes, pos: int, end: int) -> tuple[list[bytes], int]:
    """Return the list of keys at a position and its end, -1 while it is incomplete.

    A list that arrives in pieces is only measured, from the last position; its keys are read at the end.
    """
    begin = pos + 8
    if begin > end:
        peer.need = begin
        return [], -1
    (count,) = _u64(data, pos)
    if count > MAX_KEYS:
        raise Refused(f"a list of {count} keys, above the limit of {MAX_KEYS}")
    left, at = (count, begin) if peer.list_left is None else (peer.list_left[0], pos + peer.list_left[1])
    keys, at = cut_strings(data, at, end, left)
    if at - pos > MAX_KEY and (at - pos > MAX_LIST or max(map(len, keys), default=0) > MAX_KEY):
        raise Refused(f"a key above {MAX_KEY} bytes, or a list above {MAX_LIST}")
    if len(keys) < left:
        peer.list_left = left - len(keys), at - pos
        _expect(peer, data, at, min(MAX_KEY, pos + MAX_LIST - at - 8))
        return [], -1
    if peer.list_left is not None:
        peer.list_left = None
        keys, at = cut_strings(data, begin, end, count)
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
    return string_parts([get(key, b"") for key in keys])


def _multi_set(space: Space, peer: Peer, count: int) -> Reply:
    if count > MAX_KEYS:
        raise Refused(f"{count} pairs, above the limit of {MAX_KEYS}")
    peer.pairs = count  # stored as they arrive, so that the server keeps at most one unfinished value
    return ()


def _set_pairs(space: Space, peer: Peer, data: bytes, pos: int, end: int) -> int:
    """Store the complete pairs of a MULTI_SET; return the position behind them."""
    store, waits = space.data, space.waits
    for left in range(peer.pairs, 0, -1):
        try:  # not by ``cut_strings``: a list of all strings, divided into keys and values, takes a quarter more
            (size,) = _u64(data, pos)
            start = pos + 8
            stop = start + size
            begin = stop + 8
            after = begin + _u64(data, stop)[0]
        except (StructError, OverflowError):  # incomplete, perhaps forever: a length may be false
            after = end + 1
        if after > end:
            _expect(peer, data, pos, MAX_KEY)
            if peer.need <= end:  # the key is complete
                _expect(peer, data, peer.need, MAX_VALUE)
            peer.pairs = left
            return pos
        if size > MAX_KEY:
            raise Refused("a key above the limit")
        key = data[start:stop]
        store[key] = data[begin:after]
        if waits and key in waits:
            space.tick_off(key)
        pos = after
    peer.pairs = 0
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
    return [_pack_i64(len(space.data)), *string_parts(list(space.data))]


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


# the action of a request (act(space, peer, *arguments) -> its reply), and its arguments: strings, of which the first is
# a key and the others are values, or a list of keys; then fields of a fixed size
_Form = tuple[Callable[..., Reply], int, Struct | None]
_FORMS: dict[Request, _Form] = {
    Request.SET: (_set, 2, None),
    Request.COMPARE_SET: (_compare_set, 3, None),
    Request.GET: (_get, 1, None),
    Request.ADD: (_add, 1, I64),
    Request.CHECK: (_check, A_LIST, None),
    Request.WAIT: (_wait, A_LIST, None),
    Request.NUM_KEYS: (_num_keys, 0, None),
    Request.DELETE_KEY: (_delete_key, 1, None),
    Request.APPEND: (_append, 2, None),
    Request.MULTI_GET: (_multi_get, A_LIST, None),
    Request.MULTI_SET: (_multi_set, 0, U64),
    Request.CANCEL_WAIT: (_cancel_wait, 0, None),
    Request.PING: (_ping, 0, Struct(f"{len(GREETING)}s")),
    Request.QUEUE_PUSH: (_queue_push, 2, None),
    Request.QUEUE_POP: (_queue_pop, 1, None),
    Request.QUEUE_LEN: (_queue_len, 1, None),
    Request.LIST_KEYS: (_list_keys, 0, None),
    Request.BARRIER: (_barrier, 1, I64),
}
_UNKNOWN: _Form = (_refuse, 0, None)
REQUESTS = [_FORMS.get(number, _UNKNOWN) for number in range(256)]  # type: ignore[call-overload]  # an IntEnum's
