"""Authenticated datagrams, each of which is taken once.

    | tag: 16 bytes | sender: 8 | number: 8 | index: 4 | JSON |

The tag is BLAKE2b over all that follows, with the key of the rank that is asked, for a question and its answer alike.
Nothing is parsed before its tag is checked. A sender numbers what it sends, and the receiver drops a number that it has
had. An answer repeats the head of its question; so a recorded one fits no other.
"""

from __future__ import annotations

import secrets
import struct
from collections import OrderedDict
from hashlib import blake2b

LARGEST = 60_000  # bytes of JSON in a datagram, under UDP's limit
WINDOW = 64  # numbers that may arrive out of order
SENDERS = 1 << 16  # whose numbers are remembered; more than a job has processes

TAG_BYTES = 16
HEAD = struct.Struct(">8sQi")  # sender, number, and whom the sender asks, in its own numbers
QUESTION, ANSWER = b"question", b"answer"


def key_of(secret: str) -> str:
    """Return the key that a secret of the user's choice stands for."""
    return blake2b(secret.encode(), digest_size=32).hexdigest()


def seal(key: str, way: bytes, head: bytes, text: bytes) -> bytes:
    """Return a datagram: what is sent, and before it the tag that only who knows the key can make."""
    content = head + text
    return blake2b(content, key=bytes.fromhex(key), digest_size=TAG_BYTES, person=way).digest() + content


def is_sealed(key: str, way: bytes, data: bytes) -> bool:
    """Tell whether a datagram was made by ``seal`` with a key, and is a question or an answer."""
    content = memoryview(data)[TAG_BYTES:]
    tag = blake2b(content, key=bytes.fromhex(key), digest_size=TAG_BYTES, person=way).digest()
    return len(content) >= HEAD.size and secrets.compare_digest(tag, data[:TAG_BYTES])


class Numbers:
    """The numbers that have come from each sender, so that none is taken twice."""

    def __init__(self) -> None:
        self._had: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # the highest, and bits for those below it

    def is_new(self, sender: bytes, number: int) -> bool:
        """Tell whether a number has not come before, and take note of it; one that is too old counts as had."""
        highest, bits = self._had.get(sender, (0, 0))
        if number > highest:
            bits = (bits << min(number - highest, WINDOW) | 1) & ((1 << WINDOW) - 1)
            highest = number
        elif (age := highest - number) >= WINDOW or bits >> age & 1:
            return False
        else:
            bits |= 1 << age
        self._had[sender] = highest, bits
        self._had.move_to_end(sender)
        if len(self._had) > SENDERS:
            self._had.popitem(last=False)
        return True
