"""Hooks: the places where upper layers install what core calls but does not know.

Each is a variable of this module. Until an upper layer sets it, it does nothing, so core works without them. They are
read as ``hooks.NAME`` at each use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


def compare_nothing(log: Any, seconds: float) -> None:
    """Compare no calls."""


class Event(Protocol):
    """An event of a profiler that has begun."""

    def __exit__(self, *_: Any) -> Any:
        """End it, from any thread."""


def is_profiled_by_nobody() -> bool:
    """Return False: no profiler is known."""
    return False


def record_nothing(
    name: str | None, inputs: Sequence[torch.Tensor], call: tuple[Any, ...] | None, is_async: bool
) -> Event | None:
    """Raise: no profiler is known."""
    raise RuntimeError(f"no profiler is installed to record {name}")


def has_no_modes() -> int:
    """Return 0: nobody knows of dispatch modes."""
    return 0


def knows_no_wrapper(values: Any) -> bool:
    """Return False: nobody knows of wrappers."""
    return False


def explain_nothing(call: Any) -> str:
    """Return no explanation."""
    return ""


# whether a profiler runs, and what begins an event of a name, inputs, the call's record in its journal, and whether it
# goes on after the call has returned; a call without a name is part of an event that has begun, and an event without a
# record joins several calls. ``torch_bridge`` sets both, and ``watch.timing`` puts itself before them
is_profiled: Callable[[], bool] = is_profiled_by_nobody
record: Callable[[str | None, Sequence[torch.Tensor], tuple[Any, ...] | None, bool], Event | None] = record_nothing

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

# how many dispatch modes are active; whether a tensor among some values wraps others; and what carries out a call, a
# group's, asynchronously or not, so that these see it; ``torch_bridge.dispatch`` sets them
has_modes: Callable[[], int] = has_no_modes
has_wrapper: Callable[[Any], bool] = knows_no_wrapper
dispatch: Callable[[Any, Any, bool], Any]

# says where the other ranks are, for the message of a wait that timed out; ``watch`` sets it
explain: Callable[[Any], str] = explain_nothing

# compares a rank's calls on a group (``core.call_log``) with those of neighbours on other nodes, and waits for these
# some seconds if they have not come as far; ``watch.call_exchange`` sets it
compare_calls: Callable[[Any, float], None] = compare_nothing
