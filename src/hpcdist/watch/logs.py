"""Logger of this package, ``hpcdist``: each line names its rank and group.

The environment variable ``HPCDIST_LOG=debug`` (or info, warning, error) gives it
a handler of its own on stderr. A record may name its group with ``extra={"group": ...}``. At ``debug`` each call is
logged when it begins, with its number, shape and dtype, and each group when it is made and destroyed.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from hpcdist.core import hooks
from hpcdist.core.journal import CallRecord

VARIABLE = "HPCDIST_LOG"
LEVELS = ("debug", "info", "warning", "error")
LOG = logging.getLogger("hpcdist")


class Origin(logging.Filter):
    """Puts the rank, the world's size and the group before each line."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = -1, 0

    def filter(self, record: logging.LogRecord) -> bool:
        group = getattr(record, "group", None)
        within = "" if group is None else f" group {group}"
        record.origin = f"rank {self.rank} of {self.size}{within}" if self.size else "before init"
        return True


ORIGIN = Origin()


def set_up() -> None:
    """Give the logger a handler if the environment variable is set; at ``debug`` it logs each call."""
    wanted = os.environ.get(VARIABLE, "").lower()
    if not wanted or any(ORIGIN in handler.filters for handler in LOG.handlers):
        return
    if wanted not in LEVELS:
        raise ValueError(f"{VARIABLE}={wanted!r} is not a level (known: {', '.join(LEVELS)})")
    handler = logging.StreamHandler()
    handler.addFilter(ORIGIN)
    handler.setFormatter(logging.Formatter("%(asctime)s [%(origin)s] %(levelname)s %(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(wanted.upper())
    LOG.propagate = False
    if LOG.isEnabledFor(logging.DEBUG):
        hooks.listen = log_call


def log_call(record: tuple[Any, ...]) -> None:
    call = CallRecord(*record)
    tensor = "" if call.shape is None else f" of {str(call.dtype).removeprefix('torch.')} {list(call.shape)}"
    with_rank = "" if call.root is None else f", {'peer' if call.is_message else 'root'} {call.root}"
    LOG.debug("%s #%d%s%s", call.name, call.number, tensor, with_rank, extra={"group": call.journal.group})
