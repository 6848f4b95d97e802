"""Whatever strangers, and the user's own processes, write to the sockets of a running job, it goes on."""

from __future__ import annotations

import json
import os
import random
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hpcdist.watch.datagrams import HEAD, QUESTION, seal
from hpcdist.watch.debug_socket import PREFIX
from hpcdist.watch.endpoint import Endpoint
from tests.faults.launch import FIRST, HERE, Job

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
INPUTS = int(os.environ.get("HPCDIST_TEST_FUZZ", "3000"))  # of each kind
ENDS = ("abort", "ended", "verdict")  # messages of ranks that are meant to end calls, or the job
NUMBERS: list[Any] = [0, -1, 1, 7, 2**31, 2**63, 10**40, -(10**40)]
TEXTS = ["", "0", "x" * 3000, "\x1b[2J", "\udcff", "ü\n", "default_pg"]
DEEP = [b"[" * 50_000, b'{"a":' * 10_000, b"\xff" * 500, b"9" * 50_000, b"", b"[]", b"null", b'{"kind": 1}']


def value(made: random.Random, shape: dict[str, Any]) -> Any:
    """Return something that a shape fits, mostly."""
    if made.random() < 0.03:
        return made.choice([None, [], {}, "text", 1.5, True, [[[]]]])
    if "choice" in shape:
        return value(made, made.choice(shape["choice"]))
    if "list" in shape:
        shapes = shape["list"] if len(shape["list"]) > 1 else shape["list"] * made.choice([0, 1, 2, 300])
        return [value(made, each) for each in shapes]
    if "keys" in shape:
        return {key: value(made, each) for key, each in shape["keys"].items() if made.random() > 0.05}
    if "values" in shape:
        return {made.choice(TEXTS): value(made, shape["values"])}
    kind = shape["type"]
    found = {"int": NUMBERS, "float": [0.0, -1.5, 1e300], "str": TEXTS, "bool": [True, False]}
    return made.choice(found.get(kind, [None]))


def write(made: random.Random, target: Endpoint, kinds: dict[str, Any], number: int) -> None:
    """Write one thing to each socket of a rank."""
    kind = made.choice([*(each for each in kinds if each not in ENDS), "unknown"])
    content = value(made, kinds.get(kind, {"keys": {}}))
    content = content if isinstance(content, dict) else {}
    sender = made.choice([-1, 0, 1, 2, 10**30])
    text = json.dumps({**content, "kind": kind, "from": sender}).encode()[:60_000]
    text = text if made.random() < 0.8 else made.choice(DEEP)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger, suppress(OSError):
        stranger.sendto(made.choice([text, made.choice(DEEP), made.randbytes(made.randrange(200))]), target_of(target))
        head = HEAD.pack(made.choice([b"stranger", b"\0" * 8]), number, 1)
        stranger.sendto(seal(target.key, QUESTION, head, text), target_of(target))
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
        ranks = job.wait("ready", 2, 90)
        targets = [Endpoint(tuple(where), *rest) for where, *rest in (each["own"] for each in ranks)]
        for number in range(1, INPUTS + 1):
            for target in targets:
                write(made, target, ranks[0]["kinds"], number)
            if number == INPUTS // 2:
                Path(f"{end}.half").touch()
        end.touch()
        over = job.wait("over", 2, 60)
        assert len(over) == 2, job.stderr()
        for each in over:
            assert each["after"]["threads"] == each["before"]["threads"], over
            assert each["after"]["memory"] < each["before"]["memory"] + (8 << 20), over
            assert each["after"]["descriptors"] <= each["before"]["descriptors"] + 2, over
        assert job.finish(60) == 0, job.stderr()
        assert "watchdog goes on after an error" not in job.stderr(), job.stderr()
