"""Profile of a job's communication: ``profile``, a timeline of all ranks and a table of their time by call."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from types import TracebackType
from typing import Any

import torch

from hpcdist.beyond.timeline import RankRow, Row, Share, Timeline
from hpcdist.core.errors import DistBackendError
from hpcdist.core.group import Group
from hpcdist.core.point_to_point import FIRST_KEPT
from hpcdist.core.world import WORLD, default_group
from hpcdist.watch import timing
from hpcdist.watch.timing import TimedCall

PING_TAG = FIRST_KEPT + 1  # beside monitored_barrier's
PINGS = 10  # questions, of which the fastest gives the difference of two clocks


class Profile:
    """The record of ``profile``; a context manager.

    Attributes:
        calls: this rank's, in the order in which they ended; then those that had not ended at the end of the block.
        timeline: of all ranks, on rank 0 after the end; None elsewhere.
    """

    def __init__(self, path: str | os.PathLike[str] | None, show: bool) -> None:
        self.calls: list[TimedCall] = []
        self.timeline: Timeline | None = None
        self._path = None if path is None else os.fspath(path)
        self._show = show

    def __enter__(self) -> Profile:
        self._group = group = default_group()
        problem = None
        if group.rank() == 0 and self._path is not None:
            try:
                open(self._path, "w").close()
            except OSError as error:
                problem = str(error)
        with group.during("profile"):
            problem = group.any_backend().objects.all_gather(problem, call="profile")[0]
            if problem is not None:
                raise OSError(f"profile: rank 0 cannot write the timeline: {problem}")
            self._first = offsets(group)
        self._groups: dict[str, tuple[int, ...]] = {}
        timing.listen(self._note)
        self._begin = time.perf_counter_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        end = time.perf_counter_ns()
        for each in WORLD.backends():
            each.pending()  # the end of a device's calls is noticed only when it is polled
        timing.leave(self._note)
        if error is not None:
            return  # the other ranks may not come
        group = self._group
        if WORLD.default is not group:
            raise DistBackendError("profile: the default group that it began with has ended; end the profile before it")
        backend = group.any_backend()
        backend.settle()
        self.calls += timing.under_way(self._begin, end)
        mine = tuple(Share(socket.gethostname(), self._begin, end, self.calls, self._groups))
        with group.journal.during("profile"):
            backend.objects.all_gather(None, call="profile")  # after an error a rank makes another call
            last = offsets(group)
            shares = backend.objects.gather(mine, 0)
        if shares is None:
            return
        self.timeline = Timeline([Share(*each) for each in shares], list(zip(self._first, last, strict=True)))
        if self._path is not None:
            with open(self._path, "w") as file:
                json.dump(self.timeline.trace(), file)
        if self._show:
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # a locale may lack some characters
            print(self.timeline.table().encode(encoding, "replace").decode(encoding), flush=True)

    def _note(self, call: TimedCall) -> None:
        self.calls.append(call)
        if call.group not in self._groups and (group := WORLD.groups.get(call.group)) is not None:
            self._groups[call.group] = group.ranks

    def rows(self) -> list[Row]:
        """Return the table's rows, one for each call and line of the program: on rank 0; an empty list elsewhere."""
        return [] if self.timeline is None else self.timeline.rows()

    def ranks(self) -> list[RankRow]:
        """Return the waits by rank, and for which ranks the others waited: on rank 0; an empty list elsewhere."""
        return [] if self.timeline is None else self.timeline.ranks()

    def table(self) -> str:
        """Return the table as text: on rank 0; an empty text elsewhere."""
        return "" if self.timeline is None else self.timeline.table()


def profile(path: str | os.PathLike[str] | None = None, *, show: bool = True) -> Profile:
    """Record every collective and message of all ranks, for a ``with`` block.

    At its end rank 0 writes a timeline of all ranks on one clock (Chrome's trace format, which https://ui.perfetto.dev
    opens), and prints the time of each call by line of the program, and the ranks for which the others waited. Every
    rank of the default group enters and leaves the block, at the same places among its collectives. If it ends by an
    exception on a rank, that rank gathers nothing.

    The calls are those of hpcdist, and of torch.distributed and its libraries on hpcdist's groups. Inside the block a
    call takes some microseconds longer. Times are the host's: a call on CUDA tensors returns when it is queued, and an
    asynchronous one ends when the host notices its end; one that has not ended at the end of the block counts as ended
    there. Each call is a range of NVTX, with a CUDA build of torch or the package ``nvtx``, and a region of Score-P
    under ``python -m scorep``.

    Args:
        path: the timeline's file, written by rank 0; None for none.
        show: print the table, on rank 0.

    Returns:
        A context manager, whose ``calls``, ``rows()``, ``ranks()`` and ``table()`` give the recorded data.

    Raises:
        ValueError: there is no default group.
        OSError: the file cannot be written; on every rank.
        DistBackendError: the default group was destroyed before the end.
    """
    return Profile(path, show)


def offsets(group: Group) -> list[int]:
    """Return on rank 0 the offset of rank 0's clock from each rank's, in nanoseconds; an empty list elsewhere.

    Every rank of the group calls this. Rank 0 asks the others for their time, one after the other.
    """
    backend = group.any_backend()
    backend.settle()
    word = torch.zeros(1, dtype=torch.int64, device=backend.device)
    if group.rank() != 0:
        for _ in range(PINGS):
            backend.recv(word, 0, PING_TAG)
            word.fill_(int(word) * 0 + time.perf_counter_ns())  # on a device: wait for the question first
            backend.send(word, 0, PING_TAG)
        return []
    found = [0]
    for rank in range(1, group.size()):
        answers: list[tuple[Any, Any]] = []
        for _ in range(PINGS):
            asked = time.perf_counter_ns()
            backend.send(word, rank, PING_TAG)
            backend.recv(word, rank, PING_TAG)
            theirs, answered = int(word), time.perf_counter_ns()
            answers.append((answered - asked, (asked + answered) // 2 - theirs))
        found.append(min(answers)[1])
    return found
