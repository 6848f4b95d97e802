"""Comparison of the lists of ranks of groups that are made by their members only (MPI_Comm_create_group).

Nobody else takes part in such a call, so that MPI cannot find that members give different lists: each waits for ranks
that make another group. A call that lasts is compared with those of its other members, once a second.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from hpcdist.core.agreement import lists_differ
from hpcdist.core.world import WORLD
from hpcdist.watch import calls_under_way
from hpcdist.watch.calls_under_way import UnderWay
from hpcdist.watch.channel import Channel

KIND, NAME = "members", "create_group"
SHAPE = {"lists": [[int]]}
ASKED = 64  # members that a look asks
ANSWER_SECONDS = 0.3

Ranks = tuple[int, ...]


class Members:
    """The groups that this process makes."""

    def __init__(self, channel: Channel, end_call: Callable[[UnderWay, str], None]) -> None:
        self._channel, self._end_call = channel, end_call
        self._before: set[Ranks] = set()  # those that were being made at the last look
        self._lasting: set[Ranks] = set()  # and still are
        channel.register(KIND, lambda message: {"lists": [list(each) for each in self._lasting]}, {})

    def look(self) -> None:
        """Compare the groups whose making lasts with those that their members make."""
        made = {tuple(ranks) for group in WORLD.watched() for ranks in group.making}
        self._lasting, self._before = made & self._before, made
        for mine in self._lasting:
            if (failure := self._difference(mine)) is not None:
                for each in calls_under_way.under_way():
                    if each.call.name == NAME and list(mine) in each.group.making:
                        self._end_call(each, failure)

    def _difference(self, mine: Ranks) -> str | None:
        me = self._channel.rank
        if me not in mine:  # ranks have other numbers since
            return None
        at = mine.index(me)
        others = list(islice((*mine[at + 1 :], *mine[:at]), ASKED))
        answers = self._channel.ask(others, KIND, SHAPE, ANSWER_SECONDS)
        for other, answer in answers.items():
            theirs = {tuple(each) for each in answer["lists"] if me in each}
            if mine not in theirs and (different := theirs - self._before):
                return lists_differ(me, mine, other, min(different))
        return None
