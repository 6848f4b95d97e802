"""Hooks: functions of upper layers that core calls without importing them.

Each is a variable of this module, read as ``hooks.NAME`` at each use. Until an upper layer sets it, it does nothing, so
core works without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """An event of a profiler that has begun."""

    def __exit__(self, *_: Any) -> Any:
        """End it, from any thread."""


def nothing(*_: Any) -> Any:
    """Do nothing, and return an empty text, which is false: the default of hooks."""
    return ""


# whether a profiler runs, and what begins an event of a name, inputs, the call's record in its journal, and whether it
# goes on after the call has returned; a call without a name is part of an event that has begun, and an event without a
# record joins several calls. ``torch_bridge`` sets both, and ``watch.timing`` puts itself before them
is_profiled: Callable[[], bool] = nothing
record: Callable[[str | None, Sequence[torch.Tensor], tuple[Any, ...] | None, bool], Event | None]

# what makes a test of whether tensors look like the given ones (``core.call_cache``), but for their sizes if
# ``any_size``; ``torch_bridge.compiler`` sets it if this torch has such a comparison
likeness: Callable[..., Callable[..., bool]] | None = None

# whether this process ends, and no thread may begin a call
is_ending = False

# looks at a collective before it runs, to compare it with the other ranks' or to find NaN in it, and at a message
# before it is sent; ``c10d.debug`` sets them
compare: Callable[..., None] | None = None
check_message: Callable[..., None] | None = None

# whether reductions are made to repeat bit for bit (``core.reproducible``); init and ``beyond`` set it
reproducible = False

# takes the record of each call, for journals that follow from now on; ``watch.logs`` sets it at the level debug
listen: Callable[[tuple[Any, ...]], None] | None = None

# whether a dispatch mode or transform of ``torch.func`` is active, or a tensor of a call's sides wraps others; whether
# one of some values does; and what carries out a call, a group's, asynchronously or not, so that these see it.
# ``torch_bridge.dispatch`` sets them
must_be_seen: Callable[..., bool] = nothing
has_wrapper: Callable[[Any], bool] = nothing
dispatch: Callable[[Any, Any, bool], Any]

# says where the other ranks are, for the message of a wait that timed out; ``watch`` sets it
explain: Callable[[Any], str] = nothing

# compares a rank's calls on a group (``core.call_log``) with those of neighbours on other nodes, and waits for these
# some seconds if they have not come as far; ``watch.call_exchange`` sets it
compare_calls: Callable[[Any, float], None] = nothing
