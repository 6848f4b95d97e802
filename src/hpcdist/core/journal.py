"""Journal of a group: the calls of this rank, and the one that blocks now.

Every call leaves one tuple in a ring that all groups share, and a mark on its group while it blocks. That is all
that the way of a call pays for the watchdog and the flight recorder (``hpcdist.watch``): no clock is read and
no call site looked up here. The shape and dtype are kept, never the tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcdist.core import hooks

if TYPE_CHECKING:
    import torch

    from hpcdist.core.table import Row

CALLS_KEPT = 2000  # as many as torch's recorder keeps by default


class Call(NamedTuple):
    """One call, as read back from the plain tuple that the fast path writes."""

    journal: Journal
    number: int  # counts the group's collectives, or for a message this rank's messages on the group
    what: Row | str
    shape: torch.Size | None  # of the tensor read, or written where none is
    dtype: torch.dtype | None
    root: int | None  # a rank of the group: the root, or a message's peer

    @property
    def name(self) -> str:
        """What c10d calls it."""
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
        self.calls: deque[tuple[Any, ...]] = deque(maxlen=CALLS_KEPT)

    def resize(self, length: int) -> None:
        """Keep another number of calls; for journals that follow from now on."""
        self.calls = deque(self.calls, maxlen=length)

    def last(self) -> tuple[Any, ...] | None:
        """Return the record of the latest call."""
        return self.calls[-1] if self.calls else None

    def pusher(self) -> Callable[[tuple[Any, ...]], None]:
        """Return what a journal adds its calls with."""
        append, listener = self.calls.append, hooks.listen
        if listener is None:
            return append

        def append_and_tell(call: tuple[Any, ...]) -> None:
            append(call)
            listener(call)

        return append_and_tell


RING = Ring()


class Journal:
    """The calls of this rank on one group.

    Attributes:
        sequence: how many collectives were called; the same on all ranks of a group in step.
        messages: how many sends and receives were called.
        current: the call that blocks now, or None.
        waited: the Work that ``current`` waits for, where it is a wait.
        monitored: how many monitored barriers each rank of the group has called, as far as this rank knows.
        push: adds a call to the ring.
        group: the group's name.
    """

    __slots__ = ("current", "group", "messages", "monitored", "push", "sequence", "waited")

    def __init__(self, group: str) -> None:
        self.sequence = 0
        self.messages = 0
        self.monitored: dict[int, int] = {}
        self.current: tuple[Any, ...] | None = None
        self.waited: Any = None
        self.group = group
        self.follow()

    def follow(self) -> None:
        """Add calls to the ring as it is now."""
        self.push = RING.pusher()

    def collective(
        self, what: Row | str, tensor: torch.Tensor | None = None, root: int | None = None
    ) -> tuple[Any, ...]:
        """Count and record a collective, and return its record."""
        self.sequence = number = self.sequence + 1
        shape, dtype = (None, None) if tensor is None else (tensor.shape, tensor.dtype)
        call = (self, number, what, shape, dtype, root)
        self.push(call)
        return call

    def message(
        self, what: str, shape: torch.Size | None, dtype: torch.dtype | None, peer: int | None
    ) -> tuple[Any, ...]:
        """Count and record a send or receive, and return its record."""
        self.messages = number = self.messages + 1
        call = (self, number, what, shape, dtype, peer)
        self.push(call)
        return call

    def during(self, what: str, root: int | None = None) -> AbstractContextManager[None]:
        """Record a call without a tensor, which blocks inside the ``with`` block that this is given to."""
        if what in MESSAGES:
            self.current = call = self.message(what, None, None, root)
        else:
            self.current = call = self.collective(what, None, root)
        event = hooks.record(what, [], call, False) if hooks.is_profiled() else None
        return self if event is None else Profiled(self, event)

    def __enter__(self) -> None:
        """Begin to block."""

    def __exit__(self, *_: object) -> None:
        """Blocks no longer."""
        self.current = None


class Profiled:
    """A call without a tensor, while it blocks and a profiler looks on."""

    def __init__(self, journal: Journal, event: hooks.Event) -> None:
        self._journal = journal
        self._event = event

    def __enter__(self) -> None:
        """Begin to block."""

    def __exit__(self, *_: object) -> None:
        """Blocks no longer."""
        self._journal.current = None
        self._event.__exit__(None, None, None)
