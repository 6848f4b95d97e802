"""How does a log line say which rank and group it comes from?

By the standard library: the logger is ``hpcdist``, and ``HPCDIST_LOG=debug`` (or info, warning, error) gives it
a handler of its own on stderr. A record may name its group with ``extra={"group": ...}``.
"""

from __future__ import annotations

import logging
import os

VARIABLE = "HPCDIST_LOG"
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
LOG = logging.getLogger("hpcdist")


class Origin(logging.Filter):
    """Puts the rank, the world's size and the group before each line."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = -1, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Give the record its ``origin``."""
        group = getattr(record, "group", None)
        within = "" if group is None else f" group {group}"
        record.origin = f"rank {self.rank} of {self.size}{within}" if self.size else "before init"
        return True


ORIGIN = Origin()


def set_up(rank: int, size: int) -> None:
    """Tell the logger which rank this is, and give it a handler where the environment asks for one.

    Raises:
        ValueError: a level that is none.
    """
    ORIGIN.rank, ORIGIN.size = rank, size
    wanted = os.environ.get(VARIABLE, "").lower()
    if not wanted or any(ORIGIN in handler.filters for handler in LOG.handlers):
        return
    if wanted not in LEVELS:
        raise ValueError(f"{VARIABLE}={wanted!r} is no level (known: {', '.join(LEVELS)})")
    handler = logging.StreamHandler()
    handler.addFilter(ORIGIN)
    handler.setFormatter(logging.Formatter("%(asctime)s [%(origin)s] %(levelname)s %(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(LEVELS[wanted])
    LOG.propagate = False
