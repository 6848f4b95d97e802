"""How are the parts of a request laid out by the client?"""

from __future__ import annotations

from collections.abc import Sequence

from stores.base import Text, as_bytes, as_key_list
from stores.errors import DistStoreError
from stores.tcp_link import Link
from stores.tcp_wire import I64, MAX_KEY, MAX_VALUE, OPCODES, U64, Request

_pack = U64.pack
_QUEUE_POP = OPCODES[Request.QUEUE_POP]


def wire_key(key: Text) -> bytes:
    """Return a key as it goes over the wire: with a "/" before it."""
    return b"/" + (key.encode() if isinstance(key, str) else as_bytes(key))


def wire_keys(keys: Sequence[Text]) -> list[bytes]:
    """Return keys as they go over the wire."""
    return [b"/" + key for key in as_key_list(keys)]


def pack_string(text: bytes) -> bytes:
    """Return a length and its bytes."""
    return _pack(len(text)) + text


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """Return a count and the strings."""
    parts = [_pack(len(keys))]
    for key in keys:
        parts += (_pack(len(key)), key)
    return b"".join(parts)


def check_sizes(key: bytes, *values: bytes) -> None:
    """Refuse here what our server would refuse by closing the connection."""
    if len(key) > MAX_KEY:
        raise DistStoreError(f"a key of {len(key)} bytes: the server's limit is {MAX_KEY}")
    for value in values:
        if len(value) > MAX_VALUE:
            raise DistStoreError(f"{key[1:]!r}: a value of {len(value)} bytes: the server's limit is {MAX_VALUE}")


def exchange(link: Link, frame: bytes, size: int) -> bytes:
    """Send a request and return its answer of a known size."""
    link.send(frame)
    return link.read(size)


def pop(link: Link, packed_key: bytes) -> bytes | None:
    """Take the oldest value of a queue; None when it is empty."""
    link.send(_QUEUE_POP + packed_key)
    if not I64.unpack(link.read(8))[0]:
        return None
    return link.read_value()
