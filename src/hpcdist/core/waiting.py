"""Waits: for a condition, which is looked at again and again, and for descriptors that have something to be read.

The naps between two looks grow. A nap of a 32nd of the wait so far delays its end by 1.5 % on average, and leaves the
core to others. On Linux 6.18 it does more: if threads of a session nap thousands of times a second while others of it
call `sched_yield`, as Open MPI does on a crowded machine, all other processes may be left without a core for half a
minute (docs, Known issues).
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import HasFileno

SHARE = 1 / 32  # of the wait so far
SHORTEST, LONGEST = 50e-6, 2e-3  # seconds


def nap(waited: float, longest: float = LONGEST) -> None:
    """Sleep for a share of the time that a wait has lasted, in seconds."""
    time.sleep(min(max(waited * SHARE, SHORTEST), longest))


def wait_until(
    condition: Callable[[], object], seconds: float = math.inf, looks: int = 0, longest: float = LONGEST
) -> bool:
    """Return True once a condition holds, and False if it does not within some seconds; it may make progress.

    It is looked at so often before the first nap; the longest nap is one of so many seconds.
    """
    began = time.monotonic()
    while not condition():
        if (waited := time.monotonic() - began) >= seconds:
            return False
        if looks > 0:
            looks -= 1
        else:
            nap(waited, longest)
    return True


Source = TypeVar("Source", bound="HasFileno")


def readable(sources: Iterable[Source], seconds: float) -> list[Source]:
    """Wait until something can be read from one of the sources, or the time is over; return those that are ready.

    ``select.select`` takes no descriptor from 1024 on, and a process that loads data may have as many open.
    """
    poll, by_descriptor = select.poll(), {}
    for each in sources:
        by_descriptor[each.fileno()] = each
        poll.register(each, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)]
