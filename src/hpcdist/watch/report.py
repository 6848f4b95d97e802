"""Report of an overdue call: the call, the positions of the group's ranks, and the choice of the rank that asks.

If each waiting rank asked all others, N ranks would send N² questions, and lose most of the answers. So the rank that
is overdue first asks. A rank that is asked about the call in which it waits does not ask, but waits for the report,
which the asker sends to every rank in that call. Question, answer, report and receipt are 4 datagrams for each rank,
relayed by the ranks if there are many (``question``). If two ask at once, the lower rank continues. If no report comes
from an asker (it was stopped or killed), another rank follows.

No rank is chosen beforehand, because it would often be the missing one. Ranks that are overdue at the same time take
turns: rank 0 of the group asks at once, and each next one a fraction of a second later (`turn`).

A rank that does not answer is reported as outside the call only if its process is known to have ended or be stopped.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcdist.core.ranks import format_ranks
from hpcdist.watch.liveness import NO_ANSWER, NOBODY_ANSWERS, PROCESS_STATES, Liveness
from hpcdist.watch.question import Answers, relay_seconds, remember

if TYPE_CHECKING:  # imported late: the command debug needs no torch
    from hpcdist.watch.calls_under_way import UnderWay

TURN_SECONDS = 0.1  # seconds by which rank 1 asks later than rank 0; rank 10,000 asks 1.3 s later
PATIENCE_SECONDS = 2.0  # seconds after its question within which an asker's report must come
LINES = 40  # the most lines of a report
SEVERAL = 8  # the most kinds of tensors in it, and the most reasons of silent ranks that name processes
PROCESS = re.compile(r" \(process \d+\)|(?<=\()process \d+ (?=on )")
FRESH_SECONDS = 5.0  # seconds for which a report is valid
KEPT = 64  # calls that are remembered


def title(call: dict[str, Any]) -> str:
    """Return a call as ``all_reduce #128``, a message with its peer."""
    if not call["message"]:
        return f"{call['name']} #{call['number']}"
    is_incoming = "recv" in call["name"] or call["name"] == "Window.get"
    if call["peer"] is None:
        return f"{call['name']} from anyone" if is_incoming else call["name"]
    return f"{call['name']} {'from' if is_incoming else 'to'} rank {call['peer']}"


def place(answer: dict[str, Any], group: str) -> str:
    """Return a rank's position as text."""
    if answer["calls"]:
        parts = []
        for call in answer["calls"]:
            elsewhere = "" if call["group"] == group else f" of {call['label']}"
            parts.append(f"in {title(call)}{elsewhere}, {call['where']}, for {call['seconds']:.0f} s")
        return ", and ".join(parts)
    if answer["leaving"]:
        return f"leaving the program, {answer['main']}"
    return f"not in a call of hpcdist, at {answer['main']}"


def is_unknown(judged: str) -> bool:
    """Tell whether the position of a silent rank is unknown, by its judgement."""
    return judged.startswith((NO_ANSWER, NOBODY_ANSWERS))


def collectives(answer: dict[str, Any], group: str) -> list[dict[str, Any]]:
    """Return a rank's calls on a group, except messages, from its answer."""
    return [call for call in answer["calls"] if call["group"] == group and not call["message"]]


# sentences about ranks, in singular and plural
DIFFER = "{who} {differ}: call #{number} of {label} is {words}"
AHEAD = "{who} {have} done {title} or a call in its place; {they_are} {words}"
ELSEWHERE = "{who} {have} not entered {title} of {label}; {they_are} {words}"
SILENT = "{who} {have} not entered {title} of {label}; {words}"
ENDED = "{who} {are} not in {title} of {label}; {words}"  # before the call, in it, or after it gave the call up
UNKNOWN = "whether {who} {have} entered {title} of {label} is not known; {words}"
INSIDE = "{who} {are} in it"
VERBS = {
    "have": ("has", "have"),
    "are": ("is", "are"),
    "they_are": ("it is", "they are"),
    "differ": ("differs", "differ"),
}
PLURALS = dict(VERBS.values())


def sentence(text: str, ranks: Sequence[int], call: dict[str, Any], words: str = "") -> str:
    """Return one of the sentences above about ranks and a call."""
    verbs = {name: forms[len(ranks) > 1] for name, forms in VERBS.items()}
    return text.format(who=format_ranks(ranks), title=title(call), words=words, **call, **verbs)


def compose(
    mine: dict[str, Any], me: int, ranks: Sequence[int], answers: Answers, judge: Callable[[int], str]
) -> list[str]:
    """Return the lines with the positions of the ranks of a group; all ranks here are global ones.

    ``mine`` is this rank's call, from ``UnderWay.described``; ``judge`` returns why a rank has not answered.
    """
    group = mine["group"]
    if mine["message"]:
        return compose_message(mine, me, ranks, answers, judge)
    inside, shapes, roots = [me], {(str(mine["shape"]), mine["dtype"]): [me]}, {mine["root"]: [me]}
    found: dict[str, dict[str, list[int]]] = {text: defaultdict(list) for text in (DIFFER, AHEAD, ELSEWHERE)}
    for rank, answer in ((each, answers[each]) for each in ranks if each in answers and each != me):
        same = next((call for call in collectives(answer, group) if call["number"] == mine["number"]), None)
        if same is not None and same["name"] == mine["name"]:
            inside.append(rank)
            shapes.setdefault((str(same["shape"]), same["dtype"]), []).append(rank)
            roots.setdefault(same["root"], []).append(rank)
        elif same is not None:
            found[DIFFER][f"{same['name']} there, {same['where']}"].append(rank)
        else:
            is_ahead = answer["entered"] is not None and answer["entered"] >= mine["number"]
            found[AHEAD if is_ahead else ELSEWHERE][place(answer, group)].append(rank)
    lines = [sentence(text, who, mine, words) for text, places in found.items() for words, who in places.items()]
    for reason, who in by_reason([rank for rank in ranks if rank not in answers and rank != me], judge).items():
        has_ended = reason.startswith(PROCESS_STATES[""])
        lines.append(sentence(UNKNOWN if is_unknown(reason) else ENDED if has_ended else SILENT, who, mine, reason))
    tensors = [f"{format_ranks(who)}: {dtype} {shape}" for (shape, dtype), who in shapes.items()]
    targets = [f"{format_ranks(who)}: rank {root}" for root, who in roots.items()]
    for what, several in (("tensors", tensors), ("roots", targets)):
        if len(several) > 1:
            more = [f"and {len(several) - SEVERAL} other kinds"] if len(several) > SEVERAL else []
            lines.append(f"the {what} differ: {'; '.join([*several[:SEVERAL], *more])}")
    return [*shorten(lines), sentence(INSIDE, inside, mine)]


def by_reason(silent: Sequence[int], judge: Callable[[int], str]) -> dict[str, list[int]]:
    """Return the ranks without an answer by reason; processes are not named if there are many reasons."""
    reasons = [judge(rank) for rank in silent]
    has_many = len(set(reasons)) > SEVERAL
    found: dict[str, list[int]] = defaultdict(list)
    for rank, reason in zip(silent, reasons, strict=True):
        found[PROCESS.sub("", reason) if has_many else reason].append(rank)
    return found


def shorten(lines: list[str]) -> list[str]:
    """Return the first lines, and one that counts the others."""
    most = LINES - 2  # room for the count of the others, and for the ranks in the call
    return lines if len(lines) <= most + 1 else [*lines[:most], f"and {len(lines) - most} lines more"]


def compose_message(
    mine: dict[str, Any], me: int, ranks: Sequence[int], answers: Answers, judge: Callable[[int], str]
) -> list[str]:
    """Return the lines with the position of a message's other side, or of all ranks that may be it."""
    lines: dict[str, list[int]] = defaultdict(list)
    others = [mine["peer"]] if mine["peer"] is not None else [each for each in ranks if each != me]
    if me in others:
        lines["is this rank itself, which waits"].append(me)
    for rank in others:
        if rank in answers and rank != me:
            lines[f"is {place(answers[rank], mine['group'])}"].append(rank)
    for reason, who in by_reason([each for each in others if each not in answers and each != me], judge).items():
        lines[f"{'may not have' if is_unknown(reason) else 'has not'} met it; {reason}"] = who
    said = []
    for where, who in lines.items():
        verb, _, rest = where.partition(" ")
        said.append(f"{format_ranks(who)} {PLURALS.get(verb, verb) if len(who) > 1 else verb} {rest}")
    return shorten(said)


def headline(mine: dict[str, Any], timeout: float, is_overdue: bool) -> str:
    """Return the sentence about the call; for an overdue one it begins as torch's, because programs search for that."""
    tensor = "" if mine["shape"] is None else f" of {mine['dtype']} {mine['shape']}"
    where = f"{'queued; the main thread is at ' if mine['background'] else 'called at '}{mine['where']}"
    said = (
        f"{title(mine)}{tensor} on {mine['label']} has not ended after {mine['seconds']:.1f} s "
        f"(the timeout is {timeout:g} s), {where}"
    )
    return f"Timed out waiting {timeout * 1000:.0f}ms: {said}" if is_overdue else said


# -- who asks ------------------------------------------------------------------------------------


class Collective(NamedTuple):
    """A collective in which ranks may wait; the same on all ranks in it."""

    group: str
    number: int
    name: str

    @classmethod
    def of(cls, each: UnderWay) -> Collective | None:
        """Return the collective of a call, or None for a message."""
        return None if each.call.is_message else cls(each.group.group_name, each.call.number, each.call.name)


class Report(NamedTuple):
    """The result of an asker, which is sent to the others."""

    collective: Collective
    reporter: int  # the rank that has written the report to stderr
    title: str  # of the call
    lines: list[str]
    is_overdue: bool  # whether the reporter has waited for its whole timeout, and not for a rank that has ended
    ends_all: bool  # whether the asker ends the call for all ranks

    def receivers(self, answers: Answers) -> list[int]:
        """Return the ranks in the call; if it ends for all, also those in another call of the group."""
        group, number, name = self.collective
        return [
            rank
            for rank, answer in answers.items()
            for call in collectives(answer, group)
            if self.ends_all or (call["number"], call["name"]) == (number, name)
        ]


class Reports:
    """The askers of this rank and the reports that have come, by collective; there are none about messages (None)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # the lowest rank that asked, and the time until which its report must come
        self._askers: dict[Collective | None, tuple[int, float]] = {}
        self._swept: dict[str, float] = {}  # by group: the last time when all its ranks were asked for their traces
        self._reports: dict[Collective | None, tuple[Report, float]] = {}

    def note_asker(self, collective: Collective, rank: int, size: int) -> None:
        """Record that a rank asks about a call on a group of ``size`` ranks."""
        lowest = self.asker(collective)
        if lowest is None or rank <= lowest:
            # it asks, and will send its report
            remember(self._askers, collective, (rank, self._clock() + PATIENCE_SECONDS + 2 * relay_seconds(size)), KEPT)

    def note_sweep(self, group: str) -> None:
        """Record that all ranks of a group were asked for their traces."""
        remember(self._swept, group, self._clock(), KEPT)

    def was_swept(self, group: str) -> bool:
        """Tell whether all ranks of a group have just written their traces."""
        return self._clock() - self._swept.get(group, -math.inf) < FRESH_SECONDS

    def asker(self, collective: Collective | None) -> int | None:
        """Return the lowest rank that asks about a call, as long as its report may come."""
        rank, until = self._askers.get(collective, (None, -math.inf))
        return rank if self._clock() < until else None

    def turn(self, collective: Collective | None, rank: int, since: float) -> float:
        """Return the time from which a rank of the group may ask about a call that is due since ``since``."""
        _, until = self._askers.get(collective, (None, -math.inf))
        return max(since, until) + TURN_SECONDS * math.log2(1 + rank)

    def reporter(self, group: str, rank: int, answers: Answers) -> int | None:
        """Return the rank that has reported a group's hang, or a lower one that will, or None."""
        askers = [self.asker(each) for each in list(self._askers) if each is not None and each.group == group]
        found = {asker for asker in askers if asker is not None and asker < rank}
        for other, answer in answers.items():
            states = {call["state"] for call in collectives(answer, group)}
            if "reported" in states or ("asking" in states and other < rank):
                found.add(other)
        return min(found, default=None)

    def add(self, report: Report) -> None:
        remember(self._reports, report.collective, (report, self._clock()), KEPT)

    def find(self, collective: Collective | None, age: float = FRESH_SECONDS) -> Report | None:
        """Return the report on a call, unless it is old."""
        report, when = self._reports.get(collective, (None, -math.inf))
        return report if self._clock() - when < age else None


def judge_of(liveness: Liveness, answers: Answers) -> Callable[[int], str]:
    """Return a function that returns why a rank did not answer, from this rank's view and that of its node's ranks."""
    endpoints, states = liveness.channel.endpoints, dict[int, str]()
    for witness, answer in answers.items():
        for rank, state in answer["halted"]:
            if rank in endpoints and witness in endpoints and endpoints[rank].node == endpoints[witness].node:
                states[rank] = state
    return lambda rank: liveness.judge(rank, states.get(rank, "?"))
