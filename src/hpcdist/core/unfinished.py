"""Works of the messages under way on a communicator."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcdist.core.work import Work

ASKED_FROM = 16  # messages under way before they are asked whether they have ended: asking costs an MPI call each


class Unfinished(dict["Work", None]):
    """Works of messages under way, kept with their buffers until they have ended though the caller may drop them.

    Whoever notices the end of one takes it out; another thread may have done so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.limit = ASKED_FROM  # from how many on they are asked whether they have ended

    def hold(self, work: Work) -> None:
        """Keep one, and ask all if they are twice as many as were left the last time."""
        if len(self) >= self.limit:
            for each in list(self):
                each.is_completed()  # which releases it
            self.limit = max(ASKED_FROM, 2 * len(self))
        self[work] = None
