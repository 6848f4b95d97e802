"""Messages of one collective between nodes: MPI's point-to-point calls, a few at a time, and what follows each.

MPI does not order what is under way at once: Open MPI 5 divides the network among all large sends, so that 64 pieces
posted together all arrive at the end and nothing can be passed on before (a chain of three hosts took 3 times as long).
So at most `DEPTH` sends to one rank are under way, and further ones wait their turn. Receives of one rank and tag match
in the order in which they are posted (MPI 3.5).

Waiting is a loop of `MPI_Testsome`, which yields the processor, polls every few milliseconds, so that an interrupted or
revoked call is left, and naps if nothing has moved for a while.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpi4py import MPI

BYTE = MPI.BYTE
DEPTH = 2  # sends to one rank under way: one on the wire, one whose handshake is done
POLL_SECONDS = 0.004
NAP_AFTER_SECONDS = 0.001
NAP_SECONDS = 0.00005
ABANDONED: list[tuple[Any, Any]] = []  # requests that were left, and their memory, which MPI may still write to

address = MPI.buffer.fromaddress
Then = Callable[[], None]
Waiting = tuple[int, int, int, Then | None]  # tag, address, bytes, what follows


class Messages:
    """The messages of one call on one communicator.

    Args:
        comm: the communicator.
        poll: called every few milliseconds of waiting; what it raises ends the wait.
        gives_way: nap at once while waiting, because the core is the computation's.
    """

    def __init__(self, comm: MPI.Intracomm, poll: Callable[[], None] | None, gives_way: bool = False) -> None:
        self._comm = comm
        self._poll = poll
        self._naps_after = 0.0 if gives_way else NAP_AFTER_SECONDS
        self._requests: list[MPI.Request] = []
        self._ends: list[Then | None] = []
        self._under_way: dict[int, int] = {}
        self._queues: dict[int, deque[Waiting]] = {}

    def send(self, rank: int, tag: int, place: int, nbytes: int, then: Then | None = None) -> None:
        """Send memory, which must stay as it is until `then` is called; after what was sent to that rank before."""
        count = self._under_way.get(rank, 0)
        if count >= DEPTH:
            self._queues.setdefault(rank, deque()).append((tag, place, nbytes, then))
            return
        self._under_way[rank] = count + 1
        self._requests.append(self._comm.Isend((address(place, nbytes), BYTE), rank, tag))
        self._ends.append(partial(self._sent, rank, then))

    def _sent(self, rank: int, then: Then | None) -> None:
        self._under_way[rank] -= 1
        if queue := self._queues.get(rank):
            self.send(rank, *queue.popleft())
        if then is not None:
            then()

    def receive(self, rank: int, tag: int, place: int, nbytes: int, then: Then) -> None:
        """Receive to memory, and call `then`."""
        self._requests.append(self._comm.Irecv((address(place, nbytes), BYTE), rank, tag))
        self._ends.append(then)

    def follow(self, request: MPI.Request) -> None:
        """Count another call of MPI among what is under way."""
        self._requests.append(request)
        self._ends.append(None)

    def progress(self) -> bool:
        """Make MPI progress, and do what follows the messages that have ended; say whether any has."""
        if not self._requests:
            self._comm.Iprobe()
            return False
        ended = MPI.Request.Testsome(self._requests)
        if not ended:
            return False
        follow = [self._ends[i] for i in sorted(ended)]
        left = [i for i, request in enumerate(self._requests) if request != MPI.REQUEST_NULL]
        self._requests, self._ends = [self._requests[i] for i in left], [self._ends[i] for i in left]
        for then in follow:
            if then is not None:
                then()
        return True

    def wait(self, condition: Callable[[], bool]) -> None:
        """Make progress until a condition holds."""
        if condition():
            return
        moved = polled = time.monotonic()
        while True:
            has_moved = self.progress()
            if condition():
                return
            now = time.monotonic()
            if has_moved:
                moved = now
            else:
                os.sched_yield()
                if now - moved >= self._naps_after:
                    time.sleep(NAP_SECONDS)
            if now - polled > POLL_SECONDS:
                polled = now
                if self._poll is not None:
                    self._poll()

    def finish(self) -> None:
        """Wait for all messages."""
        self.wait(lambda: not self._requests)

    def abandon(self, memory: Any) -> None:
        """Leave what is under way; its memory is kept, because MPI may still use it."""
        ABANDONED.append((self._requests, memory))


class Arrivals:
    """Messages that one rank sends one after another, received into places that are given beforehand.

    Args:
        messages: of the call.
        rank: the sender.
        tag: of these messages.
        spans: address and number of bytes of each; none is sent for one of 0 bytes.
        then: called when one more has arrived, in their order.

    Attributes:
        done: how many have arrived; all before them have too.
    """

    def __init__(
        self, messages: Messages, rank: int, tag: int, spans: Sequence[tuple[int, int]], then: Then | None = None
    ) -> None:
        self._messages, self._rank, self._tag, self._spans, self._then = messages, rank, tag, spans, then
        self._posted = 0
        self._early: set[int] = set()
        self.done = 0

    def allow(self, count: int) -> None:
        """Let the first `count` messages come: their places are free."""
        while self._posted < min(count, len(self._spans)):  # what follows an arrival may call this too
            index = self._posted
            self._posted += 1
            place, nbytes = self._spans[index]
            if nbytes:
                self._messages.receive(self._rank, self._tag, place, nbytes, partial(self._arrived, index))
            else:
                self._arrived(index)

    def _arrived(self, index: int) -> None:
        self._early.add(index)
        while self.done in self._early:
            self._early.remove(self.done)
            self.done += 1
            if self._then is not None:
                self._then()
