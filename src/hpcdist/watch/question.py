"""Question to any number of ranks: this rank asks a few, and those ask the others (``Channel.ask``).

    rank 0 ─┬─ rank 1 ── ranks 2 to 64
            ├─ rank 65 ── ranks 66 to 128
            └─ …

So no rank sends or receives more than ``FAN`` datagrams at a time, and a question to N ranks takes log N steps. A rank
that gets a question with ``ranks`` asks those in the same way, and returns their answers, equal ones once with all
their ranks. It is asked again four times a second for missing ones, and returns those that it has by then. So a slow
rank does not delay others, and a relay that does not answer for a while is skipped: its part of the ranks is asked
without it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from hpcdist.core.ranks import runs_of

if TYPE_CHECKING:
    from hpcdist.watch.endpoint import Endpoint

FAN = 16  # ranks that one rank asks directly
AGAIN_SECONDS = 0.25  # seconds after which an unanswered question is repeated: datagrams may be lost
PACE_SECONDS = 1 / 64  # seconds between sends to ``FAN`` others
SILENT_SECONDS = 0.6  # seconds without an answer after which a relay is skipped
STEP_SECONDS = 0.75  # seconds to find that a relay is silent, and to ask others in its place
REPLY_BYTES = 50_000  # bytes of JSON in each datagram of an answer

Message = dict[str, Any]
Answers = dict[int, Message]  # by rank


def parts_of(ranks: list[int]) -> dict[int, set[int]]:
    """Return the ranks to ask, each with the ranks of its part, including itself."""
    parts = (ranks[i * len(ranks) // FAN : (i + 1) * len(ranks) // FAN] for i in range(FAN))
    return {part[0]: set(part) for part in parts if part}


def relay_seconds(count: int) -> float:
    """Return by how many seconds ``count`` ranks' answers may be late, if a relay is silent at each step."""
    return STEP_SECONDS * max(0, math.ceil(math.log(max(1, count), FAN)) - 1)


def expand(runs: Iterable[Iterable[int]]) -> list[int]:
    """Return the ranks of runs."""
    return [rank for first, last in runs for rank in range(first, last + 1)]


def merge(answers: Answers) -> list[Message]:
    """Return answers as messages, equal answers once, each small enough for a datagram."""
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
    """Add an entry as the youngest, and drop the oldest of too many."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > most:
        kept.pop(next(iter(kept)), None)


class Question:
    """One question: the ranks asked, the answers, and the times of repetition."""

    def __init__(self, asked: dict[int, Endpoint], message: Message) -> None:
        self.asked, self.message = asked, message  # by rank; negative numbers are asked directly
        self.answers: Answers = {}  # the answers so far
        self.again = 0.0  # the time of the next repetition, for ranks that have not answered
        self.until = math.inf  # the time when it is dropped
        self.done: Callable[[], object] = lambda: None  # called when all have answered
        self._missing = {each: {each} for each in asked if each < 0}
        self._missing |= parts_of(sorted(asked.keys() - self._missing.keys()))
        self._answered: dict[int, float] = {}  # by asked rank: the time of its last answer, or of the first question
        self._next: dict[int, float] = {}  # by asked rank: the time of its next repetition
        self._numbers: set[int] = set()  # the numbers under which it was sent

    @property
    def is_answered(self) -> bool:
        return not self._missing

    def due(self, now: float, numbers: Iterator[int]) -> list[tuple[int, Endpoint, int, bytes]]:
        """Return the datagrams to send now: rank, endpoint, number, and text of each."""
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
        """Ask the parts of silent relays without them."""
        for rank, part in list(self._missing.items()):
            if now - self._answered.get(rank, now) >= SILENT_SECONDS and part != {rank}:
                del self._missing[rank]
                self._missing |= {each: {each} for each in part & {rank}} | parts_of(sorted(part - {rank}))

    def who(self, rank: int, number: int) -> Endpoint | None:
        """Return the endpoint of a rank that was asked under a number, and has not answered; else None."""
        return self.asked[rank] if rank in self._missing and number in self._numbers else None

    def take(self, rank: int, answer: Message, now: float) -> list[Endpoint]:
        """Store the authentic answer of a rank; return the endpoints of all ranks whose answers it contains."""
        self._answered[rank] = now
        part, given = self._missing[rank], {rank: answer}
        if "answers" in answer:  # it relays the question
            given = {each: one for one, runs in answer["answers"] for each in expand(runs)}
        taken = part & given.keys()
        self.answers |= {each: given[each] for each in taken}
        part.difference_update(taken)
        if not part:
            del self._missing[rank]
        return [self.asked[each] for each in taken]
