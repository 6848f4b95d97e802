"""Inspection of a running job: a rank's answers to ``python -m hpcdist debug``, which finds it by its debug socket."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from hpcdist.core.group import Group, label
from hpcdist.core.world import WORLD
from hpcdist.watch import calls_under_way, timing
from hpcdist.watch.endpoint import Endpoint
from hpcdist.watch.timing import TimedCall

LEASE_SECONDS = 10.0  # seconds for which calls are timed after the last question
FRAMES, ROWS, ENDPOINTS = 25, 20, 80  # as many as fit into a datagram


class Inspection:
    """The answers of this rank, with the times of its calls, which are taken while there are questions."""

    def __init__(self) -> None:
        # by name, line and whether it was asynchronous: calls, bytes, nanoseconds, and those of the longest one
        self._tallies: dict[tuple[str, str, bool], list[int]] = {}
        self._until = 0.0

    def answer(self, endpoints: Mapping[int, Endpoint], first: int) -> dict[str, Any]:
        """Return the requested answer, and some of the endpoints from the ``first`` on; none if that is negative."""
        now = time.monotonic()
        if self._until == 0.0:
            timing.listen(self._tally)
        self._until = now + LEASE_SECONDS
        blocked = [each.thread for each in calls_under_way.under_way() if not each.in_background]
        tallies = list(self._tallies.items())  # the program's threads may add others meanwhile
        longest = sorted(tallies, key=lambda each: -each[1][2])[:ROWS]  # the lines with the most time
        part = sorted(endpoints)[first : first + ENDPOINTS] if first >= 0 else []
        return {
            "stack": [
                f"{frame['filename']}:{frame['line']} ({frame['name']})"
                for frame in calls_under_way.stack(*blocked[:1])[:FRAMES]
            ],
            "groups": {each.group_name: describe(each) for each in list(WORLD.groups.values())[:ROWS]},
            "calls": [[*key, *numbers] for key, numbers in longest],
            "endpoints": [[rank, list(endpoints[rank])] for rank in part],
            "size": len(endpoints),
        }

    def look(self, now: float) -> None:
        """Stop the timing after a while without questions; the watchdog calls this periodically."""
        if self._until and now > self._until:
            timing.leave(self._tally)
            self._until = 0.0
            self._tallies = {}

    def _tally(self, call: TimedCall) -> None:
        numbers = self._tallies.setdefault((call.title, call.where, call.is_async), [0, 0, 0, 0])
        numbers[0] += 1
        numbers[1] += call.nbytes
        numbers[2] += call.end - call.begin
        numbers[3] = max(numbers[3], call.end - call.begin)


def describe(group: Group) -> dict[str, Any]:
    return {
        "label": label(group),
        "size": group.size(),
        "collectives": group.journal.sequence,
        "messages": group.journal.messages,
        "backend": group.config,
    }


def program() -> str:
    name, *arguments = getattr(sys, "argv", None) or [""]  # a program that embeds Python may lack it
    return " ".join([os.path.basename(name), *arguments])[:80]
