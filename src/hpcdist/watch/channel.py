"""Channel: authenticated datagrams between the watchdog threads of a job, by which ranks ask each other things.

Each rank has a UDP socket of its own. MPI cannot carry these questions: a process that is in a blocking call of another
communicator, or whose MPI holds a lock, may make no progress on ours. A datagram needs no connection, no central rank,
which might be the stopped one, and no file to leave behind; a thread answers it while the main thread is inside MPI or
computes. Questions may be lost, so they are repeated until they are answered.

Each rank draws its key at random when its watchdog starts, and the ranks exchange their keys over the group
(``datagrams``). What is authentic comes from a rank of this job, or from its user, and is not checked any further.

A kind of message is added by ``register``; ``ask`` waits for answers, ``send`` does not.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple

from hpcdist.core.waiting import readable, wait_until
from hpcdist.launch import addresses, environment
from hpcdist.watch.datagrams import ANSWER, HEAD, QUESTION, TAG_BYTES, Numbers, is_sealed, seal
from hpcdist.watch.endpoint import Endpoint, Endpoints, Process, machine, process_status
from hpcdist.watch.question import RELAY, Message, Question, expanded, merged, relay_seconds

INTEREST_SECONDS = 2.0  # how long a question is relayed after it was asked last
AT_ONCE = 256  # datagrams that one look takes in, so that a flood of them does not keep the thread from its other work

Handler = Callable[[Message], "Message | None"]


def datagram_socket() -> socket.socket:
    """Return a UDP socket on a free port, which does not block."""
    made = socket.socket(addresses.family(), socket.SOCK_DGRAM)
    made.bind(("", 0))
    made.setblocking(False)
    return made


def received(source: socket.socket) -> Iterator[tuple[bytes, Any]]:
    """Yield the datagrams that have come, with who sent them; not all if there is a flood of them."""
    for _ in range(AT_ONCE):
        try:
            yield source.recvfrom(65536)
        except BlockingIOError:
            return
        except OSError:
            continue  # news that an earlier datagram did not arrive


class Reply(NamedTuple):
    """How and where a question is answered."""

    key: str
    head: bytes
    address: Any


class Relayed(Question):
    """A question that this rank asks others for another one."""

    reply: Reply  # to whom the answers go
    wanted: list[int]  # the ranks whose answers were still missing there, when it was last asked
    until: float  # when nobody is interested any more


class Channel:
    """This rank's socket, and where the others listen."""

    def __init__(self, rank: int = -1) -> None:
        self.rank = rank
        self.socket = datagram_socket()
        # nobody accepts: the kernel completes the connections, and resets them when this process ends
        self.listener = socket.create_server(("", 0), family=addresses.family(), backlog=socket.SOMAXCONN)
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
        self.keys = [self.own.key]  # of a question to this rank: its own, and the user's if there is one
        self.endpoints = Endpoints({})  # where all ranks listen, by rank
        self.node_peers: dict[int, Endpoint] = {}  # of this node: looked at every second, so kept apart
        self.left_out: list[Endpoint] = []  # of ranks that the world was shrunk by
        self.has_received = False  # whether a datagram has come from another node: UDP is not blocked
        self.note_life: Callable[[Process], object] = lambda process: None  # called for each authentic datagram
        self.note_failure: Callable[[Exception], object] = lambda error: None  # called with what a handler has raised
        self.thread = 0  # the identifier of the thread that answers
        self._handlers: dict[str, Handler] = {}
        self._numbers, self._had = count(1), Numbers()
        self._sender = bytes.fromhex(self.own.sender)
        self._relayed: dict[str, Relayed] = {}  # by their tokens
        self.numbering = ""  # the same on ranks that count the ranks alike; another one once that has changed
        self._idle = deque([datagram_socket()])  # for questions, one at least: there may be no descriptor left for it

    # -- who is where --------------------------------------------------------------------------------

    def learn(self, ranks: Iterable[int], endpoints: Iterable[Iterable[Any]]) -> None:
        found = [Endpoint(tuple(where), *rest) for where, *rest in endpoints]
        self._set({**self.endpoints, **dict(zip(ranks, found, strict=True))})
        self.left_out = [each for each in self.left_out if each not in self.endpoints.values()]

    def renumber(self, remaining: list[int]) -> None:
        """Take note that ``remaining`` are the numbers until now of the ranks that are still there."""
        self.left_out += [each for rank, each in self.endpoints.items() if rank not in remaining]
        self._set({new: self.endpoints[old] for new, old in enumerate(remaining) if old in self.endpoints})

    def _set(self, endpoints: Mapping[int, Endpoint]) -> None:
        self.endpoints = Endpoints(endpoints)
        self.node_peers = {rank: each for rank, each in sorted(endpoints.items()) if self.sees(each)}
        numbers = "".join(f"{rank}:{endpoints[rank].sender}" for rank in sorted(endpoints))
        self.numbering = blake2b(numbers.encode(), digest_size=8).hexdigest()

    def sees(self, endpoint: Endpoint) -> bool:
        """Tell whether a rank's process can be looked at from here."""
        return endpoint.node == self.own.node

    def targets(self, endpoint: Endpoint) -> list[tuple[str, int]]:
        """Return the addresses under which a rank may be reached."""
        is_near = endpoint.machine == self.own.machine
        found = (addresses.LOOPBACKS[addresses.family()],) if is_near else endpoint.addresses
        return [(address, endpoint.port) for address in found]

    def stream_targets(self, endpoint: Endpoint) -> list[tuple[str, int]]:
        """Return the addresses at which connections to a rank's process end with it, and with no other process.

        An address that this machine has too (a container network's) does not reach another one.
        """
        found = [address for address, _ in self.targets(endpoint)]
        if endpoint.machine != self.own.machine:
            found = [address for address in found if address not in self.own.addresses]
        return [(address, endpoint.stream_port) for address in found]

    # -- messages ------------------------------------------------------------------------------------

    def register(self, kind: str, handler: Handler) -> None:
        """Have messages of a kind handled; others are dropped.

        The thread that calls ``answer`` calls the handler with the message, a dict that holds ``from``, the sender's
        rank; it returns the answer or None.
        """
        self._handlers[kind] = handler

    def answer(self) -> None:
        """Take in the messages that have come, and answer them."""
        for data, address in received(self.socket):
            try:
                self._take(data, address)
            except Exception as error:  # whatever a message holds, this thread goes on
                self.note_failure(error)

    def _take(self, data: bytes, address: Any) -> None:
        """Handle what has come, if it is a message of this job's."""
        key = next((key for key in self.keys if is_sealed(key, QUESTION, data)), None)
        if key is None:
            for each in self._relayed.values():
                if self._take_answer(each, data):
                    if each.is_answered:
                        self._return(each)
                    return
            return
        head = data[TAG_BYTES : TAG_BYTES + HEAD.size]
        sender, number, _ = HEAD.unpack(head)
        if not self._had.is_new(sender, number):
            return
        left_out = (each for each in self.left_out if each.sender == sender.hex())
        self._note(self.endpoints.of_sender(sender) or next(left_out, None))
        message = json.loads(data[TAG_BYTES + HEAD.size :])
        reply = Reply(key, head, address)
        if message["kind"] == RELAY:
            self._relay(message, reply)
        elif (answer := self._handled(message)) is not None:
            self._reply(reply, answer)

    def _handled(self, message: Message) -> Message | None:
        handler = self._handlers.get(message["kind"])
        return None if handler is None else handler(message)

    def _reply(self, to: Reply, answer: Message) -> None:
        text = json.dumps(answer).encode()
        with suppress(OSError):  # it may be too large for a datagram
            self.socket.sendto(seal(to.key, ANSWER, to.head, text), to.address)

    # -- questions to many ranks ---------------------------------------------------------------------

    def _others(self, ranks: Iterable[int]) -> dict[int, Endpoint]:
        """Return where the others of some ranks listen."""
        found = ((rank, self.endpoints.get(rank)) for rank in ranks if rank != self.rank)
        return {rank: each for rank, each in found if each is not None}

    def _relay(self, message: Message, reply: Reply) -> None:
        """Ask other ranks what a rank asks all of them, or return what they have answered since."""
        token, numbering, asks = message["token"], message["numbering"], message["message"]
        if numbering != self.numbering:
            return
        ranks, has_begun = expanded(message["ranks"]), token in self._relayed
        if not has_begun:
            self._note(self.endpoints.get(asks["from"]))
            self._relayed[token] = Relayed(self._others(ranks), asks, {"token": token, "numbering": numbering})
        relayed = self._relayed[token]
        relayed.until, relayed.reply, relayed.wanted = time.monotonic() + INTEREST_SECONDS, reply, ranks
        if not has_begun and self.rank in ranks and (own := self._handled(asks)) is not None:
            relayed.answers[self.rank] = own
        if has_begun or relayed.is_answered:
            self._return(relayed)

    def _return(self, relayed: Relayed) -> None:
        """Send what has come of the answers that a relayed question still lacks."""
        answers = relayed.answers
        for each in merged({rank: answers[rank] for rank in relayed.wanted if rank in answers}):
            self._reply(relayed.reply, each)

    def push(self) -> float:
        """Go on with the questions that this rank asks others for another one; return when that is due again.

        The thread that calls ``answer`` calls this.
        """
        now, due = time.monotonic(), math.inf
        for token, each in list(self._relayed.items()):
            if now >= each.until:
                del self._relayed[token]
            elif not each.is_answered:
                self._send(self.socket, each, now)
                due = min(due, each.again)
        return due

    def _send(self, sending: socket.socket, question: Question, now: float) -> None:
        for rank, endpoint, number, text in question.due(now, self._numbers):
            self._seal_to(sending, endpoint, HEAD.pack(self._sender, number, rank), text)

    def _seal_to(self, sending: socket.socket, endpoint: Endpoint, head: bytes, text: bytes) -> None:
        data = seal(endpoint.key, QUESTION, head, text)
        for target in self.targets(endpoint):
            with suppress(OSError):
                sending.sendto(data, target)

    def _take_answer(self, question: Question, data: bytes) -> bool:
        """Take in what has come if it answers a question, and tell whether it does."""
        if len(data) < TAG_BYTES + HEAD.size:
            return False
        sender, number, rank = HEAD.unpack_from(data, TAG_BYTES)
        asked = question.who(rank, number)
        if sender != self._sender or asked is None or not is_sealed(asked.key, ANSWER, data):
            return False
        self._note(asked)
        for each in question.take(rank, json.loads(data[TAG_BYTES + HEAD.size :]), time.monotonic()):
            self._note(each)
        return True

    def send(self, ranks: Iterable[int], kind: str, /, **content: Any) -> None:
        """Send a message to the others of some ranks once, which may be lost; nothing is waited for."""
        text, number = json.dumps({"kind": kind, "from": self.rank, **content}).encode(), next(self._numbers)
        for rank, endpoint in self._others(ranks).items():
            self._seal_to(self.socket, endpoint, HEAD.pack(self._sender, number, rank), text)

    def ask(self, ranks: Iterable[int], kind: str, seconds: float, /, **content: Any) -> dict[int, Message]:
        """Ask the others of some ranks, and return the answers that come in time, by rank.

        There may be any number of ranks (``question``); many are given longer, since one that relays the question may
        be silent. Those whose endpoint is not known do not answer. ``content`` has to fit into a datagram.
        """
        asked = self._others(ranks)
        message = {"kind": kind, "from": self.rank, **content}
        question = Question(asked, message, {"token": secrets.token_hex(8), "numbering": self.numbering})
        return self._wait(question, seconds + relay_seconds(len(asked)))

    def ask_endpoints(
        self, asked: dict[int, Endpoint], kind: str, seconds: float, /, **content: Any
    ) -> dict[int, Message]:
        """Ask processes by numbers of the caller's choice, as ``ask`` does ranks, but each by itself."""
        return self._wait(Question(asked, {"kind": kind, "from": self.rank, **content}, None), seconds)

    def _wait(self, question: Question, seconds: float) -> dict[int, Message]:
        """Wait for the answers to a question, and return those that come in time."""
        others = [self.socket] if threading.get_ident() == self.thread else []  # they may ask this one meanwhile
        deadline = time.monotonic() + seconds
        with self._asking_socket(seconds) as asking:
            while asking is not None and not question.is_answered and (now := time.monotonic()) < deadline:
                self._send(asking, question, now)
                due = min(question.again, deadline, self.push() if others else math.inf)
                ready = readable([asking, *others], due - now)
                if asking in ready:
                    for data, _ in received(asking):
                        self._take_answer(question, data)
                if self.socket in ready:
                    self.answer()
        return question.answers

    @contextmanager
    def _asking_socket(self, seconds: float) -> Iterator[socket.socket | None]:
        """Have a socket of its own for a question; None if no descriptor is left, and no other question ends in time.

        What it holds of late answers to earlier questions has their numbers.
        """
        found: list[socket.socket] = []

        def is_found() -> bool:
            with suppress(OSError, IndexError):  # another thread was quicker
                found.append(self._idle.pop() if self._idle else datagram_socket())
            return bool(found)

        wait_until(is_found, seconds)
        try:
            yield next(iter(found), None)
        finally:
            self._idle += found

    def _note(self, sender: Endpoint | None) -> None:
        """Take note that something authentic has come from a process, if it is one of the job's."""
        if sender is not None and sender.process != self.own.process:
            self.has_received = self.has_received or not self.sees(sender)
            self.note_life(sender.process)

    def close(self) -> None:
        self.socket.close()
        self.listener.close()
        for each in self._idle:
            each.close()
