"""Side channel: datagrams between the watchdog threads, by which ranks ask each other where they are.

Each rank has a UDP socket of its own. MPI cannot carry these questions: a process that is in a blocking call of another
communicator, or whose MPI holds a lock, may make no progress on ours. A datagram needs no connection, no central rank,
which might be the stopped one, and no file to leave behind; a thread answers it while the main thread is inside MPI or
computes. A process that does not answer is judged by the kernel's view of it if it runs on this machine: stopped, dead
or busy. One rank of each node tells the other nodes which processes of its node have ended.

Questions carry the asked rank's secret, which the ranks exchange over the group when it is made, or the one that the
user has chosen for all ranks (HPCDIST_DEBUG_SECRET).
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from hpcdist.core.readiness import readable
from hpcdist.launch import addresses, environment

LARGEST = 60_000  # bytes of a datagram, under UDP's limit
AGAIN_SECONDS = 0.25  # a question unanswered for so long is asked again: datagrams may be lost
BURST = 64  # questions between two looks for answers: a socket's buffer holds a few hundred

PROCESS_STATES = {
    "": "its process has ended",
    "T": "its process is stopped (SIGSTOP or a debugger)",
    "t": "its process is stopped by a debugger",
    "Z": "its process has ended",
    "X": "its process has ended",
    "D": "its process is in uninterruptible sleep (I/O)",
}
NO_ANSWER = "it does not answer: stopped, gone, or busy in native code that holds Python's interpreter lock"
NOBODY_ANSWERS = "nobody off this node answers: is UDP blocked between the nodes?"


Process = tuple[str, int]  # machine and process id


class Place(NamedTuple):
    """Where the watchdog of one rank listens."""

    addresses: tuple[str, ...]
    port: int
    secret: str
    pid: int
    machine: str  # tells processes that see each other's process ids apart from others
    node: str  # the name that the user gave the node, where several are imitated
    host: str

    @property
    def process(self) -> Process:
        """What names the process on all nodes, however its rank is numbered."""
        return self.machine, self.pid

    @property
    def sight(self) -> tuple[str, str]:
        """What is the same for the processes that see each other."""
        return self.machine, self.node


def machine() -> str:
    """Return what is the same for all processes that share this kernel and its process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return secrets.token_hex(8)


def process_state(pid: int) -> str:
    """Return the letter of a process's state as ``/proc`` shows it; nothing if it has ended, ``?`` if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:  # this process may have no descriptor left
        return "?"


def birth(pid: int) -> str:
    """Return what tells a process from a later one with its id: when it was started; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def datagram_socket() -> socket.socket:
    """Return a UDP socket on a free port, which does not block."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("", 0))
    made.setblocking(False)
    return made


class SideChannel:
    """This rank's socket, and where the others listen."""

    def __init__(self) -> None:
        self.socket = datagram_socket()
        self.own = Place(
            addresses.own(),
            self.socket.getsockname()[1],
            secrets.token_hex(8),
            os.getpid(),
            machine(),
            os.environ.get(environment.NODE_KEY, ""),
            socket.gethostname(),
        )
        chosen = os.environ.get("HPCDIST_DEBUG_SECRET")  # by the user, for ``python -m hpcdist debug`` from elsewhere
        self.secrets = (self.own.secret, chosen or self.own.secret)
        self.places: dict[int, Place] = {}  # by global rank
        self.mates: dict[int, Place] = {}  # those of this node; looked at every second, so kept apart from the others
        self.learned = 0  # how often the places have changed
        self.ended: set[Process] = set()  # what other nodes told of
        self.left: set[Process] = set()  # these make no more calls, and wait for the others at the end
        self._told: set[Process] = set()  # what the other nodes were told of
        self.left_out: list[Place] = []  # of ranks that the world was shrunk by
        self.has_heard = False  # whether a datagram has come from another node: UDP is not blocked
        self.found: set[Process] = set()  # processes of other nodes that this rank saw to have ended
        self._births: dict[int, str] = {}  # when the processes of this node were started, by their ids
        self._reserve: socket.socket | None = (
            datagram_socket()
        )  # for the next question: there may be no descriptor left then

    def learn(self, ranks: Iterable[int], places: Iterable[tuple[Any, ...]]) -> None:
        """Take note of where the ranks of a group listen."""
        self._keep({**self.places, **dict(zip(ranks, (Place(*place) for place in places), strict=True))})
        self.left_out = [place for place in self.left_out if place not in self.places.values()]
        self._births.update((place.pid, birth(place.pid)) for place in self.places.values() if self.sees(place))

    def targets(self, place: Place) -> list[tuple[str, int]]:
        """Return the addresses under which a rank may be reached."""
        found = (addresses.LOOPBACK,) if place.machine == self.own.machine else place.addresses
        return [(address, place.port) for address in found]

    def answer(self, reply: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Answer the questions that have come."""
        while True:
            try:
                data, sender = self.socket.recvfrom(65536)
            except OSError:
                return  # nothing more, or news that an earlier answer did not arrive
            try:
                question = json.loads(data)
            except ValueError:
                continue
            if not isinstance(question, dict) or question.pop("secret", None) not in self.secrets:
                continue
            self._note_heard(question.get("from"))
            text = json.dumps(reply(question)).encode()
            if len(text) <= LARGEST:
                try:
                    self.socket.sendto(text, sender)
                except OSError:
                    continue

    def ask(
        self,
        ranks: Iterable[int],
        question: dict[str, Any],
        seconds: float,
        reply: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> dict[int, dict[str, Any]]:
        """Ask ranks and return the answers that come in time, by rank.

        ``reply`` answers the others meanwhile: for the thread that does so otherwise.
        """
        waiting = {rank: place for rank in ranks if (place := self.places.get(rank)) is not None}
        return self.ask_places(waiting, question, seconds, reply)

    def ask_places(
        self,
        waiting: dict[int, Place],
        question: dict[str, Any],
        seconds: float,
        reply: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> dict[int, dict[str, Any]]:
        """Ask processes by numbers of the caller's choice, as ``ask`` does ranks; ``waiting`` is emptied of answers."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + seconds
        with self._asking_socket() as asking:
            again = 0.0
            while waiting and (now := time.monotonic()) < deadline:
                if now >= again:
                    again = now + AGAIN_SECONDS
                    for count, (rank, place) in enumerate(list(waiting.items()), 1):
                        text = json.dumps({**question, "secret": place.secret, "to": rank}).encode()
                        for target in self.targets(place):
                            try:
                                asking.sendto(text, target)
                            except OSError:
                                continue
                        if count % BURST == 0:
                            self._collect(asking, waiting, answers)
                            if reply is not None:
                                self.answer(reply)
                sockets = [asking] if reply is None else [asking, self.socket]
                ready = readable(sockets, min(again, deadline) - now)
                if reply is not None and self.socket in ready:
                    self.answer(reply)
                if asking in ready:
                    self._collect(asking, waiting, answers)
        return answers

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

    def _collect(self, asking: socket.socket, waiting: dict[int, Place], answers: dict[int, dict[str, Any]]) -> None:
        while True:
            try:
                data, _ = asking.recvfrom(65536)
                answer = json.loads(data)
                rank = answer["rank"]
            except BlockingIOError:
                return
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if waiting.pop(rank, None) is not None:
                answers[rank] = answer
                self._note_heard(rank)

    def _keep(self, places: dict[int, Place]) -> None:
        self.places = places
        self.mates = {rank: place for rank, place in sorted(places.items()) if self.sees(place)}
        self.learned += 1

    def _note_heard(self, rank: Any) -> None:
        if not self.has_heard and (place := self.places.get(rank)) is not None:
            self.has_heard = not self.sees(place)

    def renumber(self, remaining: list[int]) -> None:
        """Take note that ``remaining`` are the numbers until now of the ranks that are still there."""
        self.left_out += [place for rank, place in self.places.items() if rank not in remaining]
        self._keep({new: self.places[old] for new, old in enumerate(remaining) if old in self.places})

    def begin_anew(self) -> None:
        """Take note that the world's ranks are about to be numbered anew: nobody is in it until ``learn``."""
        self.left_out += self.places.values()
        self._keep({})

    def note_left(self, rank: int) -> None:
        """Take note that a rank makes no more calls."""
        if (place := self.places.get(rank)) is not None:
            self.left.add(place.process)

    def sees(self, place: Place) -> bool:
        """Tell whether a rank's process can be looked at from here."""
        return place.sight == self.own.sight

    def has_ended(self, place: Place | None) -> bool:
        """Tell whether a rank's process is known to have ended: it is seen on this node, and told by others."""
        if place is None:
            return False
        if not self.sees(place):
            return place.process in self.ended
        try:
            os.kill(place.pid, 0)  # no signal: asks whether the process is there
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False

    def ended_ranks(self) -> list[int]:
        """Return the ranks that are known to have ended; as long as none has, only those of this node are looked at."""
        gone = [rank for rank, place in self.mates.items() if self.has_ended(place)]
        if self.ended:
            gone += [rank for rank, place in self.places.items() if place.process in self.ended and rank not in gone]
        return gone

    def lacks(self, ranks: Iterable[int]) -> bool:
        """Tell whether any of some ranks is known to have ended, so that their calls cannot."""
        gone = self.ended_ranks()
        return bool(gone) and not set(gone).isdisjoint(ranks)

    def everyone(self) -> list[Place]:
        """Return the places of all ranks of the job, also of those that were left out."""
        return [*self.places.values(), *self.left_out]

    def any_ended(self) -> bool:
        """Tell whether any rank of the job, also one that was left out, is known to have ended."""
        return bool(self.ended_ranks()) or any(map(self.has_ended, self.left_out))

    def staying(self) -> list[int]:
        """Return the ranks that, as far as is known, have neither ended nor left."""
        return [
            rank for rank, place in self.places.items() if place.process not in self.left and not self.has_ended(place)
        ]

    def stopped(self) -> list[Place]:
        """Return the processes of the job, also of ranks that were left out, that are stopped on this node."""
        places = [*self.mates.values(), *(place for place in self.left_out if self.sees(place))]
        return [place for place in places if process_state(place.pid) in ("T", "t")]

    def kill(self, place: Place) -> None:
        """Kill a process of this node, unless another one has its id by now."""
        if self._births.get(place.pid, "") == birth(place.pid) != "":
            with suppress(OSError):
                os.kill(place.pid, signal.SIGKILL)

    def note_found(self, process: Process) -> None:
        """Take note that a process of another node was seen to have ended."""
        if process not in self.ended:
            self.ended.add(process)
            self.found.add(process)

    def to_tell(self) -> tuple[list[int], list[Process]]:
        """Return ranks to be told, and which processes have ended, once; no ranks: there is nothing to tell.

        Those of this node are told to the other nodes by its lowest rank that is neither gone nor stopped; one of
        another node, to all, by the rank that saw it.
        """
        if found := sorted(self.found - self._told):
            self._told |= self.found
            return [rank for rank, place in self.places.items() if not self.has_ended(place)], found
        if len(self.mates) == len(self.places):
            return [], []
        mates = list(self.mates.values())
        gone = {place.process for place in mates if self.has_ended(place)} - self._told
        if not gone:
            return [], []
        speaker = next((place for place in mates if process_state(place.pid) not in ("", *"TtZX")), None)
        if speaker is None or speaker.pid != self.own.pid:
            return [], []
        self._told |= gone
        return [rank for rank in self.places if rank not in self.mates], sorted(gone)

    def judge(self, rank: int) -> str:
        """Return in words why a rank gives no answer, as far as it shows from here."""
        place = self.places.get(rank)
        if place is None:
            return NO_ANSWER
        if not self.sees(place):
            has_ended = self.has_ended(place)
            if not has_ended and not self.has_heard:
                return NOBODY_ANSWERS
            return f"{PROCESS_STATES[''] if has_ended else NO_ANSWER} (process {place.pid} on {place.host})"
        state = process_state(place.pid)
        return PROCESS_STATES.get(state, NO_ANSWER) + (f" (process {place.pid})" if state else "")

    def close(self) -> None:
        """Close the sockets."""
        self.socket.close()
        if self._reserve is not None:
            self._reserve.close()
