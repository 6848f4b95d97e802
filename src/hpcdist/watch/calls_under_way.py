"""Calls that this rank is in now, and the line of the user's code that made each.

They are looked up only when somebody asks, from the threads' frames: a call pays nothing for it.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
import threading
import time
from _thread import get_ident
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import CodeType, FrameType
from typing import Any

import torch

from hpcdist.core.backend import Backend
from hpcdist.core.group import Group, label
from hpcdist.core.journal import CallRecord
from hpcdist.core.queue import QueuedWork
from hpcdist.core.work import Work
from hpcdist.core.world import WORLD

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOREIGN = (
    os.path.dirname(torch.__file__) + os.sep,
    f"{os.sep}mpi4py{os.sep}",
    f"-packages{os.sep}nccl{os.sep}",  # nccl4py
    f"-packages{os.sep}hpcdist_autoload.py",  # ours, and not beside the package in an editable installation
    contextlib.__file__,
    threading.__file__,
)
DESTROY = "destroy_process_group"
MAKING = "create_group"  # by its members only
REMAKING = ("shrink_group",)  # the remaining ranks make a communicator without the others
LOOKING = threading.RLock()  # held while frames of other threads are read; a signal's handler may read them too

CodeLine = tuple[CodeType, int]  # a function and a line of it


class State(Enum):
    """How far the watch over a call has come (``escalation``)."""

    RUNNING = ""
    DUE = "due"  # past its limit; this rank waits for its turn to ask, or for another one's report
    ASKING = "asking"
    ENDING = "reported"


@dataclass(eq=False)
class UnderWay:
    """A call that has begun and not ended, and how far the watch over it has come; it does not keep tensors.

    Between two looks it keeps neither the group nor the backend: the program may drop them meanwhile.
    """

    group: Group
    record: Any  # the call's, as the journal keeps it: the same object as long as the call is under way
    backend: Backend
    thread: int = 0  # the identifier of the one that it blocks; 0 if a worker thread or a device is at it
    limit: float | None = None  # the seconds after which it ends by itself, if it has a limit of its own
    first_seen: float = field(default_factory=time.monotonic)
    state: State = State.RUNNING
    since: float = 0.0  # when it became due
    ways: Iterator[float] = field(default_factory=lambda: iter(()))  # to end its wait, and the seconds that each gets
    next_at: float = math.inf  # when the next of them is due

    @property
    def in_background(self) -> bool:
        return self.thread == 0

    @property
    def call(self) -> CallRecord:
        return CallRecord(*self.record)

    @property
    def timeout(self) -> float:
        """The seconds that it may take: its own, or the group's."""
        own = self.call.limit
        return self.group.timeout.total_seconds() if own is None else own

    @property
    def work(self) -> Work | None:
        """The Work of a call that a worker thread or a device is at, or of the wait that blocks."""
        works = [each.work for each in self.group.journal.blocked() if each.call is self.record]
        if self.in_background:
            queue = self.backend.queue
            works = [None if queue is None else queue.running, self.backend.outstanding()]
        return next((each for each in works if each is not None and each._call is self.record), None)

    def takes_part(self, rank: int) -> bool:
        """Tell whether a rank of the world takes part in it, or may."""
        group = self.group
        return any(rank in ranks for ranks in (group.making if self.call.name == MAKING else [group.ranks]))

    def described(self) -> dict[str, Any]:
        """Return it as answers to other ranks hold it."""
        group, call = self.group, self.call
        return {
            "group": group.group_name,
            "label": label(group),
            "name": call.name,
            "number": call.number,
            "message": call.is_message,
            "peer": group.ranks[call.root] if call.is_message and call.root is not None else None,
            "root": group.ranks[call.root] if not call.is_message and call.root is not None else None,
            "shape": None if call.shape is None else list(call.shape),
            "dtype": "" if call.dtype is None else str(call.dtype).removeprefix("torch."),
            "seconds": round(time.monotonic() - self.first_seen, 1),
            "where": line_in(self.thread),
            "background": self.in_background,
            "state": self.state.value,
        }

    def release(self) -> None:
        """Keep no group until the next look."""
        for name in ("group", "backend"):
            self.__dict__.pop(name, None)

    def is_own(self) -> bool:
        """Tell whether the thread that asks carries it out."""
        queue = self.backend.queue if self.in_background else None
        return get_ident() == (self.thread if queue is None else queue.carrier)

    def has_ended(self) -> bool:
        return all(each.record is not self.record for each in under_way())

    def is_due(self, now: float, limit: float) -> bool:
        """Tell whether the call has taken longer than it may, and nobody has asked about it yet."""
        if self.state is State.RUNNING and now - self.first_seen >= limit:
            self.make_due(now)
        return self.state is State.DUE

    def make_due(self, now: float) -> None:
        """Wait for the turn to ask about the call, or for another rank's report."""
        self.state, self.since = State.DUE, now


def under_way(seen: Iterable[UnderWay] = ()) -> list[UnderWay]:
    """Return the calls that block now on each group; those that were seen before are the same objects."""
    known, found = {id(each.record): each for each in seen}, dict[int, UnderWay]()
    for made in blocking():
        each = found[id(made.record)] = known.get(id(made.record), made)
        each.group, each.backend, each.thread, each.limit = made.group, made.backend, made.thread, made.limit
    return list(found.values())


def blocking() -> Iterator[UnderWay]:
    """Yield the calls that block now on each group: this rank's own, its worker threads', and its devices'.

    The end of a group waits for its devices. It is left out while one of them has a call, because to end that call
    ends the wait, and MPI's part of the end could not be taken out of it.
    """
    for group in WORLD.watched():
        blocked = group.journal.blocked()
        backends = group.in_use()
        for backend in backends:
            running = backend.queue.running if backend.queue is not None else None
            if running is not None and running._call is not None and not running._done:
                yield UnderWay(group, running._call, backend)
            if (outstanding := backend.outstanding()) is not None and outstanding._call is not None:
                yield UnderWay(group, outstanding._call, backend)
                blocked = [each for each in blocked if each.call is not outstanding._call and each.call[2] != DESTROY]
        first = group.cpu if group.cpu is not None else next(iter(backends), None)
        for each in blocked:
            if first is not None and not isinstance(each.work, QueuedWork):
                yield UnderWay(group, each.call, first, each.thread, each.limit)


def code_lines(frame: FrameType | None) -> Iterator[CodeLine]:
    """Yield the line of a frame, and that of each frame that it was called from, the innermost first."""
    while frame is not None:
        yield frame.f_code, frame.f_lineno
        frame = frame.f_back


def is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGE)


def is_users(code: CodeType) -> bool:
    name = code.co_filename
    return not is_ours(code) and not any(part in name for part in FOREIGN) and not name.startswith("<")


def users_line(stack: Iterable[CodeLine]) -> CodeLine | None:
    """Return the innermost line of the user's code."""
    outermost = None
    for outermost in stack:
        if is_users(outermost[0]):
            break
    return outermost


def stack_of(thread: int) -> list[CodeLine]:
    """Return the stack of a thread, innermost first: by its identifier, or the main thread's if that has ended.

    No garbage is collected meanwhile. A collection runs Python code (that of ``stores.keep_alive``, for one), and so
    releases the GIL. Up to Python 3.11 one may begin whenever an object is made: in the middle of
    ``sys._current_frames``, which then deadlocks (https://github.com/python/cpython/issues/106883), and of ``f_back``
    and ``f_locals``, which crash if the other thread has left the frame by then.
    """
    with LOOKING:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            frames = sys._current_frames()
            return list(code_lines(frames.get(thread) or frames.get(threading.main_thread().ident or 0)))
        finally:
            if was_enabled:
                gc.enable()


def text_of(line: CodeLine | None) -> str:
    """Return a line as ``file.py:88 (function)``."""
    if line is None:
        return "unknown"
    code, number = line
    return f"{os.path.basename(code.co_filename)}:{number} ({code.co_name})"


def caller() -> str:
    """Return the line of the user's code that this thread is in, or the main thread, for a thread of a library's."""
    line = users_line(code_lines(sys._getframe(1)))
    return text_of(line) if line is not None and is_users(line[0]) else line_in()


def line_in(thread: int = 0) -> str:
    """Return the line of the user's code where a thread is, or the main thread, as ``stack_of``."""
    return text_of(users_line(stack_of(thread)))


def stack(thread: int = 0) -> list[dict[str, Any]]:
    """Return the stack of a thread, as ``stack_of``, in the form of torch's traces."""
    return [
        {"name": code.co_name, "filename": code.co_filename, "line": number}
        for code, number in stack_of(thread)
        if not is_ours(code)
    ]
