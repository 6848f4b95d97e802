"""How do ranks learn where the others are when the library between them is stuck?

By datagrams between the watchdog threads, on sockets of their own. MPI itself cannot be asked: a process that is in a
blocking call of another communicator, or whose MPI holds a lock, may make no progress on ours. A datagram needs no
connection, no central rank that may be the stopped one, and no file to leave behind; a thread answers it while the
main thread is inside MPI or computes. A process that does not answer is judged from outside where it runs on
this machine: the kernel says whether it is stopped, dead or busy.

Questions carry the asked rank's secret, which the ranks exchange over the group when it is made.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

LARGEST = 60_000  # bytes of a datagram, under UDP's limit
AGAIN_SECONDS = 0.25  # a question unanswered for so long is asked again: datagrams may be lost

PROCESS_STATES = {
    "": "its process has ended",
    "T": "its process is stopped (SIGSTOP or a debugger)",
    "t": "its process is stopped by a debugger",
    "Z": "its process has ended",
    "X": "its process has ended",
    "D": "its process is in uninterruptible sleep (I/O)",
}
NO_ANSWER = "it does not answer: stopped, gone, or busy in native code that holds Python's interpreter lock"


class Place(NamedTuple):
    """Where the watchdog of one rank listens."""

    addresses: tuple[str, ...]
    port: int
    secret: str
    pid: int
    machine: str  # tells processes that see each other's process ids apart from others
    host: str


def machine() -> str:
    """Return what is the same for all processes that share this kernel and its process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return secrets.token_hex(8)


def process_state(pid: int) -> str:
    """Return the letter of a process's state as ``/proc`` shows it; nothing where it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def own_addresses() -> tuple[str, ...]:
    """Return this machine's addresses, the one of the default route first."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: asks the kernel for the route
            found.append(probe.getsockname()[0])
        except OSError:
            pass
    try:
        named = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_DGRAM)
        found += [str(each[4][0]) for each in named]
    except OSError:
        pass
    return tuple(dict.fromkeys(found))[:3]


class SideChannel:
    """This rank's socket, and where the others listen."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("", 0))
        self.socket.setblocking(False)
        self.own = Place(
            own_addresses(),
            self.socket.getsockname()[1],
            secrets.token_hex(8),
            os.getpid(),
            machine(),
            socket.gethostname(),
        )
        self.places: dict[int, Place] = {}  # by global rank
        self.left_out: list[Place] = []  # of ranks that the world was shrunk by

    def learn(self, ranks: Iterable[int], places: Iterable[tuple[Any, ...]]) -> None:
        """Take note of where the ranks of a group listen."""
        self.places.update(zip(ranks, (Place(*place) for place in places), strict=True))

    def targets(self, place: Place) -> list[tuple[str, int]]:
        """Return the addresses under which a rank may be reached."""
        addresses = ("127.0.0.1",) if place.machine == self.own.machine else place.addresses
        return [(address, place.port) for address in addresses]

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
            if not isinstance(question, dict) or question.pop("secret", None) != self.own.secret:
                continue
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

        ``reply`` answers the others meanwhile: for the thread that does so otherwise. Without ranks to ask that
        is all.
        """
        waiting = {rank: place for rank in ranks if (place := self.places.get(rank)) is not None}
        is_pause = not waiting
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + seconds
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.bind(("", 0))
            asking.setblocking(False)
            again = 0.0
            while (waiting or is_pause) and (now := time.monotonic()) < deadline:
                if now >= again:
                    again = now + AGAIN_SECONDS
                    for rank, place in waiting.items():
                        text = json.dumps({**question, "secret": place.secret, "to": rank}).encode()
                        for target in self.targets(place):
                            try:
                                asking.sendto(text, target)
                            except OSError:
                                continue
                sockets = [asking] if reply is None else [asking, self.socket]
                ready, _, _ = select.select(sockets, [], [], max(0.0, min(again, deadline) - now))
                if reply is not None and self.socket in ready:
                    self.answer(reply)
                if asking in ready:
                    self._collect(asking, waiting, answers)
        return answers

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

    def renumber(self, remaining: list[int]) -> None:
        """Take note that ``remaining`` are the numbers until now of the ranks that are still there."""
        self.left_out += [place for rank, place in self.places.items() if rank not in remaining]
        self.places = {new: self.places[old] for new, old in enumerate(remaining) if old in self.places}

    def has_ended(self, place: Place | None) -> bool:
        """Tell whether a rank's process is known to have ended; only on this machine can that be seen."""
        if place is None or place.machine != self.own.machine:
            return False
        try:
            os.kill(place.pid, 0)  # no signal: asks whether the process is there
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False

    def any_ended(self) -> bool:
        """Tell whether any rank of the job, also one that was left out, is known to have ended."""
        return any(map(self.has_ended, [*self.places.values(), *self.left_out]))

    def stopped(self) -> list[int]:
        """Return the processes of the job, also of ranks that were left out, that are stopped on this machine."""
        places = [place for place in (*self.places.values(), *self.left_out) if place.machine == self.own.machine]
        return [place.pid for place in places if process_state(place.pid) in ("T", "t")]

    def judge(self, rank: int) -> str:
        """Return in words why a rank gives no answer, as far as it shows from here."""
        place = self.places.get(rank)
        if place is None:
            return NO_ANSWER
        if place.machine != self.own.machine:
            return f"{NO_ANSWER} (process {place.pid} on {place.host})"
        state = process_state(place.pid)
        return PROCESS_STATES.get(state, NO_ANSWER) + (f" (process {place.pid})" if state else "")

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
