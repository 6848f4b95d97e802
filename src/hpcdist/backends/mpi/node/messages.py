"""Messages of one collective between nodes: MPI's point-to-point calls, a few at a time, and what follows each.

MPI does not order what is under way at once: Open MPI 5 divides the network among all large sends, so that 64 pieces
posted together all arrive at the end and nothing can be passed on before (a chain of three hosts took 3 times as long).
So at most `DEPTH` sends to one rank are under way, and further ones wait. Receives of one rank match in the order in
which they are posted (MPI 3.5).

If each node sends to all others at once, several send to one of them while another one's cable is idle. So the nodes
take `Turns`: in each, every node sends to one and receives from one, and sends on when enough has arrived (4 nodes at
200 Mbit/s, 16 MiB: all_reduce 1,060 ms in place of 1,220, reduce_scatter 530 in place of 660). Messages of a turn have
at most 56 KiB, which Open MPI sends without a handshake (its limit is 64 KiB; 1 MiB: 64 ms in place of 83).

On a fast network, where the processors set the pace, a message of 4 MiB costs them less than many short ones: MPI
copies it straight from one tensor to the other, and Python posts it once (4 hosts of one rank, unlimited, all_reduce
of 64 MiB: 142 ms in place of 175, gloo 140). At 1 Gbit/s messages of 448 KiB and 1 MiB took 1.05 to 1.7 times as long.
UCX, which MPICH uses, takes twice as long with 2 MiB as with 4.

Waiting is a loop of `MPI_Testsome` (`ulfm.test_some`), which yields the processor, polls every few milliseconds, so
that an interrupted or revoked call is left, and naps if nothing has moved for a while.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.datatypes import BYTE, address
from hpcdist.backends.mpi.node.window import POLL_SECONDS
from hpcdist.backends.mpi.process.ulfm import test_some
from hpcdist.core.naps import nap

# named by receives too: MPI may give a new communicator the context of a freed one, whose messages that nobody has
# received (of a monitored barrier that was given up, for one) would otherwise match
TAG = 32_703
DEPTH = 2  # sends to one rank under way: one on the wire, one whose handshake is done
NAP_AFTER_SECONDS = 0.001
ABANDONED: list[Any] = []  # messages that were left, and their memory, which MPI may still write to

Then = Callable[[], None]
Waiting = tuple[int, int, Then | None]  # address, bytes, what follows
Spans = Sequence[tuple[int, int, int]]  # rank, address, bytes


class Pipeline(NamedTuple):
    """Sizes of what is under way between nodes in one call; the same on all ranks.

    Attributes:
        turn: most bytes to one node in a turn.
        message: most bytes of a message of a turn, and of a broadcast between nodes of one rank.
        ahead: turns that are sent before the first of them has come from the other side.
        early: pieces of a reduction that arrive before the first of them is added up.
    """

    turn: int
    message: int
    ahead: int
    early: int


SHORT = Pipeline(turn=224 << 10, message=56 << 10, ahead=8, early=4)
LONG = Pipeline(turn=4 << 20, message=4 << 20, ahead=3, early=2)


class Messages:
    """The messages of one call on one communicator.

    Args:
        comm: the communicator.
        poll: called every few milliseconds of waiting; what it raises ends the wait.
        gives_way: nap at once while waiting, because the core is the computation's.
    """

    def __init__(self, comm: MPI.Intracomm, poll: Callable[[], None], gives_way: bool = False) -> None:
        self._comm = comm
        self._poll = poll
        self._naps_after = 0.0 if gives_way else NAP_AFTER_SECONDS
        self._requests: list[MPI.Request] = []
        self._ends: list[Then | None] = []
        self._under_way: dict[int, int] = {}
        self._queues: dict[int, deque[Waiting]] = {}

    def send(self, rank: int, place: int, nbytes: int, then: Then | None = None) -> None:
        """Send memory, which must stay as it is until `then` is called; after what was sent to that rank before."""
        count = self._under_way.get(rank, 0)
        if count >= DEPTH:
            self._queues.setdefault(rank, deque()).append((place, nbytes, then))
            return
        self._under_way[rank] = count + 1
        self._requests.append(self._comm.Isend((address(place, nbytes), BYTE), rank, TAG))
        self._ends.append(partial(self._sent, rank, then))

    def _sent(self, rank: int, then: Then | None) -> None:
        self._under_way[rank] -= 1
        if queue := self._queues.get(rank):
            self.send(rank, *queue.popleft())
        if then is not None:
            then()

    def receive(self, rank: int, place: int, nbytes: int, then: Then) -> None:
        """Receive to memory, and call `then`."""
        self._requests.append(self._comm.Irecv((address(place, nbytes), BYTE), rank, TAG))
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
        ended = test_some(self._requests)
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
                    nap(now - moved)
            if now - polled > POLL_SECONDS:
                polled = now
                self._poll()

    def finish(self) -> None:
        """Wait for all messages."""
        self.wait(lambda: not self._requests)

    def abandon(self, memory: Any) -> None:
        """Leave what is under way; its memory is kept, because MPI may still use it."""
        ABANDONED.append((self, memory))


class Inbox:
    """Memory for what arrives, kept from call to call.

    The system clears new memory page by page, which takes longer than to receive it: kept, an all_reduce of 16 and 64
    MiB takes 0.79 to 0.89 of the time (4 hosts of one rank, unlimited).
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def take(self, rows: int, nodes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of that shape, in which what an earlier call received may be."""
        nbytes = rows * nodes * numel * dtype.itemsize
        if self._memory is None or self._memory.numel() < nbytes:
            with torch.inference_mode(False):
                self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._memory[:nbytes].view(dtype).view(rows, nodes, numel)


class Arrivals:
    """Messages that one rank sends one after another, received into places that are given beforehand.

    Args:
        messages: of the call.
        rank: the sender.
        spans: address and number of bytes of each; none is sent for one of 0 bytes.
        then: called when one more has arrived, in their order.

    Attributes:
        done: how many have arrived; all before them have too.
    """

    def __init__(
        self, messages: Messages, rank: int, spans: Sequence[tuple[int, int]], then: Then | None = None
    ) -> None:
        self._messages, self._rank, self._spans, self._then = messages, rank, spans, then
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
                self._messages.receive(self._rank, place, nbytes, partial(self._arrived, index))
            else:
                self._arrived(index)

    def _arrived(self, index: int) -> None:
        self._early.add(index)
        while self.done in self._early:
            self._early.remove(self.done)
            self.done += 1
            if self._then is not None:
                self._then()


class Turns:
    """Messages to and from one node after another, in turns that all nodes take in the same order.

    Args:
        messages: of the call.
        pipeline: how long messages are, and how many turns may be under way.
        count: how many turns there are.
        sends: returns what a turn sends, None as long as it is not there.
        receives: returns where to put what comes in a turn, None as long as that place is taken.
        then: called before more is sent; it may use what has come.
    """

    def __init__(
        self,
        messages: Messages,
        pipeline: Pipeline,
        count: int,
        sends: Callable[[int], Spans | None],
        receives: Callable[[int], Spans | None],
        then: Then | None = None,
    ) -> None:
        self._messages, self._pipeline, self._count = messages, pipeline, count
        self._sends, self._receives, self._then = sends, receives, then
        self._sent = self._expected = 0
        self._leaving: dict[int, int] = {}  # turn -> its messages under way, in the order of the turns
        self._coming: dict[int, int] = {}

    @property
    def left(self) -> int:
        """How many turns' memory is no longer read by MPI; that of all before them neither."""
        return next(iter(self._leaving), self._sent)

    @property
    def done(self) -> int:
        """How many turns have come; all before them have too."""
        return next(iter(self._coming), self._expected)

    def advance(self) -> None:
        """Send and expect what can be."""
        before = None
        while before != (before := (self._expected, self._sent)):
            if self._then is not None:
                self._then()
            while self._expected < min(self._count, self.done + 2 * self._pipeline.ahead):
                if (spans := self._receives(self._expected)) is None:
                    break
                self._begin(self._messages.receive, self._coming, self._expected, spans)
                self._expected += 1
            while self._sent < min(self._count, self.done + self._pipeline.ahead):
                if (spans := self._sends(self._sent)) is None:
                    break
                self._begin(self._messages.send, self._leaving, self._sent, spans)
                self._sent += 1

    def _begin(self, move: Callable[..., None], under_way: dict[int, int], turn: int, spans: Spans) -> None:
        longest = self._pipeline.message
        pieces = [
            (rank, place + low, min(longest, nbytes - low))
            for rank, place, nbytes in spans
            for low in range(0, nbytes, longest)
        ]
        if pieces:
            under_way[turn] = len(pieces)
        for piece in pieces:
            move(*piece, partial(self._end, under_way, turn))

    def _end(self, under_way: dict[int, int], turn: int) -> None:
        under_way[turn] -= 1
        if not under_way[turn]:
            del under_way[turn]
            self.advance()
