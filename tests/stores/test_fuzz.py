"""Random bytes to the store's port and into its file: nobody else notices, nothing ends, no memory grows."""

import contextlib
import os
import random
import socket
import threading
from datetime import timedelta

import pytest

import hpcdist_stores as stores
from hpcdist_stores.errors import DistStoreError
from hpcdist_stores.file.log import FIRST_KEY, FileLog, pack_record
from hpcdist_stores.integers import U32, U64
from hpcdist_stores.tcp.connection import open_connection
from hpcdist_stores.tcp.wire import HELLO, MAX_KEYS, Request, pack_keys, pack_strings
from tests.stores.test_attacks import MiB, Siege

INPUTS = int(os.environ.get("HPCDIST_TEST_FUZZ", "1500"))
SECRET = b"of the job"
EXTREMES = (0, 1, 7, 8, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 8 * MiB + 1, MAX_KEYS + 1)


def frame(rng):
    """Return a request as a client may send it."""
    key, value = rng.randbytes(rng.randrange(20)), rng.randbytes(rng.randrange(200))
    body = rng.choice(
        [pack_strings(key), pack_strings(key, value), pack_keys([key] * rng.randrange(4)), U64.pack(1), b""]
    )
    return bytes([rng.choice(list(Request))]) + body


def garbled(rng, text):
    """Return a text with bytes changed, lost, added, or a length of its own in it."""
    data = bytearray(text or b"\0")
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            data[at : at + 1] = rng.randbytes(1)
        elif kind == 1:
            del data[at : at + rng.randrange(9)]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randrange(40))
        else:
            data[at : at + 8] = rng.choice((U64, U32)).pack(rng.choice(EXTREMES) % 2**32)
    return bytes(data)


def hostile(rng):
    """Return one input."""
    if rng.random() < 0.2:
        return rng.randbytes(rng.randrange(1, 3000))
    return b"".join(garbled(rng, frame(rng)) if rng.random() < 0.7 else frame(rng) for _ in range(rng.randrange(1, 4)))


@pytest.mark.parametrize("knows", ["no secret", "not the secret", "the secret"])
@pytest.mark.timeout(1400)
def test_the_port(knows):
    rng = random.Random(41)
    secret = None if knows == "no secret" else SECRET
    with Siege(secret) as siege:
        for _ in range(INPUTS):
            data = hostile(rng)
            with contextlib.suppress(OSError, stores.DistNetworkError):
                if knows == "the secret":
                    connection = open_connection("127.0.0.1", siege.store.port, SECRET, 5)
                    connection.sock.settimeout(0.2)
                    connection.send(data)
                    connection.close()
                else:
                    with socket.create_connection(("127.0.0.1", siege.store.port), 5) as sock:
                        sock.settimeout(0.2)
                        sock.sendall(HELLO + data if rng.random() < 0.8 else data)
        siege.store.set("last", "still there")
        assert siege.store.get("last") == b"still there"
    assert siege.store._server.is_alive()


@pytest.mark.timeout(1400)
def test_the_file(tmp_path):
    """Whoever may write the file may spoil it: its users get an error or wait, and memory stays."""
    rng = random.Random(44)
    path = tmp_path / "store"
    start = pack_record(FIRST_KEY, b"1")
    threads = threading.active_count()
    for _ in range(INPUTS):
        records = b"".join(
            pack_record(rng.randbytes(rng.randrange(12)), rng.randbytes(rng.randrange(30))) for _ in range(4)
        )
        path.write_bytes(start + garbled(rng, records) if rng.random() < 0.8 else garbled(rng, start + records))
        log = FileLog(str(path))
        with contextlib.suppress(DistStoreError), log.reading(None):
            assert sum(map(len, log.data.values())) <= 500
        with contextlib.suppress(DistStoreError, ValueError), log.writing(None):
            log.append((b"/key", b"value"))
            assert log.data[b"/key"] == b"value"
    path.write_bytes(garbled(rng, b"x" * 100))
    with contextlib.suppress(DistStoreError):
        spoilt = stores.FileStore(str(path), 2)
        spoilt.set_timeout(timedelta(milliseconds=50))
        spoilt.get("absent")
    assert threading.active_count() == threads
