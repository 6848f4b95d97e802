"""Journal of a group: the calls of this rank, and those that block now.

Every call puts one tuple into a ring that all groups share, and a mark on its group while it blocks (``blocking``).
That is all that the watchdog and the flight recorder (``hpcdist.watch``) cost a call: no clock is read and no call site
looked up here. The shape and dtype are kept, never the tensor.

The mark of the first thread that blocks is ``current``, which costs least; others are added to ``further``. Between the
look at ``current`` and setting it no function is called, at which Python would switch threads.
"""

from __future__ import annotations

import threading
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcdist.core import hooks

if TYPE_CHECKING:
    import torch

    from hpcdist.core.table import Row

CALLS_KEPT = 2000  # as many as torch's recorder keeps by default


class CallRecord(NamedTuple):
    """One call, made from the plain tuple that the fast path writes."""

    journal: Journal
    number: int  # counts the group's collectives, or for a message this rank's messages on the group
    what: Row | str
    shape: tuple[int, ...] | None  # of the input, or of the output if there is no input
    dtype: torch.dtype | None
    root: int | None  # a rank of the group: the root, or a message's peer
    limit: float | None = None  # seconds, if it has a limit of its own

    @property
    def name(self) -> str:
        return self.what if isinstance(self.what, str) else self.what.name

    @property
    def is_message(self) -> bool:
        """Whether only some ranks of the group take part, so that it is not counted among its collectives."""
        return self.name in MESSAGES


ONE_SIDED = ("Window.put", "Window.get", "Window.accumulate", "Window.fetch_and_add", "Window.signal")
# create_group is new_group, called by the members only
MESSAGES = frozenset(
    {"send", "recv", "isend", "irecv", "send_object_list", "recv_object_list", "create_group", *ONE_SIDED}
)


class Ring:
    """The last calls of this process on all its groups, in order."""

    def __init__(self) -> None:
        self.calls: deque[tuple[Any, ...]] = deque(maxlen=CALLS_KEPT)  # their records
        self.past = 0  # how many calls were made on groups that have ended

    def resize(self, length: int) -> None:
        """Keep a different number of calls; for journals that call ``follow`` from now on."""
        self.calls = deque(self.calls, maxlen=length)

    def last(self) -> tuple[Any, ...] | None:
        return self.calls[-1] if self.calls else None

    def pusher(self) -> Callable[[tuple[Any, ...]], None]:
        append, listener = self.calls.append, hooks.listen
        if listener is None:
            return append

        def append_and_tell(call: tuple[Any, ...]) -> None:
            append(call)
            listener(call)

        return append_and_tell


RING = Ring()


def made_on(group: str) -> list[CallRecord]:
    """Return the calls of this rank on a group, as far as they are kept, those on earlier ones of its name first."""
    return [CallRecord(*each) for each in list(RING.calls) if each[0].group == group]


class Blocked:
    """A call that blocks, as the context in which it blocks: its record, and the identifier of its thread.

    A wait has the Work that it waits for, a call with a limit of its own the seconds after which it ends by itself.
    """

    __slots__ = ("call", "limit", "thread", "work")

    def __init__(self, call: tuple[Any, ...], work: Any, thread: int, limit: float | None) -> None:
        self.call, self.work, self.thread, self.limit = call, work, thread, limit

    def __enter__(self) -> None:
        """Begin to block."""

    def __exit__(self, *_: object) -> None:
        self.call[0].further.remove(self)

    def is_own(self) -> bool:
        """Tell whether it blocks the calling thread, such as that of a signal's handler which has interrupted it."""
        return self.thread == get_ident()

    def is_lasting(self) -> bool:
        """Tell whether it blocks another thread than the calling one, for which the end of Python waits."""
        return not self.is_own() and any(
            each.ident == self.thread and not each.daemon for each in threading.enumerate()
        )


class Journal:
    """The calls of this rank on one group."""

    __slots__ = ("asked", "current", "further", "group", "messages", "monitored", "push", "sequence")

    def __init__(self, group: str) -> None:
        self.sequence = 0  # how many collectives were called; the same on all ranks of a group in step
        self.messages = 0  # how many sends and receives were made
        self.monitored: dict[int, int] = {}  # how many monitored barriers each rank has called, if known here
        # the call that began to block first, as arguments of ``Blocked``; then calls of other threads or inside of it
        self.current: tuple[tuple[Any, ...], Any, int, float | None] | None = None
        self.further: list[Blocked] = []
        self.asked: dict[int, float] = {}  # by thread, the limit in seconds of the calls that it makes now
        self.group = group  # its name
        self.follow()

    def follow(self) -> None:
        """Add calls to the present ring from now on."""
        self.push = RING.pusher()  # adds a call to the ring

    def collective(
        self,
        what: Row | str,
        tensor: torch.Tensor | None = None,
        root: int | None = None,
        limit: float | None = None,
    ) -> tuple[Any, ...]:
        self.sequence = number = self.sequence + 1
        shape, dtype = (None, None) if tensor is None else (tensor.shape, tensor.dtype)
        call = (self, number, what, shape, dtype, root, limit)
        self.push(call)
        return call

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Give the calls of this thread a limit of their own."""
        thread = get_ident()
        before, self.asked[thread] = self.asked.get(thread), seconds
        try:
            yield
        finally:
            del self.asked[thread]
            if before is not None:
                self.asked[thread] = before

    def retract(self, call: tuple[Any, ...]) -> None:
        """Remove a collective that was refused: the next one gets its number."""
        self.sequence = call[1] - 1
        with suppress(ValueError):  # the ring has dropped it
            RING.calls.remove(call)

    def message(
        self,
        what: str,
        shape: torch.Size | None,
        dtype: torch.dtype | None,
        peer: int | None,
        limit: float | None = None,
    ) -> tuple[Any, ...]:
        """Count and record a send or receive, and return its record."""
        self.messages = number = self.messages + 1
        call = (self, number, what, shape, dtype, peer, limit)
        self.push(call)
        return call

    def during(self, what: str, root: int | None = None, limit: float | None = None) -> AbstractContextManager[object]:
        """Record a call without a tensor, which blocks inside the returned context."""
        is_message = what in MESSAGES
        call = self.message(what, None, None, root, limit) if is_message else self.collective(what, None, root, limit)
        event = hooks.record(what, [], call, False) if hooks.is_profiled() else None
        return self.blocking(call) if event is None else self.profiled(call, event)

    def blocking(
        self, call: tuple[Any, ...], work: Any = None, limit: float | None = None
    ) -> AbstractContextManager[object]:
        """Return the context in which a call blocks on this thread, already begun; arguments as for ``Blocked``."""
        mark = call, work, get_ident(), limit
        if self.current is None and not self.further:
            self.current = mark
            return self
        blocked = Blocked(*mark)
        self.further.append(blocked)
        return blocked

    def profiled(self, call: tuple[Any, ...], event: hooks.Event) -> AbstractContextManager[object]:
        """Return the context in which a call blocks, whose end also ends its event of a profiler."""
        both = ExitStack()  # the last one ends first
        both.callback(event.__exit__, None, None, None)
        both.push(self.blocking(call))
        return both

    def run(self, call: tuple[Any, ...], function: Callable[[Any], None], argument: Any, work: Any = None) -> None:
        """Run a function as a call that blocks: ``blocking`` without its cost."""
        mark = call, work, get_ident(), None
        if self.current is not None or self.further:
            with self.blocking(call, work):
                function(argument)
            return
        self.current = mark
        try:
            function(argument)
        finally:
            self.current = None

    def blocked(self) -> list[Blocked]:
        """Return the calls that block now; of nested ones the innermost."""
        first, further = self.current, list(self.further)
        if first is not None:
            further.insert(0, Blocked(*first))
        innermost = {each.thread: each for each in further}
        return [each for each in further if innermost[each.thread] is each]

    # in C: before a Python function a signal's handler that raises could run, and the mark would stay
    __enter__ = staticmethod(get_ident)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.current = None
