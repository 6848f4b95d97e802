"""Trim libnccl to one GPU architecture: python trim.py LIBNCCL OUT 90

Keeps one architecture's device code in each fatbin and drops what is kept for relinking; the zeroes that take its place
compress to nothing (26.5 MiB of NCCL 2.31.2 after ``xz -9``).
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path

MAGIC, ELF_KIND = b"\x50\xed\x55\xba", 2


def section(listing: str, name: str) -> tuple[int, int]:
    """Return where a section of the file begins, and its length."""
    found = re.search(re.escape(name) + r"\s+PROGBITS\s+([0-9a-f]+)\s+([0-9a-f]+)\s+([0-9a-f]+)", listing)
    assert found is not None, f"no section {name}"
    return int(found[2], 16), int(found[3], 16)


def entries(data: bytearray, first: int, end: int, architecture: int) -> bytes:
    """Return a fatbin's entries of one architecture."""
    kept, place = [], first
    while place < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, place)
        if kind == ELF_KIND and struct.unpack_from("<I", data, place + 28)[0] == architecture:
            kept.append(bytes(data[place : place + header + size]))
        place += header + size
    return b"".join(kept)


def trim(data: bytearray, listing: str, architecture: int) -> tuple[int, int]:
    """Trim in place; return how many fatbins there are, and the bytes kept of them."""
    begin, size = section(listing, "__nv_relfatbin")
    data[begin : begin + size] = bytes(size)
    begin, size = section(listing, ".nv_fatbin")
    place, fatbins, kept = begin, 0, 0
    while place < begin + size:
        if data[place : place + 4] != MAGIC:
            place += 8
            continue
        header, length = struct.unpack_from("<HQ", data, place + 6)
        first, end = place + header, place + header + length
        body = entries(data, first, end, architecture)
        if body:
            data[first:end] = body + bytes(length - len(body))
            struct.pack_into("<Q", data, place + 8, len(body))
        fatbins, kept, place = fatbins + 1, kept + len(body), end
    return fatbins, kept


if __name__ == "__main__":
    library, target, architecture = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    content = bytearray(library.read_bytes())
    sections = subprocess.run(["readelf", "-SW", library], capture_output=True, text=True, check=True).stdout
    print("{} fatbins; kept {} bytes of sm_{}".format(*trim(content, sections, architecture), architecture))
    target.write_bytes(content)
