"""Events of our calls in torch's profiler.

====================================================  ==================================================  ==============
what                                                  why                                                 checked
====================================================  ==================================================  ==============
``autograd.profiler._is_profiler_enabled``            whether a profiler runs                             2.13.0
``autograd._record_function_with_args_enter``,        asynchronous events of a profiler, with shapes      2.13.0, 2.15.0
``ops.profiler._call_end_callbacks_on_jit_fut``,
``_C._distributed_c10d._get_comm_profiling_name``
====================================================  ==================================================  ==============
"""

from __future__ import annotations

import threading
from _thread import get_ident
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch._C._distributed_c10d as bindings
import torch.distributed as dist
from torch.autograd import profiler

from hpcdist.core import hooks
from hpcdist.torch_bridge.features import has

autograd: Any = torch.autograd
ENDER = ThreadPoolExecutor(1, "hpcdist-profiler")  # starts its thread at the first profiled call
NAMING = threading.local()  # the ``name`` that ``record_comm`` has set in this thread, for a torch without it


@contextmanager
def record_comm(name: str) -> Iterator[None]:
    """Name the calls of this thread in the profiler's events (c10d's since torch 2.12)."""
    before, NAMING.name = comm_name(), name
    try:
        yield
    finally:
        NAMING.name = before


def comm_name() -> str:
    """Return the name that ``record_comm`` has set in this thread, or an empty text."""
    return getattr(NAMING, "name", "")


if has("`record_comm`"):
    record_comm, comm_name = dist.record_comm, bindings._get_comm_profiling_name


class AsynchronousEvent:
    """A profiler's event that ends on another thread than its begin, which makes it asynchronous for torch.

    c10d's own are so, for synchronous calls too. On a thread that it does not profile, the profiler records an end only
    if it runs in the callback of a future.
    """

    def __init__(self, name: str, inputs: Sequence[torch.Tensor]) -> None:
        self._end: torch.futures.Future[None] = torch.futures.Future()
        self._thread = get_ident()
        handle = autograd._record_function_with_args_enter(name, *inputs)
        torch.ops.profiler._call_end_callbacks_on_jit_fut(handle, self._end)

    def __exit__(self, *_: object) -> None:
        """End it, on this thread or, if it began here, on another one."""
        if get_ident() == self._thread:
            ENDER.submit(self._end.set_result, None).result()
        else:
            self._end.set_result(None)


def record(
    name: str | None, inputs: Sequence[torch.Tensor], call: tuple[Any, ...] | None, is_async: bool
) -> hooks.Event | None:
    """Begin a profiler's event; ``record_comm``'s name goes before ours."""
    if name is None:
        return None
    return AsynchronousEvent(comm_name() or name, inputs)


# whether a profiler runs, by torch's variable in Python: a question to C++ costs 4 µs if the caches are cold
hooks.is_profiled = partial(getattr, profiler, "_is_profiler_enabled")
hooks.record = record
