"""Proof of death: a process that has ended is told from one that lives, is stopped, or is not reached."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from hpcdist.launch import addresses
from hpcdist.watch import liveness
from hpcdist.watch.channel import Channel
from hpcdist.watch.liveness import AT_ONCE, ProofOfDeath, answers
from tests.ports import free_port

LISTENS = """
import socket
listener = socket.create_server(("", 0))
print(listener.getsockname()[1], flush=True)
while True:
    listener.accept()
"""
FORKS = """
import os, time
from hpcdist.watch.watchdog import RUNNING, Watchdog
RUNNING.append(Watchdog("", 0))
RUNNING[0].start()
if (child := os.fork()) == 0:
    os.close(1)
    time.sleep(600)
print(RUNNING[0].channel.own.stream_port, child, flush=True)
"""
UNREACHABLE = "192.0.2.1"  # of no network (RFC 5737)


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", LISTENS], stdout=subprocess.PIPE, text=True) as started:
        yield started
        started.kill()


def test_only_a_process_that_was_reached_and_has_ended_is_proven_dead(process, monkeypatch):
    port = int(process.stdout.readline())
    refusing = free_port()
    channel = Channel(0)
    places = [
        (channel.own.machine, (), port),
        ("another machine", (UNREACHABLE,), port),
        (channel.own.machine, (), refusing),
        ("another machine", addresses.own_addresses(), refusing),  # a network that each machine has for itself
    ]
    others = [channel.own._replace(machine=where, addresses=own, stream_port=at) for where, own, at in places]
    channel.learn(range(5), [channel.own, *others])
    proof = ProofOfDeath(channel)
    assert proof.ended(range(5)) == set()
    os.kill(process.pid, signal.SIGSTOP)
    assert proof.ended(range(5)) == set()
    process.kill()
    process.wait()
    assert proof.ended(range(5)) == {1}
    assert proof.ended([0, 2]) == set()
    monkeypatch.setattr(liveness, "answers", lambda targets: dict.fromkeys(targets, errno.EHOSTUNREACH))
    assert proof.ended(range(5)) == set()
    channel.close()


def test_a_forked_child_does_not_answer_for_its_parent():
    printed = subprocess.run([sys.executable, "-c", FORKS], stdout=subprocess.PIPE, text=True, check=True).stdout
    port, child = map(int, printed.split())
    try:
        assert answers([(addresses.LOOPBACK, port)]) == {(addresses.LOOPBACK, port): errno.ECONNREFUSED}
    finally:
        os.kill(child, signal.SIGKILL)


def test_silence_ends_in_time_and_many_answers_come_at_once():
    begun = time.monotonic()
    assert answers([(UNREACHABLE, 9)], 0.3).get((UNREACHABLE, 9)) != 0
    assert time.monotonic() - begun < 5
    with socket.create_server(("", 0), backlog=socket.SOMAXCONN) as server:
        port = server.getsockname()[1]
        targets = [(f"127.0.{each // 250}.{each % 250 + 1}", port) for each in range(AT_ONCE + 50)]
        assert answers(targets) == dict.fromkeys(targets, 0)
