"""Work of a message under way: an MPI request as c10d's Work."""

from __future__ import annotations

import threading
import time
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.communicator import described
from hpcdist.backends.mpi.probed import ProbedReceive
from hpcdist.core.backend import let_go
from hpcdist.core.errors import DistBackendError
from hpcdist.core.naps import nap
from hpcdist.core.work import Work
from stores.keep_alive import is_dropped

REUSED_UP_TO = 4  # Works kept, of which one is used again: no tensor is kept for more messages than that


class RequestWork(Work):
    """An MPI_Isend or MPI_Irecv under way; it holds the buffer until the request is complete."""

    __slots__ = ("_buffer", "_reason", "_request", "_status", "_turn", "_when_done")

    _buffer: torch.Tensor | None
    _reason: str | None  # why it was cancelled
    _request: MPI.Request | ProbedReceive
    _when_done: Callable[[], None] | None

    def __init__(self) -> None:
        Work.__init__(self, [])
        self._status = MPI.Status()
        self._turn = allocate_lock()  # one thread at a time may complete a request (MPI 11.6.2)

    def _carry_out(self) -> bool:
        """Complete the request, if this is the only wait on the group, as ``_await`` and ``_block`` do."""
        call, turn = self._call, self._turn
        if call is not None and (journal := call[0]).current is None and turn.acquire(False):
            self._limit = None
            journal.current, journal.waited = call, self
            try:
                if not self._done:
                    self._complete(self._request.Wait)
            finally:
                turn.release()
                journal.current = journal.waited = None
        return self._done

    def _block(self, seconds: float | None) -> bool:
        if seconds is None:
            with self._turn:
                if not self._done:
                    self._complete(self._request.Wait)
            return True
        began = time.monotonic()
        while not self.is_completed():
            if (waited := time.monotonic() - began) >= seconds:
                return False
            nap(waited)
        return True

    def _poll(self) -> None:
        if self._turn.acquire(False):
            try:
                if not self._done:
                    self._complete(self._request.Test)
            finally:
                self._turn.release()

    def _interrupt(self, reason: str) -> bool:
        """Cancel a receive, which ends its wait (MPI 3.8.4); a send cannot be taken back."""
        if not self._result:
            return False
        self._reason = reason
        self._request.Cancel()
        return True

    def _complete(self, call: Callable[..., bool]) -> None:
        error: DistBackendError | None = None
        try:
            if not call(self._status):
                return
            if self._reason is not None and self._status.Is_cancelled():
                error = DistBackendError(self._reason)
            elif self._when_done is not None:
                self._when_done()
        except MPI.Exception as failure:
            error = DistBackendError(f"message failed in MPI: {described(failure)}")
            error.__cause__ = failure
        self._buffer = self._when_done = None
        self._error, self._done = error, True  # ``_finish`` without a call
        if self._is_asked:
            self._tell()

    def _pursue(self) -> None:
        threading.Thread(target=self._block, args=(None,), name="hpcdist-message", daemon=True).start()

    def source_rank(self) -> int:
        """Return the sender of a receive, as a rank of the group; the Work must have ended."""
        if not self._result:
            return super().source_rank()
        self.wait()
        return self._status.Get_source()


def begun(
    works: deque[Any],
    request: MPI.Request | ProbedReceive,
    tensor: torch.Tensor,
    result: list[torch.Tensor],
    finish: Callable[[], None] | None = None,
) -> RequestWork:
    """Return the Work of a message, kept until it has ended: the oldest one, if nobody has it any more, or a new one.

    To make a Work and to drop it takes 1 µs.

    Args:
        works: those that are kept.
        request: MPI's, or in place of it.
        tensor: the memory.
        result: the tensor, of a receive; nothing, of a send.
        finish: what follows when the message has arrived.
    """
    work: RequestWork | None = None
    if works and (oldest := works[0])._done and len(works) <= REUSED_UP_TO:
        try:
            works.remove(oldest)
            if is_dropped(oldest) and not oldest.__dict__:
                work = oldest
        except ValueError:  # another thread has come before
            pass
    else:
        let_go(works)
    if work is None:
        work = RequestWork()
    work._request, work._buffer, work._result, work._when_done = request, tensor, result, finish
    work._done, work._call, work._error, work._reason = False, None, None, None
    works.append(work)
    return work
