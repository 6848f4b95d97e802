"""Readiness of descriptors: a wait for whichever has something to be read.

``select.select`` takes no descriptor from 1024 on, and a process that loads data may have as many open; ``poll`` takes
all.
"""

from __future__ import annotations

import select
from collections.abc import Iterable
from typing import Protocol, TypeVar


class Readable(Protocol):
    """Something with a descriptor: a socket or a file."""

    def fileno(self) -> int:
        """Return its descriptor."""


Source = TypeVar("Source", bound=Readable)


def readable(sources: Iterable[Source], seconds: float) -> list[Source]:
    """Wait until something can be read from one of the sources, or the time is over; return those that are ready."""
    poll, by_descriptor = select.poll(), {}
    for each in sources:
        by_descriptor[each.fileno()] = each
        poll.register(each, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)]
