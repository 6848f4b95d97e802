"""Choice of the one rank that asks the others if many have waited too long in one call.

If each asked all others, N ranks would send N² questions, and lose most of the answers. So the rank that is overdue
first asks. A rank that is asked about the call that it waits in itself asks nothing, but waits for the verdict: the
lines of the report, which the asker sends to every rank in that call. Question, answer, verdict and receipt are 4
datagrams a rank. If two ask at once, the lower rank goes on. If no verdict comes from an asker (it was stopped or
killed), another rank follows.

No rank is chosen beforehand, because it would often be the very rank that is missing. Ranks that are overdue at the
same moment take turns: rank 0 of the group asks at once, and each next one a fraction of a second later (`turn`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hpcdist.watch.calls_under_way import UnderWay
from hpcdist.watch.liveness import JUDGED, NEWS_SECONDS, Liveness
from hpcdist.watch.report import Answers, collectives

TURN_SECONDS = 0.1  # how much later rank 1 asks than rank 0; rank 10,000 asks 1.3 s later
PATIENCE_SECONDS = 2.0  # how long after its question an asker's verdict may take
RANK_SECONDS = 1e-4  # what a rank more adds to the time for answers; 10,000 questions and answers took 1.3 s
FRESH_SECONDS = 5.0  # how long a verdict says where the ranks are
KEPT = 64  # subjects that are remembered
SUBJECT = [str, int, str]  # its shape in a message
VERDICT = [SUBJECT, int, str, [str], bool]


class Subject(NamedTuple):
    """A collective that ranks may wait in; the same on all that are in it."""

    group: str
    number: int
    name: str

    @classmethod
    def of(cls, each: UnderWay) -> Subject | None:
        """Return the collective that a call is, or None for a message."""
        return None if each.call.is_message else cls(each.group.group_name, each.call.number, each.call.name)


class Verdict(NamedTuple):
    """What an asker found out, as it goes to the others."""

    subject: Subject
    reporter: int  # the rank whose report is on stderr
    title: str  # of the call
    lines: list[str]
    is_final: bool  # whether the asker ends the call for all ranks

    @classmethod
    def read(cls, sent: list[Any]) -> Verdict:
        """Return a verdict as it comes out of JSON."""
        subject, *rest = sent
        return cls(Subject(*subject), *rest)

    def meant(self, answers: Answers) -> list[int]:
        """Return which ranks are in the call; where it ends for all, those in another one of the group too."""
        group, number, name = self.subject
        return [
            rank
            for rank, answer in answers.items()
            for call in collectives(answer, group)
            if self.is_final or (call["number"], call["name"]) == (number, name)
        ]

    def fitted(self, size: int) -> Verdict:
        """Return the verdict with no more lines than fit into a datagram, given the bytes that they may take."""
        kept, room = [], size
        for line in self.lines:
            room -= len(json.dumps(line)) + 2
            if room < 0:
                kept.append(f"more is in the report of rank {self.reporter}")
                break
            kept.append(line)
        return self._replace(lines=kept)


def turn(rank: int) -> float:
    """Return how many seconds a rank of a group leaves the asking to those before it."""
    return TURN_SECONDS * math.log2(1 + rank)


class Inquiries:
    """Who has asked this rank about what, and the verdicts that have come.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._askers: dict[Subject, tuple[int, float]] = {}  # the lowest rank that asked, and until when it may take
        self._swept: dict[str, float] = {}  # by group: when all its ranks were last asked for their traces
        self._verdicts: dict[Subject, tuple[Verdict, float]] = {}

    def note(self, subject: Subject, rank: int, size: int) -> None:
        """Take note that a rank asks about a call on a group of so many."""
        lowest = self.asker(subject)
        if lowest is None or rank <= lowest:
            # it asks, has the silent ones judged, and tells
            remember(self._askers, subject, (rank, self._clock() + PATIENCE_SECONDS + 3 * size * RANK_SECONDS))

    def note_sweep(self, group: str) -> None:
        """Take note that all ranks of a group were asked for their traces."""
        remember(self._swept, group, self._clock())

    def was_swept(self, group: str) -> bool:
        """Tell whether all ranks of a group have just written their traces."""
        return self._clock() - self._swept.get(group, -math.inf) < FRESH_SECONDS

    def asker(self, subject: Subject) -> int | None:
        """Return the lowest rank that asks about a call, as long as its verdict may come."""
        rank, until = self._askers.get(subject, (None, -math.inf))
        return rank if self._clock() < until else None

    def next_turn(self, subject: Subject, rank: int) -> float:
        """Return the moment from which a rank of the group may ask about a call that another one asks about."""
        _, until = self._askers.get(subject, (None, -math.inf))
        return until + turn(rank)

    def has_lower(self, subject: Subject, rank: int) -> bool:
        """Tell whether a rank before this one asks about a call."""
        asker = self.asker(subject)
        return asker is not None and asker < rank

    def reporter(self, group: str, rank: int, answers: Answers) -> int | None:
        """Return the rank that reports a group's hang in place of this one, or None: one that did, or a lower one."""
        askers = [self.asker(subject) for subject in list(self._askers) if subject.group == group]
        found = {asker for asker in askers if asker is not None and asker < rank}
        for other, answer in answers.items():
            states = {call["state"] for call in collectives(answer, group)}
            if "reported" in states or ("asking" in states and other < rank):
                found.add(other)
        return min(found, default=None)

    def conclude(self, verdict: Verdict) -> None:
        """Keep a verdict."""
        remember(self._verdicts, verdict.subject, (verdict, self._clock()))

    def verdict(self, subject: Subject, age: float = FRESH_SECONDS) -> Verdict | None:
        """Return the verdict on a call, unless it is old."""
        verdict, when = self._verdicts.get(subject, (None, -math.inf))
        return verdict if self._clock() - when < age else None

    def forget(self) -> None:
        """Forget everything: the ranks have other numbers now."""
        for each in (self._askers, self._swept, self._verdicts):
            each.clear()


def witnessed(liveness: Liveness, ranks: Sequence[int], answers: Answers) -> Callable[[int], str]:
    """Return what says why a rank gave no answer: what is seen from here, or by a rank of its own node.

    Args:
        liveness: what is known of the processes.
        ranks: who was asked.
        answers: who answered what.
    """
    channel, endpoints = liveness.channel, liveness.channel.endpoints
    silent = [rank for rank in ranks if rank not in answers and rank in endpoints]
    unseen = [rank for rank in silent if not channel.sees(endpoints[rank])]
    by_node = {endpoints[rank].node: rank for rank in answers}
    witnesses = {by_node[node] for rank in unseen if (node := endpoints[rank].node) in by_node}
    judged: dict[int, str] = {}
    for witness, answer in channel.ask(sorted(witnesses), "judge", JUDGED, NEWS_SECONDS, ranks=unseen).items():
        for rank, said in answer["judged"]:
            if rank in endpoints and endpoints[rank].node == endpoints[witness].node:
                judged[rank] = f"{said} on {endpoints[rank].host}"
    return lambda rank: judged.get(rank) or liveness.judge(rank)


def remember(where: dict[Any, Any], key: Any, value: Any) -> None:
    """Set an entry as the youngest one, and drop the oldest where there are too many."""
    where.pop(key, None)
    where[key] = value
    if len(where) > KEPT:
        where.pop(next(iter(where)), None)
