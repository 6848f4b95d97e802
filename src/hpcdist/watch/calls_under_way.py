"""Calls that this rank is in now, and the line of the user's code that made each.

They are looked up only when somebody asks, from the threads' frames: a call pays nothing for it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from _thread import get_ident
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from hpcdist.core.backend import Backend
from hpcdist.core.group import Group
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
LOOKING = threading.RLock()  # held while frames of other threads are read; a signal's handler may read them too

CodeLine = tuple[CodeType, int]  # a function and a line of it


class UnderWay(NamedTuple):
    """A call that has begun and not ended."""

    group: Group
    record: Any  # the call's, as the journal keeps it: the same object as long as the call is under way
    backend: Backend
    work: Work | None  # of a call that a worker thread or a device is at, or of the wait that blocks
    in_background: bool
    thread: int = 0  # the identifier of the one that it blocks; 0 if a worker or a device is at it
    limit: float | None = None  # the seconds after which it ends by itself, if it has a limit of its own

    @property
    def call(self) -> CallRecord:
        return CallRecord(*self.record)

    @property
    def timeout(self) -> float:
        """The seconds that it may take: its own, or the group's."""
        own = self.call.limit
        return self.group.timeout.total_seconds() if own is None else own

    def is_own(self) -> bool:
        """Tell whether the thread that asks carries it out."""
        queue = self.backend.queue if self.in_background else None
        return get_ident() == (self.thread if queue is None else queue.carrier)

    def has_ended(self) -> bool:
        if self.work is None or not self.in_background:
            return all(each.call is not self.record for each in self.group.journal.blocked())
        self.backend.outstanding()  # asks the device
        return self.work.is_completed()


def under_way() -> Iterator[UnderWay]:
    """Return the calls that block now on each group: this rank's own, its worker threads', and its devices'.

    The end of a group waits for its devices. It is left out while one of them has a call, because to end that call
    ends the wait, and MPI's part of the end could not be taken out of it.
    """
    for group in WORLD.watched():
        blocked = group.journal.blocked()
        left = group.left if group.is_watched else []
        backends = dict.fromkeys(list(group.backends.values()) or left)
        for backend in backends:
            running = backend.queue.running if backend.queue is not None else None
            if running is not None and running._call is not None and not running._done:
                yield UnderWay(group, running._call, backend, running, True)
            if (outstanding := backend.outstanding()) is not None and outstanding._call is not None:
                yield UnderWay(group, outstanding._call, backend, outstanding, True)
                blocked = [each for each in blocked if each.call is not outstanding._call and each.call[2] != DESTROY]
        first = group.cpu if group.cpu is not None else next(iter(backends), None)
        for each in blocked:
            if first is not None and not isinstance(each.work, QueuedWork):
                yield UnderWay(group, each.call, first, each.work, False, each.thread, each.limit)


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


def stack_of(thread: int = 0) -> list[CodeLine]:
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
