"""Work of a message under way: an MPI request as c10d's Work."""

from __future__ import annotations

import threading
import time
from _thread import allocate_lock
from collections.abc import Callable

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.probed import ProbedReceive
from hpcdist.core.errors import DistBackendError
from hpcdist.core.naps import nap
from hpcdist.core.work import Work


class RequestWork(Work):
    """An MPI_Isend or MPI_Irecv under way; it holds the buffer until the request is complete."""

    __slots__ = ("_buffer", "_request", "_status", "_turn", "_when_done")

    _reason: str | None = None  # why it was cancelled

    def __init__(
        self,
        request: MPI.Request | ProbedReceive,
        tensor: torch.Tensor,
        result: list[torch.Tensor],
        finish: Callable[[], None] | None,
    ) -> None:
        Work.__init__(self, result)
        self._request = request
        self._buffer: torch.Tensor | None = tensor
        self._when_done = finish
        self._status = MPI.Status() if result else None  # a send has nothing to tell
        self._turn = allocate_lock()  # one thread at a time may complete a request (MPI 11.6.2)

    def _carry_out(self) -> bool:
        """Complete the request, if this is the only wait on the group, as ``_await`` and ``_block`` do."""
        call = self._call
        if call is not None and (journal := call[0]).current is None and self._turn.acquire(False):
            self._limit = None
            journal.current, journal.waited = call, self
            try:
                if not self._done:
                    self._complete(self._request.Wait)
            finally:
                self._turn.release()
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
            if self._reason is not None and self._status is not None and self._status.Is_cancelled():
                error = DistBackendError(self._reason)
            elif self._when_done is not None:
                self._when_done()
        except MPI.Exception as failure:
            error = DistBackendError(f"message failed in MPI: {failure.Get_error_string()}")
            error.__cause__ = failure
        self._buffer = self._when_done = None
        self._finish(error)

    def _pursue(self) -> None:
        threading.Thread(target=self._block, args=(None,), name="hpcdist-message", daemon=True).start()

    def source_rank(self) -> int:
        """Return the sender of a receive, as a rank of the group; the Work must have ended."""
        if not self._result:
            return super().source_rank()
        self.wait()
        assert self._status is not None
        return self._status.Get_source()
