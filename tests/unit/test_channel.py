"""Datagrams between watchdogs: only those of the job are taken, once, and whatever comes ends no thread."""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hpcdist.core.waiting import wait_readable, wait_until
from hpcdist.watch import channel as module
from hpcdist.watch.channel import ANSWER, HEAD, QUESTION, TAG_BYTES, Channel, Numbers, key_of, seal

NAMES = {"kind": "name", "from": -1}
INPUTS = int(os.environ.get("HPCDIST_TEST_FUZZ", "2000"))  # of each kind; 100,000 were tried
HOSTILE: list[bytes] = [
    b"",
    b"[" * 50_000,
    b'{"a":' * 10_000,
    b"\xff" * 100,
    b"[]",
    b"null",
    b'{"kind": []}',
    b'{"kind": "unknown", "from": 0}',
    b'{"kind": "fails", "from": -1}',
    b'{"rank": []}',
    b"9" * 10_000,
]


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    """Two ranks, of which rank 1 answers in a thread."""
    channels = (Channel(0), Channel(1))
    channels[1].register("name", lambda message: {"name": message.get("text") or "one"})
    channels[1].register("fails", lambda message: 1 // 0)
    for each in channels:
        each.learn([0, 1], [channel.own for channel in channels])
    ends = threading.Event()

    def answers() -> None:
        while not ends.wait(0.001):
            channels[1].answer()

    thread = threading.Thread(target=answers)
    thread.start()
    yield channels
    assert thread.is_alive()
    ends.set()
    thread.join()
    for each in channels:
        each.close()


def ask(channel: Channel, seconds: float = 5.0, **content: Any) -> Any:
    return channel.ask([1], "name", seconds, **content).get(1)


def question(key: str, text: bytes, number: int = 1, sender: bytes = b"stranger") -> bytes:
    return seal(key, QUESTION, HEAD.pack(sender, number, 1), text)


def test_a_question_is_answered_and_its_text_arrives(pair: tuple[Channel, Channel]) -> None:
    asking, asked = pair
    assert ask(asking) == {"name": "one"}
    assert ask(asking, text="ü" * 9_000) == {"name": "ü" * 9_000}
    assert asking.ask([7], "name", 0.3) == {}  # of no known rank
    asked.register("told", lambda message: told.append(message))
    told: list[Any] = []
    asking.send([0, 1], "told", value=3)
    wait_until(lambda: told, 5)
    assert [(each["from"], each["value"]) for each in told] == [(0, 3)]


def test_an_answer_that_fits_into_no_datagram_is_not_sent(pair: tuple[Channel, Channel]) -> None:
    asking, asked = pair
    failures: list[Exception] = []
    asked.note_failure = failures.append
    asked.register("long", lambda message: {"text": "x" * message["length"]})
    assert asking.ask([1], "long", 5.0, length=65_000)
    assert not asking.ask([1], "long", 0.5, length=66_000)
    assert ask(asking) == {"name": "one"}
    assert not failures


def test_the_users_own_key_does_as_well_and_another_does_not(pair: tuple[Channel, Channel]) -> None:
    asking, asked = pair
    asked.keys.append(key_of("chosen"))
    for secret, is_right in (("chosen", True), ("another", False)):
        asking.learn([1], [asked.own._replace(key=key_of(secret))])
        assert (ask(asking, 0.3) is not None) == is_right


def test_strangers_and_recorded_datagrams_get_no_answer(pair: tuple[Channel, Channel]) -> None:
    asking, asked = pair
    text = json.dumps(NAMES).encode()
    target = ("127.0.0.1", asked.own.port)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(0.2)
        right = question(asked.own.key, text)
        forged = [
            text,
            question("00", text),
            seal(asked.own.key, ANSWER, HEAD.pack(b"stranger", 1, 1), text),
            right[:-1],
            right[:-1] + b" ",
            bytes([right[0] ^ 1]) + right[1:],
            question(asking.own.key, text),  # which is another rank's
        ]
        for data in forged:
            stranger.sendto(data, target)
        with pytest.raises(TimeoutError):
            stranger.recv(65536)
        stranger.sendto(right, target)
        answer = stranger.recv(65536)
        assert json.loads(answer[TAG_BYTES + HEAD.size :]) == {"name": "one"}
        stranger.sendto(right, target)  # again: nobody answers
        with pytest.raises(TimeoutError):
            stranger.recv(65536)


def test_one_look_at_a_flood_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 3)
    flooded, taken = Channel(), list[bytes]()
    monkeypatch.setattr(flooded, "_take", lambda data, address: taken.append(data))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for number in range(5):
            stranger.sendto(bytes([number]), ("127.0.0.1", flooded.own.port))
    for expected in ([b"\0", b"\1", b"\2"], [b"\3", b"\4"]):
        flooded.answer()
        assert taken == expected
        taken.clear()
    flooded.close()


def test_an_answer_is_taken_from_the_one_who_was_asked_alone(pair: tuple[Channel, Channel]) -> None:
    asking, _ = pair
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as impostor:
        impostor.bind(("", 0))
        asking.learn([1], [asking.endpoints[1]._replace(port=impostor.getsockname()[1])])
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(ask(asking, 1.0)))
        thread.start()
        data, sender = impostor.recvfrom(65536)
        head = data[TAG_BYTES : TAG_BYTES + HEAD.size]
        text, key = b'{"name": "liar"}', asking.endpoints[1].key
        earlier = HEAD.pack(asking._sender, 0, 1)
        to_another = HEAD.pack(b"stranger", *HEAD.unpack(head)[1:])
        sealed = [seal(key, ANSWER, each, text) for each in (earlier, to_another)]
        for forged in (text, b'{"rank": []}', seal("00", ANSWER, head, text), *sealed, data):
            impostor.sendto(forged, sender)
        thread.join()
        assert answers == [None]


def test_a_number_is_new_once_and_may_come_out_of_order() -> None:
    numbers, order = Numbers(), list(range(1, 41))
    random.Random(1).shuffle(order)
    assert all(numbers.is_new(b"a", each) for each in order)
    assert not any(numbers.is_new(b"a", each) for each in order)
    assert numbers.is_new(b"b", 7)
    assert numbers.is_new(b"a", 1 << 40)
    assert not numbers.is_new(b"a", 50)  # too old to be told from one that has come
    assert numbers.is_new(b"a", (1 << 40) - 1)


@pytest.mark.parametrize("has_key", [False, True], ids=["without the key", "with the key"])
def test_whatever_comes_no_thread_ends_and_no_memory_grows(pair: tuple[Channel, Channel], has_key: bool) -> None:
    asking, asked = pair
    failures: set[type] = set()
    asked.note_failure = lambda error: failures.add(type(error))
    made = random.Random(2)
    target, largest = ("127.0.0.1", asked.own.port), 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for number in range(1, INPUTS + 1):
            text = made.choice(HOSTILE) if made.random() < 0.5 else made.randbytes(made.randrange(200))
            data = question(asked.own.key, text, number) if has_key else text
            stranger.sendto(data[:65_000], target)
            if number % 500 == 0:
                assert ask(asking) == {"name": "one"}
            if number == INPUTS // 2:
                largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert ask(asking) == {"name": "one"}
    assert (ZeroDivisionError in failures) == bool(failures) == has_key
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < largest + 4096  # KiB
    assert len(asked._had._had) <= 2


def test_many_senders_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SENDERS", 10)
    numbers = Numbers()
    assert all(numbers.is_new(each.to_bytes(8, "big"), 1) for each in range(100))
    assert len(numbers._had) == 10


def test_a_thread_that_asks_gets_what_the_answering_thread_takes_in(pair: tuple[Channel, Channel]) -> None:
    asking, _ = pair
    ends = threading.Event()

    def answers() -> None:  # as the watchdog's thread, which sleeps until something comes or is due
        while not ends.is_set():
            wait_readable([asking.socket], min(asking.push() - time.monotonic(), 60.0))
            asking.answer()

    thread = threading.Thread(target=answers)
    thread.start()
    asking.thread = thread.ident or 0
    began = time.monotonic()
    assert ask(asking) == {"name": "one"}
    assert asking.ask([1], "of no such kind", 0.3) == {}
    assert ask(asking) == {"name": "one"}
    assert time.monotonic() - began < 10
    assert not asking._questions
    ends.set()
    asking.socket.sendto(b"", ("127.0.0.1", asking.own.port))
    thread.join()
