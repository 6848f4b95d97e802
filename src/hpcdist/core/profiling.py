"""Events of torch.profiler for calls.

A call is an event ``backend:call`` with the shape of the input, which ends when the operation ends. The backend has the
name that a script on ``torch.distributed`` uses, because tools look for events by that name.
Without a profiler the cost is one call of ``hooks.is_profiled()``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hpcdist.core import hooks
from hpcdist.core.backend import Backend
from hpcdist.core.group import Group

THREAD = threading.local()  # ``is_joining``: inside several calls that are one for the caller, whose event has begun


def begin(
    pg: Group,
    backend: Backend,
    call: str,
    inputs: Sequence[torch.Tensor],
    record: tuple[Any, ...] | None = None,
    is_async: bool = False,
) -> hooks.Event | None:
    """Begin the event of a call, or return None. Callers check ``hooks.is_profiled`` first.

    Inside an event that joins several calls, and has no record in the journal, the events of these have no name.
    """
    title = f"{pg.asked_name or backend.name}:{call.removesuffix('_single')}"  # c10d's, of the call on lists
    return hooks.record(None if getattr(THREAD, "is_joining", False) else title, inputs, record, is_async)


@contextmanager
def as_one(event: hooks.Event) -> Iterator[None]:
    """Let the calls made inside share this event and have none of their own; it ends here only if they fail."""
    THREAD.is_joining = True
    try:
        yield
    except BaseException:
        event.__exit__(None, None, None)
        raise
    finally:
        THREAD.is_joining = False
