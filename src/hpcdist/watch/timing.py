"""Times of calls: the begin and end of each on this rank, while there are listeners.

Without a listener a call has no cost. With one, calls go the same way as under torch.profiler, with the same calls of
the libraries below, which costs some microseconds.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import torch

from hpcdist.core import hooks
from hpcdist.core.journal import CallRecord
from hpcdist.core.work import NO_TIMEOUT, Work
from hpcdist.watch import calls_under_way

if TYPE_CHECKING:
    from hpcdist.core.hooks import Event


COLLECTIVE, MESSAGE, WAIT = "collective", "message", "wait"


class TimedCall(NamedTuple):
    """A call that has ended."""

    name: str
    group: str  # its name
    number: int  # counts the group's collectives, or this rank's messages on the group
    peer: int | None  # a message's other rank or the root, in the group; None for other calls, and for any source
    nbytes: int  # of the tensor sent, or received if none is sent; 0 for objects
    where: str  # the line of the user's code, as ``file.py:88 (function)``
    begin: int  # nanoseconds on this host's clock (``time.perf_counter_ns``)
    end: int
    kind: str  # COLLECTIVE, MESSAGE, or WAIT for an asynchronous call of this name and number
    is_async: bool  # whether it was asynchronous
    thread: int

    @property
    def title(self) -> str:
        """Its name in tables and traces."""
        return f"wait({self.name})" if self.kind == WAIT else self.name


Listener = Callable[[TimedCall], None]
LISTENERS: list[Listener] = []
GUARD = threading.Lock()
plain_wait = Work.wait
BEFORE: dict[str, Any] = {}  # the hooks without listeners
RANGES: list[Callable[[str, bool], Callable[[], Any] | None]] = []  # each opens a range and returns its end


class TimedEvent:
    """A call under way, as a profiler's event."""

    __slots__ = ("__weakref__", "_closers", "_inner", "timed")

    def __init__(self, call: CallRecord, nbytes: int, is_async: bool, inner: Event | None) -> None:
        group, kind, thread = call.journal.group, MESSAGE if call.is_message else COLLECTIVE, threading.get_ident()
        what = call.name, group, call.number, call.root, nbytes, calls_under_way.caller()
        self._inner = inner
        self._closers = [each(f"{call.name} #{call.number} group {group}", is_async) for each in RANGES]
        self.timed = TimedCall(*what, time.perf_counter_ns(), 0, kind, is_async, thread)
        UNDER_WAY.add(self)

    def __exit__(self, *_: object) -> None:
        """End it, from any thread."""
        timed = self.timed._replace(end=time.perf_counter_ns())
        UNDER_WAY.discard(self)
        for close in self._closers:
            if close is not None:
                close()
        if self._inner is not None:
            self._inner.__exit__(None, None, None)
        tell(timed)


def under_way(since: int, until: int) -> list[TimedCall]:
    """Return the calls that began since ``since`` and have not ended, with ``until`` as their end."""
    calls = [event.timed._replace(end=until) for event in list(UNDER_WAY)]
    return [call for call in calls if call.begin >= since]


def tell(call: TimedCall) -> None:
    for listener in LISTENERS:
        listener(call)


def timed_wait(self: Work, timeout: timedelta = NO_TIMEOUT) -> bool:
    """Replacement of ``Work.wait`` while there are listeners; a wait for a device does not block, and is not timed."""
    if self._done or self._call is None:
        return plain_wait(self, timeout)
    begin = time.perf_counter_ns()
    try:
        return plain_wait(self, timeout)
    finally:
        end, call = time.perf_counter_ns(), CallRecord(*self._call)
        what = call.name, call.journal.group, call.number, call.root, 0, calls_under_way.caller()
        tell(TimedCall(*what, begin, end, WAIT, False, threading.get_ident()))


UNDER_WAY: WeakSet[TimedEvent] = WeakSet()


def record(
    name: str | None, inputs: Sequence[torch.Tensor], call: tuple[Any, ...] | None, is_async: bool
) -> Event | None:
    """Begin a call's event, and torch.profiler's if that runs too."""
    inner: Event | None = BEFORE["record"](name, inputs, call, is_async) if BEFORE["is_profiled"]() else None
    if call is None:
        return inner
    return TimedEvent(CallRecord(*call), sum(each.nbytes for each in inputs), is_async, inner)


def listen(listener: Listener) -> None:
    """Call a listener for each call that ends from now on, from any thread."""
    with GUARD:
        if not BEFORE:
            BEFORE.update(is_profiled=hooks.is_profiled, record=hooks.record)
            hooks.record = record  # stays set: a call may have checked whether it is profiled, and not begun its event
            RANGES[:] = [each for each in (nvtx(), score_p()) if each is not None]
        LISTENERS.append(listener)
        hooks.is_profiled, Work.wait = (lambda: True), timed_wait  # type: ignore[method-assign]


def leave(listener: Listener) -> None:
    with GUARD:
        LISTENERS.remove(listener)
        if not LISTENERS:
            hooks.is_profiled, Work.wait = BEFORE["is_profiled"], plain_wait  # type: ignore[method-assign]


def nvtx() -> Callable[[str, bool], Callable[[], Any] | None] | None:
    """Return a function that opens a range of NVTX: torch's with CUDA, else the package ``nvtx``'s; None without."""
    if torch.version.cuda is not None:
        start, end = torch.cuda.nvtx.range_start, torch.cuda.nvtx.range_end
    else:
        try:
            package = importlib.import_module("nvtx")
            start, end = package.start_range, package.end_range
        except (ImportError, AttributeError):  # missing, or another package of that name
            return None

    def open_range(name: str, is_async: bool) -> Callable[[], Any]:
        handle = start(name)
        return lambda: end(handle)

    return open_range


def score_p() -> Callable[[str, bool], Callable[[], Any] | None] | None:
    """Return a function that opens a region of Score-P, None without it; regions nest, so async calls have none."""
    user = sys.modules.get("scorep.user")
    if user is None and "scorep" in sys.modules:
        user = importlib.import_module("scorep.user")
    if user is None:
        return None

    def open_region(name: str, is_async: bool) -> Callable[[], Any] | None:
        if is_async:
            return None
        region = f"hpcdist {name.partition(' ')[0]}"  # without the number: each would be a region of its own
        user.region_begin(region)
        return lambda: user.region_end(region)

    return open_region
