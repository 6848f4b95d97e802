"""Works of the messages under way on a communicator."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcdist.core.work import Work

ASKED_FROM = 16  # messages under way before they are asked whether they have ended: asking costs an MPI call each


class Unfinished(deque["Work"]):
    """Works of messages under way, kept with their buffers until they have ended though the caller may drop them.

    Attributes:
        limit: from how many on they are asked whether they have ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.limit = ASKED_FROM

    def hold(self, work: Work) -> None:
        """Keep one, and ask all if they are twice as many as were left the last time."""
        if len(self) >= self.limit:
            for each in list(self):
                each.is_completed()  # which releases it
            self.limit = max(ASKED_FROM, 2 * len(self))
        self.append(work)

    def let_go(self, work: Work) -> None:
        """Keep one no longer: it has ended."""
        try:  # noqa: SIM105  # suppress takes 0.5 µs, the whole 0.1
            self.remove(work)
        except ValueError:  # another thread has done so
            pass
