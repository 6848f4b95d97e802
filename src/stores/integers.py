"""Integers as torch's stores keep them: decimal text that wraps at 64 bits, and little-endian binary fields.

Standard library only: the server process imports this file without torch.
"""

from __future__ import annotations

import struct

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
I64 = struct.Struct("<q")

_LONGEST_NUMBER = 4000  # Python's own limit is 4300 digits; longer texts are not read


def is_i64(number: int) -> bool:
    """Return whether an integer fits into 64 bits with sign."""
    return -(1 << 63) <= number < 1 << 63


def add_i64(text: bytes, amount: int) -> bytes:
    """Return a counter's text with an amount added, wrapped at 64 bits as by torch's servers; see ``parse_i64``."""
    total = parse_i64(text) + amount
    return b"%d" % ((total + (1 << 63)) % (1 << 64) - (1 << 63))


def parse_i64(text: bytes) -> int:
    """Read a decimal as C's ``strtoll`` does: leading blanks and trailing garbage pass.

    Raises ValueError if there is no number at the start, OverflowError if it does not fit into 64 bits.
    """
    text = text[:_LONGEST_NUMBER]
    try:
        number = int(text) if text.isdigit() else int(_leading_number(text))
    except ValueError:
        raise ValueError(f"the value {text[:32]!r} is not a decimal number") from None
    if not is_i64(number):
        raise OverflowError(f"the value {text[:32]!r} does not fit into 64 bits")
    return number


def _leading_number(text: bytes) -> bytes:
    text = text.lstrip(b" \t\n\v\f\r")
    end = 1 if text[:1] in (b"+", b"-") else 0
    while end < len(text) and text[end : end + 1].isdigit():
        end += 1
    return text[:end]
