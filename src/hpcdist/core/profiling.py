"""Events of torch.profiler for calls.

A call is an event ``backend:call`` that carries the shape of the input and ends when the operation ends. The backend is
called what a script on ``torch.distributed`` calls it, because tools look for events by that name.
Without a profiler a call costs one question, ``hooks.is_profiled()``.
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

THREAD = threading.local()  # where ``is_joining``, its calls are one for the caller, whose event has begun


def begin(
    pg: Group,
    backend: Backend,
    call: str,
    inputs: Sequence[torch.Tensor],
    record: tuple[Any, ...] | None = None,
    is_async: bool = False,
) -> hooks.Event | None:
    """Begin the event of a call, if anybody wants one. Ask ``hooks.is_profiled`` before.

    Inside an event that joins several calls, which has no record in the journal, theirs have no name.
    """
    title = f"{pg.asked_name or backend.name}:{call.removesuffix('_single')}"  # c10d's: that of the call on lists
    return hooks.record(None if getattr(THREAD, "is_joining", False) else title, inputs, record, is_async)


@contextmanager
def as_one(event: hooks.Event) -> Iterator[None]:
    """Let the calls made inside be this event, so that they leave none of their own; it ends here only if they fail."""
    THREAD.is_joining = True
    try:
        yield
    except BaseException:
        event.__exit__(None, None, None)
        raise
    finally:
        THREAD.is_joining = False
