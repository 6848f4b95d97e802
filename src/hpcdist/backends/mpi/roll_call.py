"""Roll call: ranks of a communicator find out whether all that are to make a new one are there.

MPI waits without end for a process that does not come, or that has been told other members. So each first reports to
the first of them, which waits until all have reported, as long as its timeout lasts, and lets them know how it went.
These are messages of two ranks that live, so that it does not matter who else of the communicator has died.
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

from mpi4py import MPI

from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.core.errors import DistBackendError

REPORT, ANSWER = 0, 1  # tags
GONE = -1  # reported by a rank that waits no longer
LOOK_SECONDS = 0.001
LATEST_SECONDS = 2.0  # how much longer than its timeout a rank waits for the first one's answer, which says more
COMPLETE, ABSENT, DEAD, DIFFERENT = range(4)
FINDINGS = {
    ABSENT: "has not come within {seconds:.1f} s: it was given another list of handles, or is not there",
    DEAD: "has died",
    DIFFERENT: "was given another list of handles",
}


class RollCall:
    """The roll calls on one communicator, on which nothing else is sent."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator, self._comm = communicator, communicator.comm
        self._sent: list[tuple[MPI.Request, array[int]]] = []  # a buffer lives until it is sent
        self._reports: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by uuid: of each rank, what it agrees to
        self._found: dict[int, tuple[int, int]] = {}  # by uuid: what was answered, for those that come later

    def hold(self, ranks: Sequence[int], uuid: int, agreed: int, seconds: float) -> None:
        """Return if all of some ranks come with the same number, or raise on all that come (``Backend.call_roll``)."""
        me, first = self._communicator.rank, ranks[0]
        deadline = time.monotonic() + seconds
        if me != first:
            self._send(first, REPORT, uuid, agreed)
            try:
                finding, rank = self._answer(ranks, uuid, deadline + LATEST_SECONDS)
            except BaseException:
                self._send(first, REPORT, uuid, GONE)
                raise
        else:
            finding, rank = self._found[uuid] = self._collect(ranks[1:], uuid, agreed, deadline)
            for each in self._reports.pop(uuid, {}):
                self._send(each, ANSWER, uuid, finding, rank)
        if finding != COMPLETE:
            self._raise(finding, rank, seconds)

    def _collect(self, others: Sequence[int], uuid: int, agreed: int, deadline: float) -> tuple[int, int]:
        """Wait for the reports of some ranks; return what was found, and of which rank."""
        while True:
            if dead := self._dead(others):
                return dead
            for each in others:
                while (report := self._take(each, REPORT)) is not None:
                    reported, number, _ = report
                    if number == GONE:
                        self._reports[reported].pop(each, None)
                    elif reported in self._found:
                        self._send(each, ANSWER, reported, *self._found[reported])
                    else:
                        self._reports[reported][each] = number
            reports = self._reports[uuid]
            for each, number in reports.items():
                if number != agreed:
                    return DIFFERENT, each
            absent = [each for each in others if each not in reports]
            if not absent:
                return COMPLETE, 0
            if time.monotonic() >= deadline:
                return ABSENT, absent[0]
            time.sleep(LOOK_SECONDS)

    def _answer(self, ranks: Sequence[int], uuid: int, deadline: float) -> tuple[int, int]:
        """Wait for what the first rank has found."""
        first = ranks[0]
        while True:
            while (answer := self._take(first, ANSWER)) is not None:
                if answer[0] == uuid:
                    return answer[1], answer[2]
            if dead := self._dead(ranks):
                self._send(first, REPORT, uuid, GONE)
                return dead
            if time.monotonic() >= deadline:
                self._send(first, REPORT, uuid, GONE)
                return ABSENT, first
            time.sleep(LOOK_SECONDS)

    def _dead(self, ranks: Sequence[int]) -> tuple[int, int] | None:
        found = set(ranks).intersection(self._communicator.failed())
        return (DEAD, min(found)) if found else None

    def _raise(self, finding: int, rank: int, seconds: float) -> None:
        what = FINDINGS[finding].format(seconds=seconds)
        raise DistBackendError(
            f"reconfigure: the process that was rank {rank} when the job began {what}; the group is as it was before"
        )

    def _take(self, rank: int, tag: int) -> tuple[int, int, int] | None:
        """Return a message of a rank, if one has come; of one that has just died none has."""
        message = array("q", [0, 0, 0])
        with suppress(MPI.Exception):
            if self._comm.Iprobe(rank, tag):
                self._comm.Recv(message, rank, tag)
                return message[0], message[1], message[2]
        return None

    def _send(self, rank: int, tag: int, uuid: int, number: int, about: int = 0) -> None:
        """Send a message, without waiting for a rank that does not come for it, or that has just died."""
        message = array("q", [uuid, number, about])
        with suppress(MPI.Exception):
            self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
            self._sent.append((self._comm.Isend(message, rank, tag), message))
