"""Exchange of calls: detects that ranks of a group without a common call board make different calls.

One rank of each node sends its position in each group (``core.call_log``) to a rank of the next node, which answers
with its own: once a second until that has come as far, at the end of the group, and when the library has failed. Over
libraries other than MPI each rank counts as a node. Of two ranks the one that has made more calls compares. A rank that
finds a difference sends it to its node and log n others, which do the same: every rank raises at its next call on the
group, and a call under way is ended like an overdue one: by ULFM, by NCCL's abort, or with the job; gloo's by gloo.

Positions do not show two differences, which are found by questions while a call lasts: ranks that make groups of
different members, and a rank that has destroyed a group in place of its first call or message.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from hpcdist.core import hooks
from hpcdist.core.agreement import lists_differ
from hpcdist.core.call_log import CallLog, CallPosition, calls_differ
from hpcdist.core.journal import made_on
from hpcdist.core.waiting import nap
from hpcdist.core.world import WORLD
from hpcdist.watch.calls_under_way import DESTROY, MAKING, REMAKING, UnderWay
from hpcdist.watch.channel import Channel
from hpcdist.watch.question import Message

KIND, KEPT_KIND = "calls", "kept calls"
NO_BLOCK = -1
NOTHING_KEPT: Message = {"starts": [], "words": ([], [])}
LISTS_KIND, DESTROYED_KIND = "members", "destroyed"
ANSWER_SECONDS = 0.5
LASTING_SECONDS = 0.3  # that a question about a lasting call waits for answers
ASKED = 64  # members of a group that are asked at a time
NEXT = 8  # the same while a first call lasts: all waiting ranks ask, each the ranks after it
UNANSWERED = 3  # questions after which there are no more until another node answers: UDP may be blocked
KEPT_SECONDS = 0.5  # seconds that a rank has to send the words that it keeps
RETURN_SECONDS = 1.0  # seconds that calls have to return after a difference was found
ENDED_GROUPS = 64  # kept for ranks that end them later
FIRST_SECONDS = 1.0  # seconds after which a rank asks whether others have destroyed the group
PATIENCE = 2.0  # seconds that the ends of groups wait for later ranks, all together
LONGEST_NAP = 0.02


class CallExchange:
    """The exchange of this process."""

    def __init__(self, channel: Channel, end_call: Callable[[UnderWay, str], None]) -> None:
        self._channel, self._end_call = channel, end_call
        self._ended: deque[CallLog] = deque(maxlen=ENDED_GROUPS)
        self._patience = PATIENCE
        self._unanswered = 0  # unanswered questions in a row
        self._made: set[tuple[int, ...]] = set()  # the groups that were in creation at the last look
        self._lasting: set[tuple[int, ...]] = set()  # those that still are
        self._destroyed: set[tuple[str, int]] = set()  # groups, by name, and ranks that had destroyed them unused
        channel.register(KIND, self._answer)
        channel.register(KEPT_KIND, self._kept)
        channel.register(LISTS_KIND, lambda message: {"lists": [list(each) for each in self._lasting]})
        channel.register(DESTROYED_KIND, lambda message: {"is_unused": is_destroyed_unused(message)})
        hooks.compare_calls = self.compare

    def _live(self) -> Iterator[CallLog]:
        for group in WORLD.watched():
            for backend in group.in_use():
                if (log := backend.call_log()) is not None:
                    log.ranks = group.ranks
                    yield log

    def _find(self, token: str) -> CallLog | None:
        return next((each for each in (*self._live(), *self._ended) if each.token == token), None)

    # -- once a second -------------------------------------------------------------------------------

    def look(self, calls: list[UnderWay]) -> None:
        """Send this rank's positions to the next node, if it leads its own, and end calls on failed groups."""
        self._compare_making(calls)
        self._find_destroyed(calls)
        for log in self._live():
            if log.failure is not None:
                has_waited = time.monotonic() - log.failed_at >= RETURN_SECONDS
                for each in calls:
                    if has_waited and each.backend.call_log() is log and not each.call.is_message:
                        self._end_call(each, log.failure)
            elif log.leader == log.rank and (place := log.place()) is not None and place.number > log.met:
                self._send(log, log.neighbours()[:1])

    def _where(self, log: CallLog) -> Message:
        place = log.place() if log.failure is None else None
        return {"group": log.token, "rank": log.rank, "place": place, "failure": log.failure}

    def _send(self, log: CallLog, ranks: list[int]) -> None:
        """Send this rank's position to ranks of the group, and read theirs."""
        others = {log.ranks[each]: each for each in ranks}
        self._channel.send(others, KIND, partial(self._take_all, log, others), **self._where(log))

    def _send_failure(self, log: CallLog) -> None:
        if log.failure is not None and log.tells:
            log.tells = False
            self._send(log, log.listeners())

    # -- others --------------------------------------------------------------------------------------

    def _answer(self, message: Message) -> Message:
        """Compare the calls of a rank of another node with this one's."""
        self._unanswered = 0
        if (log := self._find(message["group"])) is None:
            return {}
        self._take(log, message["rank"], message)
        return self._where(log)

    def _take_all(self, log: CallLog, others: dict[int, int], answers: dict[int, Message]) -> None:
        """Read the positions of others, and how far the next node has come."""
        for asked, answer in answers.items():
            self._take(log, others[asked], answer)
            if others[asked] == log.neighbours()[0] and answer.get("place") is not None:
                log.met = max(log.met, answer["place"][0])

    def _take(self, log: CallLog, rank: int, answer: Message) -> None:
        if answer.get("failure") is not None:
            self._fail(log, answer["failure"], log.leader == log.rank)
        elif (
            answer.get("place") is not None
            and log.failure is None
            and not log.agrees(rank, CallPosition(*answer["place"]))
        ):
            self._compare_words(log, rank)

    def _compare_words(self, log: CallLog, rank: int) -> None:
        may_wait = threading.get_ident() != self._channel.thread  # the watchdog's answers others
        if not log.comparing.acquire(timeout=2 * KEPT_SECONDS if may_wait else 0):
            return  # another thread does it
        try:

            def kept(block: int) -> Message:
                asked = log.ranks[rank]
                answers = self._channel.ask([asked], KEPT_KIND, KEPT_SECONDS, group=log.token, block=block)
                return answers.get(asked, NOTHING_KEPT)

            if failure := log.find(rank, dict(kept(NO_BLOCK)["starts"]), lambda block: kept(block)["words"]):
                self._fail(log, failure, True)
        finally:
            log.comparing.release()

    def _kept(self, message: Message) -> Message:
        """Return this rank's sums by block, and the words of one block."""
        if (log := self._find(message["group"])) is None:
            return NOTHING_KEPT
        words = [memoryview(each).cast("q").tolist() for each in log.words(message["block"])]
        return {"starts": list(log.starts().items()), "words": words}

    def _fail(self, log: CallLog, failure: str, tells: bool) -> None:
        if log.failure is None:
            log.fail(failure, tells)
            self._send_failure(log)

    # -- at the end of a group, and after the library has failed -----------------------------------------------

    def compare(self, log: CallLog, seconds: float) -> None:
        """Compare this rank's calls with those of a rank of the next node and one of the node before, at once.

        It waits some seconds for ranks that have not come as far.
        """
        if log not in self._live():
            return
        if log.is_ending:
            self._ended.append(log)
        self._send_failure(log)
        others = {log.ranks[each]: each for each in log.neighbours()}
        began = time.monotonic()
        deadline = began + (min(seconds, self._patience) if log.is_ending else seconds)
        while others and log.failure is None and self._unanswered < UNANSWERED:
            answers = self._channel.ask(others, KIND, ANSWER_SECONDS, **self._where(log))
            self._unanswered = 0 if answers else self._unanswered + 1
            self._take_all(log, others, answers)
            own = log.place()
            late = {
                each for each, answer in answers.items() if own and answer.get("place") and answer["place"][0] < own[0]
            }
            others = {asked: each for asked, each in others.items() if asked in late}
            if time.monotonic() >= deadline:
                break
            nap(time.monotonic() - began, LONGEST_NAP)
        if log.is_ending:
            self._patience -= time.monotonic() - began

    # -- groups that only their members make (MPI_Comm_create_group) -----------------------------------

    def _compare_making(self, calls: list[UnderWay]) -> None:
        """Compare the groups in creation with those that their members make.

        Only members take part in such a call, so that MPI cannot detect different lists of members: each rank waits for
        ranks that make another group.
        """
        made, me = {tuple(ranks) for group in WORLD.watched() for ranks in group.making}, self._channel.rank
        self._lasting, self._made = made & self._made, made
        for mine in self._lasting:
            if me not in mine:  # ranks have got other numbers
                continue
            for other, answer in self._channel.ask(others_after(me, mine), LISTS_KIND, LASTING_SECONDS).items():
                theirs = {tuple(each) for each in answer["lists"] if me in each}
                if mine not in theirs and (different := theirs - made):
                    failure = lists_differ(me, mine, other, min(different))
                    for each in calls:
                        if each.call.name == MAKING and list(mine) in each.group.making:
                            self._end_call(each, failure)

    # -- groups that a member has destroyed without using them ------------------------------------------

    def _find_destroyed(self, calls: list[UnderWay]) -> None:
        """End the first call on a group, or a message, that another member has destroyed the group in place of.

        The ranks make a call board in their first call together. The answer counts at the second look, because a member
        may be making another group of the name.
        """
        found = set()
        for each in calls:
            group, call, me = each.group, each.call, self._channel.rank
            lasts = time.monotonic() - each.first_seen >= FIRST_SECONDS and each.limit is None
            if not lasts or each.backend.ends_waits or me not in group.ranks:
                continue
            others: list[int] = []
            if call.is_message:
                others = [] if call.root is None else [group.ranks[call.root]]
            elif call.number == 1 and call.name not in (DESTROY, *REMAKING):  # which an excluded rank does not make
                others = others_after(me, group.ranks)[:NEXT]
            which = {"group": group.group_name, "message": call.is_message}
            answers = self._channel.ask(others, DESTROYED_KIND, LASTING_SECONDS, **which)
            for other in (rank for rank, answer in answers.items() if answer["is_unused"]):
                found.add(known := (group.group_name, other))
                if known in self._destroyed:
                    made = {group.group_ranks[me]: call.name, group.group_ranks[other]: DESTROY}
                    ways = [f"rank {rank}: {made[rank]}" for rank in sorted(made)]
                    self._end_call(each, calls_differ(group.size(), ways))
                    break
        self._destroyed = found


def others_after(me: int, ranks: Sequence[int]) -> list[int]:
    """Return the other ranks of a group, or some of many: those that come after this one."""
    at = ranks.index(me)
    return [*ranks[at + 1 :], *ranks[:at]][:ASKED]


def is_destroyed_unused(message: Message) -> bool:
    """Tell whether this rank has destroyed a ``group`` without a collective on it, or without a ``message``."""
    last = made_on(message["group"])[-1:]
    is_live = any(each.group_name == message["group"] for each in list(WORLD.groups.values()))
    if is_live or not last or last[0].name != DESTROY:
        return False
    return last[0].journal.messages == 0 if message["message"] else last[0].number == 1
