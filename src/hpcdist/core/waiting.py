"""Waits: for a condition, by polling, and for readable descriptors.

The naps between two polls grow. A nap of a 32nd of the wait so far delays its end by 1.5 % on average, and leaves the
core to other processes. Long naps also avoid a fault of Linux 6.18: if threads of a session nap thousands of times a
second while others of it call `sched_yield`, as Open MPI does on a crowded machine, all other processes may be left
without a core for half a minute (docs, Known issues).
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
    """Poll a condition, which may make progress; return True once it holds, False after some seconds.

    ``looks`` polls come before the first nap; the longest nap is limited.
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


def wait_readable(sources: Iterable[Source], seconds: float) -> list[Source]:
    """Wait until one of the sources is readable, or the time is over; return those that are ready.

    ``select.select`` takes no descriptor from 1024 on, and a process that loads data may have as many open.
    """
    poll, by_descriptor = select.poll(), {}
    for each in sources:
        by_descriptor[each.fileno()] = each
        poll.register(each, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)]
