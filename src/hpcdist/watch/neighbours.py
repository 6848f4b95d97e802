"""Watch over the next node: notices processes that have ended where no process of their own node is left to tell.

The nodes form a ring, and the ranks of each share the ranks of the next one among them, so that a rank asks about as
many as a node has ranks more than its own, usually one. Each is sent a short question once a second. An address that
has answered before and then refuses (ICMP's "port unreachable") shows that its process has ended: the host is there
and nobody listens. Silence shows nothing, because datagrams may be lost, and a stopped process is silent too.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping

from hpcdist.watch.side_channel import Place, Process, SideChannel

PAUSE_SECONDS = 1.0  # between two questions to a rank
REFUSALS = 2  # in a row, after which a process counts as ended


def assigned(rank: int, places: Mapping[int, Place], ended: Iterable[int] = ()) -> list[int]:
    """Return the ranks of the next node that a rank asks.

    Args:
        rank: the one that asks.
        places: where all ranks are.
        ended: ranks that are known to have ended.
    """
    gone = set(ended)
    nodes: dict[tuple[str, str], list[int]] = {}
    for each in sorted(places):
        if each not in gone:
            nodes.setdefault(places[each].sight, []).append(each)
    ring = list(nodes.values())
    own = next((index for index, node in enumerate(ring) if rank in node), None)
    if own is None or len(ring) < 2:
        return []
    mates = ring[own]
    return [each for i, each in enumerate(ring[(own + 1) % len(ring)]) if i % len(mates) == mates.index(rank)]


class Line:
    """One address of a rank that is asked."""

    def __init__(self, rank: int, place: Place, target: tuple[str, int]) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.process = place.process
        self.question = json.dumps({"secret": place.secret, "to": rank, "is_there": True}).encode()
        self.has_answered = False
        self.refusals = 0
        try:
            self.socket.connect(target)  # so that the kernel tells of refusals
        except OSError:
            self.refusals = -(1 << 30)  # no way there: it will show nothing

    def receive(self) -> None:
        """Take in what has come."""
        while True:
            try:
                self.socket.recv(4096)
                self.has_answered, self.refusals = True, 0
            except ConnectionRefusedError:
                self.refusals += 1
                return
            except OSError:
                return

    def ask(self) -> None:
        """Send the question."""
        try:
            self.socket.send(self.question)
        except ConnectionRefusedError:
            self.refusals += 1
        except OSError:
            return


class Neighbours:
    """The ranks of the next node that this rank asks."""

    def __init__(self, channel: SideChannel) -> None:
        self._channel = channel
        self._lines: dict[int, list[Line]] = {}
        self._next = 0.0
        self._known: tuple[int, ...] = ()  # what the ring was made from
        self._asked: list[int] = []

    def look(self, rank: int, now: float) -> list[Process]:
        """Ask, once a second, and return the processes that were seen to have ended."""
        if now < self._next:
            return []
        self._next = now + PAUSE_SECONDS
        channel = self._channel
        gone = channel.ended_ranks()
        known = (rank, channel.learned, *gone)
        if known != self._known:  # the ring is made anew only if it has changed: it takes 3 ms for 10,000 ranks
            self._known, self._asked = known, assigned(rank, channel.places, gone)
        all_lines, places = self._lines, channel.places  # another thread may number the ranks anew meanwhile
        asked = [each for each in self._asked if each in places]
        for each in [each for each in all_lines if each not in asked]:
            close(all_lines.pop(each))
        ended = []
        for each in asked:
            if each not in all_lines:
                place = places[each]
                try:
                    all_lines[each] = [Line(each, place, target) for target in channel.targets(place)]
                except OSError:  # no descriptor is left; the next look tries again
                    continue
            lines = all_lines[each]
            for line in lines:
                line.receive()
                line.ask()
            if any(line.has_answered for line in lines):
                channel.has_heard = True
            ended += [line.process for line in lines if line.has_answered and line.refusals >= REFUSALS]
        return ended

    def renumber(self) -> None:
        """Begin anew: the ranks have other numbers."""
        before, self._lines = self._lines, {}
        for lines in list(before.values()):
            close(lines)


def close(lines: Iterable[Line]) -> None:
    """Close the sockets of a rank's addresses."""
    for line in lines:
        line.socket.close()
