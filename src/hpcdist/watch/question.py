"""Question to any number of ranks, of which this one asks a few, and those ask the others (``Channel.ask``).

    rank 0 ─┬─ rank 1 ── ranks 2 to 64
            ├─ rank 65 ── ranks 66 to 128
            └─ …

So no rank sends or receives more than ``FAN`` datagrams at a time, and one question to N ranks takes log N steps. A
rank that gets a question with ``ranks`` asks those in the same way, and returns their answers, equal ones once for all
ranks that have given them. It is asked again four times a second for those that are missing, and returns what it has by
then. So a slow rank delays no other, and a relay that answers nothing for a while is passed over: its part of the ranks
is asked without it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from hpcdist.core.ranks import runs_of

if TYPE_CHECKING:
    from hpcdist.watch.endpoint import Endpoint

FAN = 16  # ranks that one rank asks by itself
AGAIN_SECONDS = 0.25  # a question unanswered for so long is asked again: datagrams may be lost
PACE_SECONDS = 1 / 64  # between two times that a rank sends to ``FAN`` others
SILENT_SECONDS = 0.6  # after so long without an answer a relay is passed over
STEP_SECONDS = 0.75  # in which a relay is found silent, and others are asked in its place
REPLY_BYTES = 50_000  # of JSON in one datagram of several that hold an answer

Message = dict[str, Any]
Answers = dict[int, Message]  # by rank


def parts_of(ranks: list[int]) -> dict[int, set[int]]:
    """Return the ranks to ask, each with all those of its part, itself among them."""
    parts = (ranks[i * len(ranks) // FAN : (i + 1) * len(ranks) // FAN] for i in range(FAN))
    return {part[0]: set(part) for part in parts if part}


def relay_seconds(count: int) -> float:
    """Return how much longer so many ranks' answers may take than one rank's, if a relay is silent at each step."""
    return STEP_SECONDS * max(0, math.ceil(math.log(max(1, count), FAN)) - 1)


def expanded(runs: Iterable[Iterable[int]]) -> list[int]:
    """Return ranks that are given as runs."""
    return [rank for first, last in runs for rank in range(first, last + 1)]


def merged(answers: Answers) -> list[Message]:
    """Return answers as messages that hold equal ones once, each small enough for a datagram."""
    different: dict[str, tuple[Message, list[int]]] = {}
    for rank, answer in answers.items():
        different.setdefault(json.dumps(answer), (answer, []))[1].append(rank)
    replies: list[list[Any]] = [[]]
    room = REPLY_BYTES
    for text, (answer, ranks) in different.items():
        runs = runs_of(ranks)
        size = len(text) + 16 * len(runs)
        if size > room and replies[-1]:
            replies.append([])
            room = REPLY_BYTES
        replies[-1].append([answer, runs])
        room -= size
    return [{"answers": each} for each in replies]


def remember(kept: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Set an entry as the youngest one, and drop the oldest if there are too many."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > most:
        kept.pop(next(iter(kept)), None)


class Question:
    """What is still missing of one question's answers, and whom it is asked of."""

    def __init__(self, asked: dict[int, Endpoint], message: Message) -> None:
        self.asked, self.message = asked, message  # by rank; those with negative numbers are asked directly
        self.answers: Answers = {}  # those that have come
        self.again = 0.0  # when it is to be sent again to those who have not answered
        self.until = math.inf  # when nobody is interested any more
        self.done: Callable[[], object] = lambda: None  # called once all have answered
        self._missing = {each: {each} for each in asked if each < 0}
        self._missing |= parts_of(sorted(asked.keys() - self._missing.keys()))
        self._answered: dict[int, float] = {}  # when those that are asked have answered last, or were asked first
        self._next: dict[int, float] = {}  # when they are asked again
        self._numbers: set[int] = set()  # under which it was sent

    @property
    def is_answered(self) -> bool:
        return not self._missing

    def due(self, now: float, numbers: Iterator[int]) -> list[tuple[int, Endpoint, int, bytes]]:
        """Return what to send now: whom it is for, where that one listens, a number, and the text."""
        if now < self.again:
            return []
        self._pass_over(now)
        late = [rank for rank in self._missing if now >= self._next.get(rank, now)]
        self._numbers.add(number := next(numbers))
        found = []
        for rank in late[:FAN]:
            self._next[rank] = now + AGAIN_SECONDS
            self._answered.setdefault(rank, now)
            part = self._missing[rank]
            passes_on = {} if part == {rank} else {"ranks": runs_of(part)}
            found.append((rank, self.asked[rank], number, json.dumps({**self.message, **passes_on}).encode()))
        self.again = (
            now + PACE_SECONDS if len(late) > FAN else min(map(self._next.__getitem__, self._missing), default=math.inf)
        )
        return found

    def _pass_over(self, now: float) -> None:
        """Ask the parts of ranks that have been silent without them."""
        for rank, part in list(self._missing.items()):
            if now - self._answered.get(rank, now) >= SILENT_SECONDS and part != {rank}:
                del self._missing[rank]
                self._missing |= {each: {each} for each in part & {rank}} | parts_of(sorted(part - {rank}))

    def who(self, rank: int, number: int) -> Endpoint | None:
        """Return where the process listens that was asked under a number, and has not answered."""
        return self.asked[rank] if rank in self._missing and number in self._numbers else None

    def take(self, rank: int, answer: Message, now: float) -> list[Endpoint]:
        """Take in the authentic answer of one that ``who`` returned; return the processes whose answers it holds."""
        self._answered[rank] = now
        part, given = self._missing[rank], {rank: answer}
        if "answers" in answer:  # it was asked to relay the question
            given = {each: one for one, runs in answer["answers"] for each in expanded(runs)}
        taken = part & given.keys()
        self.answers |= {each: given[each] for each in taken}
        part.difference_update(taken)
        if not part:
            del self._missing[rank]
        return [self.asked[each] for each in taken]
