"""Channel: authenticated datagrams between the watchdog threads of a job, by which ranks ask each other things.

Each rank has a UDP socket of its own. MPI cannot carry these questions: a process that is in a blocking call of another
communicator, or whose MPI holds a lock, may make no progress on ours. A datagram needs no connection, no central rank,
which might be the stopped one, and no file to leave behind; a thread answers it while the main thread is inside MPI or
computes. Questions may be lost, so they are repeated until they are answered.

    | tag: 16 bytes | sender: 8 | number: 8 | index: 4 | JSON |

The tag is BLAKE2b over all that follows, with the key of the rank that is asked, for a question and its answer alike.
Each rank draws its key at random when its watchdog starts, and the ranks exchange their keys over the group. Nothing is
parsed before its tag is checked. A sender numbers what it sends, and the receiver drops a number that it has had. An
answer repeats the head of its question; so a recorded one fits no other. Then the JSON must have the shape that its
kind has, so that no handler and no reader of an answer needs to check it.

A kind of message is added by ``register``; ``ask`` waits for answers, ``send`` does not.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple

from hpcdist.core.readiness import readable
from hpcdist.launch import addresses, environment

LARGEST = 60_000  # bytes of JSON in a datagram, under UDP's limit
AGAIN_SECONDS = 0.25  # a question unanswered for so long is asked again: datagrams may be lost
BURST = 64  # questions between two looks for answers: a socket's buffer holds a few hundred
AT_ONCE = 256  # datagrams that one look takes in, so that a flood of them does not keep the thread from its other work
WINDOW = 64  # numbers that may arrive out of order
SENDERS = 1 << 16  # whose numbers are remembered; more than a job has processes

TAG_BYTES = 16
HEAD = struct.Struct(">8sQI")  # sender, number, and whom the sender asks, in its own numbers
QUESTION, ANSWER = b"question", b"answer"

Process = tuple[str, int]  # machine and process id
Message = dict[str, Any]
Handler = Callable[[Message], "Message | None"]


class Endpoint(NamedTuple):
    """Where the watchdog of one rank listens, and what its process is."""

    addresses: tuple[str, ...]
    port: int
    stream_port: int  # of TCP: connections there end with the process (``liveness``)
    key: str  # hexadecimal
    sender: str  # what its datagrams begin with; hexadecimal
    pid: int
    birth: str  # when the process was started, by the kernel's count: tells it from a later one with its id
    machine: str  # tells processes that see each other's process ids apart from others
    node_key: str  # ``environment.node_key``
    host: str

    @property
    def process(self) -> Process:
        """What names the process on all nodes, however its rank is numbered."""
        return self.machine, self.pid

    @property
    def node(self) -> tuple[str, str]:
        """What is the same for the processes that see each other."""
        return self.machine, self.node_key


@cache
def machine() -> str:
    """Return what is the same for all processes that share this kernel and its process ids."""
    return addresses.kernel_id("pid") or secrets.token_hex(8)


def process_status(pid: int) -> tuple[str, str]:
    """Return the letter of a process's state in ``/proc`` and when it was started; "" if it has gone, ? if unknown."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fields = os.read(descriptor, 4096).rpartition(b")")[2].split()
        finally:
            os.close(descriptor)
        return fields[0].decode(), fields[19].decode()
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    except (OSError, IndexError):  # this process may have no descriptor left
        return "?", ""


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


def fits(value: Any, shape: Any) -> bool:
    """Tell whether a value out of JSON has a shape.

    Args:
        value: the value.
        shape: a type; None; a tuple of shapes, one of which fits; a list of one shape, that of all entries; a list of
            more, one for each entry; a dict of the shapes of some keys, where a missing one counts as None; or a dict
            of ``str`` and the shape of all values.
    """
    if isinstance(shape, tuple):
        return any(fits(value, each) for each in shape)
    if isinstance(shape, list):
        if not isinstance(value, list) or (len(shape) > 1 and len(shape) != len(value)):
            return False
        shapes = shape * len(value) if len(shape) == 1 else shape
        return all(map(fits, value, shapes))
    if isinstance(shape, dict):
        if str in shape:
            return isinstance(value, dict) and all(fits(each, shape[str]) for each in value.values())
        return isinstance(value, dict) and all(fits(value.get(key), each) for key, each in shape.items())
    return value is None if shape is None else isinstance(value, shape)


def datagram_socket() -> socket.socket:
    """Return a UDP socket on a free port, which does not block."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("", 0))
    made.setblocking(False)
    return made


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


class Channel:
    """This rank's socket, and where the others listen.

    Attributes:
        rank: this process's.
        own: where it listens.
        keys: with which a question to it may be sealed: its own key, and the user's if there is one.
        endpoints: where all ranks listen, by rank.
        node_peers: those of this node; looked at every second, so kept apart from the others.
        left_out: those of ranks that the world was shrunk by.
        changes: how often the endpoints have changed.
        has_heard: whether a datagram has come from another node: UDP is not blocked.
        note_life: called with the process that an authenticated datagram has come from.
        note_failure: called with what a handler has raised.
        thread: the identifier of the thread that answers.
    """

    def __init__(self, rank: int = -1) -> None:
        self.rank = rank
        self.socket = datagram_socket()
        # nobody accepts: the kernel completes the connections, and resets them when this process ends
        self.listener = socket.create_server((addresses.ALL_INTERFACES, 0), backlog=socket.SOMAXCONN)
        self.own = Endpoint(
            addresses.own(),
            self.socket.getsockname()[1],
            self.listener.getsockname()[1],
            secrets.token_hex(32),
            secrets.token_hex(8),
            os.getpid(),
            process_status(os.getpid())[1],
            machine(),
            environment.node_key(),
            socket.gethostname(),
        )
        self.keys = [self.own.key]
        self.endpoints: dict[int, Endpoint] = {}
        self.node_peers: dict[int, Endpoint] = {}
        self.left_out: list[Endpoint] = []
        self.changes = 0
        self.has_heard = False
        self.note_life: Callable[[Process], object] = lambda process: None
        self.note_failure: Callable[[Exception], object] = lambda error: None
        self.thread = 0
        self._handlers: dict[str, tuple[Handler | None, Any]] = {}
        self._numbers, self._had = count(1), Numbers()
        self._senders: dict[bytes, Endpoint] = {}
        self._reserve: socket.socket | None = datagram_socket()  # there may be no descriptor left for a question

    # -- who is where --------------------------------------------------------------------------------

    def learn(self, ranks: Iterable[int], endpoints: Iterable[Iterable[Any]]) -> None:
        """Take note of where the ranks of a group listen."""
        found = [Endpoint(tuple(where), *rest) for where, *rest in endpoints]
        self._set({**self.endpoints, **dict(zip(ranks, found, strict=True))})
        self.left_out = [each for each in self.left_out if each not in self.endpoints.values()]

    def renumber(self, remaining: list[int]) -> None:
        """Take note that ``remaining`` are the numbers until now of the ranks that are still there."""
        self.left_out += [each for rank, each in self.endpoints.items() if rank not in remaining]
        self._set({new: self.endpoints[old] for new, old in enumerate(remaining) if old in self.endpoints})

    def reset(self) -> None:
        """Take note that the world's ranks are about to get other numbers: nobody is in it until ``learn``."""
        self.left_out += self.endpoints.values()
        self._set({})

    def _set(self, endpoints: dict[int, Endpoint]) -> None:
        self.endpoints = endpoints
        self.node_peers = {rank: each for rank, each in sorted(endpoints.items()) if self.sees(each)}
        self._senders = {bytes.fromhex(each.sender): each for each in self.everyone()}
        self.changes += 1

    def everyone(self) -> list[Endpoint]:
        """Return the endpoints of all ranks of the job, also of those that were left out."""
        return [*self.endpoints.values(), *self.left_out]

    def sees(self, endpoint: Endpoint) -> bool:
        """Tell whether a rank's process can be looked at from here."""
        return endpoint.node == self.own.node

    def targets(self, endpoint: Endpoint) -> list[tuple[str, int]]:
        """Return the addresses under which a rank may be reached."""
        found = (addresses.LOOPBACK,) if endpoint.machine == self.own.machine else endpoint.addresses
        return [(address, endpoint.port) for address in found]

    def stream_targets(self, endpoint: Endpoint) -> list[tuple[str, int]]:
        """Return the addresses at which connections to a rank's process end with it, and with no other process.

        An address that this machine has too, such as a container network's, would reach this machine.
        """
        is_here = endpoint.machine == self.own.machine
        found = (
            (addresses.LOOPBACK,)
            if is_here
            else [each for each in endpoint.addresses if each not in self.own.addresses]
        )
        return [(address, endpoint.stream_port) for address in found]

    # -- messages ------------------------------------------------------------------------------------

    def register(self, kind: str, handler: Handler, shape: Any) -> None:
        """Have messages of a kind handled.

        Args:
            kind: what the messages are called.
            handler: is given the message, a dict that holds ``from``, the sender's rank, and returns the answer or
                None; the thread that calls ``answer`` calls it.
            shape: of the messages, as ``fits`` takes it; others are dropped.
        """
        self._handlers[kind] = handler, shape

    def answer(self) -> None:
        """Take in the messages that have come, and answer them."""
        for _ in range(AT_ONCE):
            try:
                data, address = self.socket.recvfrom(65536)
            except BlockingIOError:
                return
            except OSError:
                continue  # news that an earlier answer did not arrive
            try:
                self._take(data, address)
            except Exception as error:  # whatever a message holds, this thread goes on
                self.note_failure(error)

    def _take(self, data: bytes, address: Any) -> None:
        """Handle what has come, if it is a message of this job's."""
        key = next((key for key in self.keys if is_sealed(key, QUESTION, data)), None)
        if key is None:
            return
        head = data[TAG_BYTES : TAG_BYTES + HEAD.size]
        sender, number, _ = HEAD.unpack(head)
        if not self._had.is_new(sender, number):
            return
        self._note(self._senders.get(sender))
        try:
            message = json.loads(data[TAG_BYTES + HEAD.size :])
        except (ValueError, RecursionError):
            return
        if not fits(message, {"kind": str, "from": int}):
            return
        handler, shape = self._handlers.get(message["kind"], (None, None))
        answer = handler(message) if handler is not None and fits(message, shape) else None
        if answer is not None and len(text := json.dumps(answer).encode()) <= LARGEST:
            with suppress(OSError):
                self.socket.sendto(seal(key, ANSWER, head, text), address)

    def send(self, ranks: Iterable[int], kind: str, /, **content: Any) -> None:
        """Send a message to ranks once, which may be lost; nothing is waited for."""
        text = json.dumps({"kind": kind, "from": self.rank, **content}).encode()
        self._send(self.socket, {rank: each for rank in ranks if (each := self.endpoints.get(rank))}, text)

    def ask(self, ranks: Iterable[int], kind: str, shape: Any, seconds: float, /, **content: Any) -> dict[int, Message]:
        """Ask ranks and return the answers that come in time, by rank.

        Args:
            ranks: whom to ask; those whose endpoint is not known do not answer.
            kind: of the question.
            shape: of an answer, as ``fits`` takes it; others are dropped.
            seconds: how long to wait.
            content: what the question holds; has to fit into a datagram.
        """
        waiting = {rank: each for rank in ranks if (each := self.endpoints.get(rank)) is not None}
        return self.ask_endpoints(waiting, kind, shape, seconds, **content)

    def ask_endpoints(
        self, asked: dict[int, Endpoint], kind: str, shape: Any, seconds: float, /, **content: Any
    ) -> dict[int, Message]:
        """Ask processes by numbers of the caller's choice, as ``ask`` does ranks."""
        answers: dict[int, Message] = {}
        waiting = dict(asked)
        numbers: set[int] = set()
        text = json.dumps({"kind": kind, "from": self.rank, **content}).encode()
        others = [self.socket] if threading.get_ident() == self.thread else []  # they may ask this one meanwhile
        deadline = time.monotonic() + seconds
        with self._asking_socket() as asking:

            def collect() -> None:
                for index, answer in self._answers(asking, waiting, numbers):
                    if fits(answer, shape):
                        answers[index] = answer
                        del waiting[index]
                if others:
                    self.answer()

            again = 0.0
            while waiting and (now := time.monotonic()) < deadline:
                if now >= again:
                    again = now + AGAIN_SECONDS
                    several = list(waiting.items())
                    for first in range(0, len(several), BURST):
                        numbers.add(self._send(asking, dict(several[first : first + BURST]), text))
                        if first + BURST < len(several):
                            collect()
                if readable([asking, *others], min(again, deadline) - now):
                    collect()
        return answers

    def _send(self, sending: socket.socket, endpoints: dict[int, Endpoint], text: bytes) -> int:
        """Send a message to processes, all under one number, which is returned."""
        number, sender = next(self._numbers), bytes.fromhex(self.own.sender)
        for index, each in endpoints.items():
            data = seal(each.key, QUESTION, HEAD.pack(sender, number, index & 0xFFFFFFFF), text)
            for target in self.targets(each):
                with suppress(OSError):
                    sending.sendto(data, target)
        return number

    def _answers(
        self, asking: socket.socket, waiting: dict[int, Endpoint], numbers: set[int]
    ) -> Iterator[tuple[int, Message]]:
        """Yield the authentic answers that have come, with the number of the process that was asked."""
        by_index = {index & 0xFFFFFFFF: index for index in waiting}
        for _ in range(AT_ONCE):
            try:
                data, _ = asking.recvfrom(65536)
            except BlockingIOError:
                return
            except OSError:
                continue
            if len(data) < TAG_BYTES + HEAD.size:
                continue
            _, number, head_index = HEAD.unpack_from(data, TAG_BYTES)
            index = by_index.get(head_index)
            asked = None if index is None else waiting.get(index)
            if index is None or asked is None or number not in numbers or not is_sealed(asked.key, ANSWER, data):
                continue
            self._note(asked)
            with suppress(ValueError, RecursionError):
                yield index, json.loads(data[TAG_BYTES + HEAD.size :])

    @contextmanager
    def _asking_socket(self) -> Iterator[socket.socket]:
        """Open a socket of its own for a question: late answers to earlier ones must not reach it."""
        reserve, self._reserve = self._reserve, None
        try:
            with reserve or datagram_socket() as asking:
                yield asking
        finally:
            if self._reserve is None:
                with suppress(OSError):  # as above; the next question tries again
                    self._reserve = datagram_socket()

    def _note(self, sender: Endpoint | None) -> None:
        """Take note that something authentic has come from a process, if it is one of the job's."""
        if sender is not None and sender.process != self.own.process:
            self.has_heard = self.has_heard or not self.sees(sender)
            self.note_life(sender.process)

    def close(self) -> None:
        """Close the sockets."""
        self.socket.close()
        self.listener.close()
        if self._reserve is not None:
            self._reserve.close()
