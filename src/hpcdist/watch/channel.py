"""Channel: authenticated datagrams between the watchdog threads of a job, for questions to other ranks.

Each rank has one UDP socket, used by one thread: the watchdog's. MPI cannot carry these questions: a process in a
blocking call of another communicator, or whose MPI holds a lock, may make no progress on ours. A datagram needs no
connection, no central rank, which might be the stopped one, and no file; the thread answers it while the main thread is
inside MPI or computes. Datagrams may be lost, so questions are repeated until they are answered. Another thread that
asks waits until the watchdog's thread has the answers.

    | tag: 16 bytes | sender: 8 | number: 8 | index: 4 | JSON |

The tag is BLAKE2b over all other fields, with the key of the asked rank, for a question and its answer. Each rank draws
its key at random when its watchdog starts, and the ranks exchange their keys over the group. Nothing is parsed before
its tag is checked; an authentic datagram is from a rank of this job, or from its user, and is not checked any further.
A sender numbers its datagrams, and the receiver drops numbers that it has had. An answer repeats the head of its
question, so a recorded answer matches no other question.

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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from itertools import count
from struct import Struct
from typing import Any

from hpcdist.core.waiting import wait_readable
from hpcdist.launch import addresses, environment
from hpcdist.watch.endpoint import Endpoint, Endpoints, Process, machine, process_status
from hpcdist.watch.question import Answers, Message, Question, expand, merge, relay_seconds, remember

INTEREST_SECONDS = 2.0  # seconds for which a question is relayed after its last repetition
WINDOW = 64  # numbers that may arrive out of order
SENDERS = 1 << 16  # senders whose numbers are remembered; more than a job has processes
TAG_BYTES = 16
HEAD = Struct(">8sQi")  # sender, number, and the rank asked, in the sender's numbering
QUESTION, ANSWER = b"question", b"answer"
AT_ONCE = 256  # datagrams read at a time, so that a flood does not keep the thread from its other work

Handler = Callable[[Message], "Message | None"]


def key_of(secret: str) -> str:
    """Return the key of a user's secret."""
    return blake2b(secret.encode(), digest_size=32).hexdigest()


def tag_of(key: str, way: bytes, content: bytes | memoryview) -> bytes:
    return blake2b(content, key=bytes.fromhex(key), digest_size=TAG_BYTES, person=way).digest()


def seal(key: str, way: bytes, head: bytes, text: bytes) -> bytes:
    """Return a datagram: the tag, which needs the key, and the content."""
    return tag_of(key, way, head + text) + head + text


def is_sealed(key: str, way: bytes, data: bytes) -> bool:
    """Tell whether a datagram was made by ``seal`` with a key, and is a question or an answer."""
    is_long_enough = len(data) >= TAG_BYTES + HEAD.size
    return is_long_enough and secrets.compare_digest(tag_of(key, way, data[TAG_BYTES:]), data[:TAG_BYTES])


class Numbers:
    """The numbers received from each sender, so that none is accepted twice."""

    def __init__(self) -> None:
        self._had: dict[bytes, tuple[int, int]] = {}  # the highest one, and a bit for each of those below it

    def is_new(self, sender: bytes, number: int) -> bool:
        """Tell whether a number is new, and remember it; one that is too old counts as known."""
        highest, bits = self._had.get(sender, (0, 0))
        if number > highest:
            bits = (bits << min(number - highest, WINDOW) | 1) & ((1 << WINDOW) - 1)
            highest = number
        elif (age := highest - number) >= WINDOW or bits >> age & 1:
            return False
        else:
            bits |= 1 << age
        remember(self._had, sender, (highest, bits), SENDERS)
        return True


class Channel:
    """This rank's socket, and the endpoints of the others."""

    def __init__(self, rank: int = -1) -> None:
        self.rank = rank
        self.socket = socket.socket(addresses.family(), socket.SOCK_DGRAM)
        self.socket.bind(("", 0))
        self.socket.setblocking(False)
        # never accepted: the kernel completes the connections, and resets them when this process ends
        self.listener = socket.create_server(("", 0), family=addresses.family(), backlog=socket.SOMAXCONN)
        self.own = Endpoint(
            addresses.own_addresses(),
            self.socket.getsockname()[1],
            self.listener.getsockname()[1],
            secrets.token_hex(32),
            os.getpid(),
            process_status(os.getpid())[1],
            machine(),
            environment.node_key(),
            socket.gethostname(),
        )
        self.keys = [self.own.key]  # keys of questions to this rank: its own, and the user's if there is one
        self.endpoints = Endpoints({})  # the endpoints of all ranks
        self.node_peers: dict[int, Endpoint] = {}  # all processes of this node: checked every second, so kept apart
        self.left_out: dict[int, Endpoint] = {}  # the ranks that the world was shrunk by; their numbers are negative
        self.has_answer = False  # whether another node has answered: UDP is not blocked, in either direction
        self.note_life: Callable[[Process], object] = lambda process: None  # called for each authentic datagram
        self.note_failure: Callable[[Exception], object] = lambda error: None  # called with a handler's exception
        self.thread = 0  # the identifier of the thread that answers; 0 if the asking thread does
        self._handlers: dict[str, Handler] = {}
        self._numbers, self._had = count(1), Numbers()
        self._sender = secrets.token_bytes(8)
        self._questions: dict[str, Question] = {}  # by token: this rank's, and those that it relays
        self.numbering = ""  # the same on ranks with the same numbering of ranks; changed by each renumbering

    # -- who is where --------------------------------------------------------------------------------

    def learn(self, ranks: Iterable[int], endpoints: Iterable[Iterable[Any]]) -> None:
        found = [Endpoint(tuple(where), *rest) for where, *rest in endpoints]
        processes = {each.process for each in found}
        self.left_out = {number: each for number, each in self.left_out.items() if each.process not in processes}
        self._set({**self.endpoints, **dict(zip(ranks, found, strict=True))})

    def renumber(self, remaining: list[int]) -> None:
        """Renumber the ranks: ``remaining`` are the old numbers of those that are left."""
        for rank in self.endpoints.keys() - set(remaining):
            self.left_out[min(self.left_out, default=-1) - 1] = self.endpoints[rank]
        self._set({new: self.endpoints[old] for new, old in enumerate(remaining) if old in self.endpoints})

    def _set(self, endpoints: Mapping[int, Endpoint]) -> None:
        self.endpoints = Endpoints(endpoints)
        everyone = [*sorted(endpoints.items()), *self.left_out.items()]
        self.node_peers = {number: each for number, each in everyone if self.sees(each)}
        numbers = "".join(f"{rank}:{each.process}:{each.birth}" for rank, each in sorted(endpoints.items()))
        self.numbering = blake2b(numbers.encode(), digest_size=8).hexdigest()

    def sees(self, endpoint: Endpoint) -> bool:
        """Tell whether this rank can see a rank's process in /proc."""
        return endpoint.node == self.own.node

    def targets(self, endpoint: Endpoint) -> list[tuple[str, int]]:
        """Return the addresses at which a rank may be reached."""
        is_near = endpoint.machine == self.own.machine
        found = (addresses.LOOPBACKS[addresses.family()],) if is_near else endpoint.addresses
        return [(address, endpoint.port) for address in found]

    def stream_targets(self, endpoint: Endpoint) -> list[tuple[str, int]]:
        """Return the addresses at which connections to a rank's process end with it, and with no other process.

        An address that this machine has too (of a container network) does not reach another machine.
        """
        found = [address for address, _ in self.targets(endpoint)]
        if endpoint.machine != self.own.machine:
            found = [address for address in found if address not in self.own.addresses]
        return [(address, endpoint.stream_port) for address in found]

    # -- messages ------------------------------------------------------------------------------------

    def register(self, kind: str, handler: Handler) -> None:
        """Register the handler of a kind of messages; unregistered kinds are dropped.

        The thread that calls ``answer`` calls the handler with the message, a dict with ``from``, the sender's rank; it
        returns the answer or None.
        """
        self._handlers[kind] = handler

    def answer(self) -> None:
        """Read the datagrams that have come, and answer questions; not all if there is a flood of them."""
        for _ in range(AT_ONCE):
            try:
                data, address = self.socket.recvfrom(65536)
            except BlockingIOError:
                return
            except OSError:
                continue  # an earlier datagram did not arrive
            try:
                self._take(data, address)
            except Exception as error:  # whatever a message contains, this thread continues
                self.note_failure(error)

    def _take(self, data: bytes, address: Any) -> None:
        """Handle a datagram, if it belongs to this job."""
        key = next((key for key in self.keys if is_sealed(key, QUESTION, data)), None)
        if key is None:
            any(self._take_answer(each, data) for each in list(self._questions.values()))
            return
        head = data[TAG_BYTES : TAG_BYTES + HEAD.size]
        sender, number, _ = HEAD.unpack(head)
        if not self._had.is_new(sender, number):
            return
        message = json.loads(data[TAG_BYTES + HEAD.size :])
        if message["from"] >= 0:  # a rank's
            machine, pid = message["via"]
            self.note_life((machine, pid))
        reply = partial(self._reply, key, head, address)
        if "ranks" in message:
            self._relay(message, reply)
        elif (answer := self._handled(message)) is not None:
            reply(answer)

    def _handled(self, message: Message) -> Message | None:
        handler = self._handlers.get(message["kind"])
        return None if handler is None else handler(message)

    def _reply(self, key: str, head: bytes, address: Any, answer: Message) -> None:
        with suppress(OSError):  # it may be too large for a datagram
            self.socket.sendto(seal(key, ANSWER, head, json.dumps(answer).encode()), address)

    def _take_answer(self, question: Question, data: bytes) -> bool:
        """Read a datagram if it answers a question, and tell whether it does."""
        if len(data) < TAG_BYTES + HEAD.size:
            return False
        sender, number, rank = HEAD.unpack_from(data, TAG_BYTES)
        asked = question.who(rank, number)
        if sender != self._sender or asked is None or not is_sealed(asked.key, ANSWER, data):
            return False
        for each in (asked, *question.take(rank, json.loads(data[TAG_BYTES + HEAD.size :]), time.monotonic())):
            self._note_answer(each)
        if question.is_answered:
            question.done()
        return True

    def _note_answer(self, endpoint: Endpoint) -> None:
        """Record that an authentic answer has come from a rank."""
        self.has_answer = self.has_answer or not self.sees(endpoint)
        self.note_life(endpoint.process)

    # -- questions -----------------------------------------------------------------------------------

    def others(self) -> dict[int, Endpoint]:
        """Return the endpoints of the other processes of the job, by rank, including excluded ranks."""
        return self._find([*self.endpoints, *self.left_out])

    def _find(self, ranks: Iterable[int]) -> dict[int, Endpoint]:
        """Return the known endpoints of some ranks except this one."""
        found = ((rank, self.endpoints.get(rank) or self.left_out.get(rank)) for rank in ranks if rank != self.rank)
        return {rank: each for rank, each in found if each is not None and each != self.own}

    def send(
        self, ranks: Iterable[int], kind: str, take: Callable[[Answers], object] | None = None, /, **content: Any
    ) -> None:
        """Ask like ``ask``, for ``INTEREST_SECONDS``, without waiting; the thread passes all answers to ``take``."""
        question = self._question(ranks, kind, content)
        question.until = time.monotonic() + INTEREST_SECONDS
        if take is not None:
            question.done = lambda: take(question.answers)
        self._begin(question)

    def ask(self, ranks: Iterable[int], kind: str, seconds: float, /, **content: Any) -> Answers:
        """Ask the others of some ranks, and return the answers that come in time, by rank.

        There may be any number of ranks (``question``); for many it waits longer, since a rank that relays the question
        may be silent. Ranks without a known endpoint do not answer. ``content`` must fit into a datagram.
        """
        question, all_here = self._question(ranks, kind, content), threading.Event()
        seconds += relay_seconds(len(question.asked))
        question.until = deadline = time.monotonic() + seconds
        question.done = all_here.set
        if self._begin(question):
            while not question.is_answered and (now := time.monotonic()) < deadline:
                if wait_readable([self.socket], min(self.push(), deadline) - now):
                    self.answer()
        elif not question.is_answered:
            all_here.wait(seconds)
        self._questions.pop(question.message["token"], None)
        return dict(question.answers)  # a copy: the thread may add another one

    def _question(self, ranks: Iterable[int], kind: str, content: Message) -> Question:
        """Return a question of this rank's; ``via`` is the process that sends it, which may relay another one's."""
        head = {"kind": kind, "from": self.rank, "via": self.own.process}
        which = {"token": secrets.token_hex(8), "numbering": self.numbering}
        return Question(self._find(ranks), {**head, **which, **content})

    def _begin(self, question: Question) -> bool:
        """Send a question, and tell whether this thread must repeat it itself."""
        first = question.due(time.monotonic(), self._numbers)
        self._questions[question.message["token"]] = question  # from here on it belongs to the thread
        self._transmit(first)
        if self.thread in (0, threading.get_ident()):
            return True
        with suppress(OSError):  # an empty datagram wakes the thread, which repeats the question in time
            self.socket.sendto(b"", self.targets(self.own)[0])
        return False

    def _relay(self, message: Message, reply: Callable[[Message], None]) -> None:
        """Relay a question to other ranks, or return their answers since the last time."""
        if message["numbering"] != self.numbering:
            return
        ranks, token = expand(message.pop("ranks")), message["token"]
        has_begun = token in self._questions
        if not has_begun:
            self._questions[token] = Question(self._find(ranks), {**message, "via": self.own.process})
        relayed = self._questions[token]
        relayed.until = time.monotonic() + INTEREST_SECONDS
        relayed.done = partial(self._return, relayed, reply, ranks)
        if not has_begun and self.rank in ranks and (own := self._handled(message)) is not None:
            relayed.answers[self.rank] = own
        if has_begun or relayed.is_answered:
            relayed.done()

    def _return(self, relayed: Question, reply: Callable[[Message], None], wanted: list[int]) -> None:
        """Send the answers of a relayed question that were still missing when it was last asked."""
        for each in merge({rank: relayed.answers[rank] for rank in wanted if rank in relayed.answers}):
            reply(each)

    def push(self) -> float:
        """Repeat the questions that are due; return the time when the next one is due.

        The thread that calls ``answer`` calls this.
        """
        now, due = time.monotonic(), math.inf
        for token, each in list(self._questions.items()):
            if now >= each.until:
                self._questions.pop(token, None)
            elif not each.is_answered:
                self._transmit(each.due(now, self._numbers))
                due = min(due, each.again)
        return due

    def _transmit(self, due: list[tuple[int, Endpoint, int, bytes]]) -> None:
        for rank, endpoint, number, text in due:
            data = seal(endpoint.key, QUESTION, HEAD.pack(self._sender, number, rank), text)
            for target in self.targets(endpoint):
                with suppress(OSError):
                    self.socket.sendto(data, target)

    def close(self) -> None:
        self.socket.close()
        self.listener.close()
