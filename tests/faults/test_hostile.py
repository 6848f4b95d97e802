"""Whatever strangers write to the sockets of a running job, it goes on."""

from __future__ import annotations

import os
import random
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from hpcdist.watch.channel import HEAD, QUESTION, key_of, seal
from hpcdist.watch.debug_socket import PREFIX
from hpcdist.watch.endpoint import Endpoint
from tests.faults.launch import FIRST, HERE, Job

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
INPUTS = int(os.environ.get("HPCDIST_TEST_FUZZ", "3000"))  # of each kind
DEEP = [b"[" * 50_000, b'{"a":' * 10_000, b"\xff" * 500, b"9" * 50_000, b"", b"[]", b"null", b'{"kind": 1}']


def write(made: random.Random, target: Endpoint, number: int) -> None:
    """Write one thing to each socket of a rank."""
    text = b'{"kind": "abort", "from": 0, "reason": "a stranger", "leaves": false}'
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger, suppress(OSError):
        stranger.sendto(made.choice([text, made.choice(DEEP), made.randbytes(made.randrange(200))]), target_of(target))
        head = HEAD.pack(made.choice([b"stranger", b"\0" * 8]), number, 1)
        stranger.sendto(seal(key_of("a guess"), QUESTION, head, text), target_of(target))
    if number % 20 == 0:
        with suppress(OSError), socket.create_connection(("127.0.0.1", target.stream_port), 1) as stream:
            stream.sendall(made.randbytes(made.randrange(1, 3000)))
        with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1)
            client.connect(f"\0{PREFIX}{os.getuid()}-{target.pid}")
            client.sendall(made.randbytes(made.randrange(1, 3000)))


def target_of(target: Endpoint) -> tuple[str, int]:
    return "127.0.0.1", target.port


@pytest.mark.parametrize("launcher", FIRST)
def test_a_job_goes_on_and_nothing_of_it_grows(launcher: str, tmp_path: Path) -> None:
    end, made = tmp_path / "end", random.Random(7)
    with Job(launcher, 2, [str(end)], HERE / "hostile_job.py") as job:
        ranks = job.expect("ready", 2)
        targets = [Endpoint(tuple(where), *rest) for where, *rest in (each["own"] for each in ranks)]
        for number in range(1, INPUTS + 1):
            for target in targets:
                write(made, target, number)
            if number == INPUTS // 2:
                Path(f"{end}.half").touch()
        end.touch()
        over = job.expect("over", 2, 60)
        for each in over:
            assert each["after"]["threads"] == each["before"]["threads"], over
            assert each["after"]["memory"] < each["before"]["memory"] + (8 << 20), over
            assert each["after"]["descriptors"] <= each["before"]["descriptors"] + 2, over
        assert job.finish(60) == 0, job.stderr()
        assert "watchdog goes on after an error" not in job.stderr(), job.stderr()
