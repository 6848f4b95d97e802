"""Wire format between a TCPStore and its server: request numbers, constants, limits, and the secret's proof.

Numbers are little-endian. A string is a u64 length and that many bytes; a list is a u64 count and that
many strings. A request is one byte (the table below) and its arguments; a reply carries no type. The
protocol is that of torch 2.13's TCPStore (see docs/explanation/store-protocol.md); the greeting and the
secret are ours.

Standard library only: the server process imports this file without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from struct import error as StructError

from hpcdist_stores.integers import U32, U64

_u64 = U64.unpack_from


class _Lengths(dict[int, bytes]):
    """Holds the packed lengths of short strings, which are most; others are packed when asked for."""

    def __missing__(self, size: int) -> bytes:
        return U64.pack(size)


_length = _Lengths((size, U64.pack(size)) for size in range(256)).__getitem__  # two thirds of the time of U64.pack


class Request(IntEnum):
    """Names the first byte of each request (arguments -> reply)."""

    VALIDATE = 0  # u32 magic -> nothing
    SET = 1  # key, value -> nothing
    COMPARE_SET = 2  # key, expected, desired -> value
    GET = 3  # key -> value
    ADD = 4  # key, i64 -> i64
    CHECK = 5  # list of keys -> u8: 0 all there, 1 not
    WAIT = 6  # list of keys -> u8 0, once all are there
    NUM_KEYS = 7  # -> i64
    DELETE_KEY = 8  # key -> i64: 1 or 0
    APPEND = 9  # key, value -> nothing
    MULTI_GET = 10  # list of keys -> that many values
    MULTI_SET = 11  # u64 count, then key, value each -> nothing
    CANCEL_WAIT = 12  # -> u8 1
    PING = 13  # u32 -> the same u32
    QUEUE_PUSH = 14  # key, value -> nothing
    QUEUE_POP = 15  # key -> i64 length before, then the value when that is above 0
    QUEUE_LEN = 16  # key -> i64
    LIST_KEYS = 17  # -> i64 count, strings
    BARRIER = 18  # key, i64 world size -> u8 0, once so many have come


OPCODES = {request: bytes((request,)) for request in Request}

MAGIC = 0x3C85F7CE
WOKEN = b"\0"  # reply to WAIT and BARRIER
CANCELED = b"\1"  # reply to CANCEL_WAIT
PRESENT = b"\0"  # replies to CHECK
ABSENT = b"\1"

# torch pings with its process id, which Linux keeps at or below 2**22. A ping above that is our own client's
# greeting; our own server answers it with one of the two words below, torch's server sends it back.
GREETING = U32.pack(0xC10D57A9)
GREETING_OPEN = U32.pack(0xC10D57AA)
GREETING_SECRET = U32.pack(0xC10D57AB)
HELLO = OPCODES[Request.VALIDATE] + U32.pack(MAGIC) + OPCODES[Request.PING] + GREETING

# Limits: those of torch's libuv server, and two more so that no frame can grow without end.
MAX_KEY = 8 * 1024
MAX_VALUE = 8 * 1024 * 1024
MAX_KEYS = 131072
MAX_LIST = 16 * 1024 * 1024  # bytes of one list of keys

NONCE_SIZE = 32
PROOF_SIZE = 32


def proof(secret: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Prove knowledge of the secret for one connection: HMAC-SHA256 over role and both nonces.

    The role is ``b"client"`` or ``b"server"``, so that neither side can send the other's proof back.
    """
    import hmac  # here, because OpenSSL adds several milliseconds to the server's start

    return hmac.digest(secret, b"hpcdist-store-1 " + role + server_nonce + client_nonce, "sha256")


def is_proof(given: bytes, expected: bytes) -> bool:
    """Compare two proofs in constant time."""
    import hmac

    return hmac.compare_digest(given, expected)


def string_parts(*columns: Sequence[bytes]) -> list[bytes]:
    """Return strings in wire format, in parts: the first of each column, then the second of each, and so on."""
    step = 2 * len(columns)
    parts = [b""] * (step * len(columns[0]))
    for i, texts in enumerate(columns):  # three quarters of the time that zip and chain take
        parts[2 * i :: step] = map(_length, map(len, texts))
        parts[2 * i + 1 :: step] = texts
    return parts


def pack_strings(*texts: bytes) -> bytes:
    """Return strings in wire format, one after another."""
    return b"".join(string_parts(texts))


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """Return a list of keys in wire format: their count and the strings."""
    return b"".join((U64.pack(len(keys)), *string_parts(keys)))


def cut_strings(data: bytes, pos: int, end: int, count: int) -> tuple[list[bytes], int]:
    """Return the complete strings in ``data`` from a position on, ``count`` at most, and the position of their end."""
    texts: list[bytes] = []
    try:
        while count:
            (size,) = _u64(data, pos)
            start = pos + 8
            stop = start + size
            if stop > end:
                break
            texts.append(data[start:stop])
            pos = stop
            count -= 1
    except StructError:  # the length is incomplete
        pass
    return texts, pos
