"""Work of a message under way: an MPI request as c10d's Work."""

from __future__ import annotations

import threading
from _thread import allocate_lock
from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.datatypes import BYTE
from hpcdist.backends.mpi.process import ulfm
from hpcdist.backends.mpi.progress import PROGRESS
from hpcdist.backends.mpi.receives import MatchedReceive
from hpcdist.core.errors import DistBackendError
from hpcdist.core.waiting import wait_until
from hpcdist.core.work import Work, init_torch_work


class RequestWork(Work):
    """An MPI_Isend or MPI_Irecv under way; it holds the buffer until the request is complete.

    The result is a receive's tensor, empty of a send; ``finish`` follows when the message has arrived.
    """

    __slots__ = ("_buffer", "_communicator", "_request", "_status", "_turn", "_when_done")

    _has_ended = False  # though nobody has completed the request
    _is_driven = False  # by the progress thread, which has the turn meanwhile
    _reason: str | None = None  # why it was cancelled

    def __init__(
        self,
        communicator: Communicator,
        request: MPI.Request | MatchedReceive,
        buffer: torch.Tensor,
        result: list[torch.Tensor],
        finish: Callable[[], None] | None = None,
    ) -> None:
        init_torch_work(self)  # and what ``Work.__init__`` sets, at once for latency
        self._result, self._call = result, None
        self._done, self._error = False, None
        self._communicator = communicator
        self._request = request
        self._buffer: torch.Tensor | None = buffer
        self._when_done = finish
        self._status: Any = MPI.Status() if result else None  # of a receive
        self._turn = allocate_lock()  # one thread at a time may complete a request (MPI 11.6.2)
        communicator.unfinished.hold(self)
        if PROGRESS.is_asleep:
            PROGRESS.wake()

    def _carry_out(self) -> bool:
        """Complete the request, if no other thread blocks on the group, as ``_await`` and ``_block`` do."""
        call, turn = self._call, self._turn
        if call is None or not turn.acquire(False):
            return self._done
        try:
            if not self._done:
                call[0].run(call, self._complete, self._request.Wait, self)
        finally:
            turn.release()
        return self._done

    def _block(self, seconds: float | None) -> bool:
        if seconds is None:
            with self._turn:
                if not self._done:
                    self._complete(self._request.Wait)
            return True
        return wait_until(self.is_completed, seconds)

    def _poll(self) -> None:
        if self._turn.acquire(self._is_driven):  # not if another thread waits
            try:
                if not self._done:
                    self._complete(self._request.Test)
            finally:
                self._turn.release()

    def _is_under_way(self) -> bool:
        """Tell whether the message is under way; drives MPI, and completes nothing (MPI_Request_get_status, 3.7.6)."""
        if self._has_ended:
            return False
        if not self._turn.acquire(False):  # another thread waits for it, in MPI
            return True
        self._is_driven = True
        try:
            self._has_ended = self._done or self._request.Get_status()
        except MPI.Exception:  # raised again for who waits
            self._has_ended = True
        finally:
            self._is_driven = False
            self._turn.release()
        return not self._has_ended

    def _interrupt(self, reason: str) -> bool:
        """Cancel a receive, which ends its wait (MPI 3.8.4), once: see ``Token``; a send cannot be taken back."""
        if not self._result:
            return False
        if self._reason is None:
            self._reason = reason
            self._request.Cancel()
        return True

    def _complete(self, call: Callable[..., bool]) -> None:
        communicator, buffer = self._communicator, self._buffer
        error: Exception | None = None
        try:
            if not call(self._status):
                return
            if self._reason is not None and self._status.Is_cancelled():
                error = DistBackendError(self._reason)
            elif self._result and self._status.Get_count(BYTE) > (nbytes := self._result[0].nbytes):
                error = communicator.too_long("irecv", self._status, nbytes)
            if error is None and self._when_done is not None:
                self._when_done()
        except MPI.Exception as failure:
            if self._result:
                error = communicator.failed_receive("irecv", failure, self._status, self._result[0].nbytes)
            else:
                error = communicator.failure("isend", failure)
            error.__cause__ = failure
            if isinstance(self._request, MPI.Request):
                ulfm.settle(self._request, buffer)
        self._buffer = self._when_done = None
        self._error = error  # ``_finish`` without a call
        if self._is_asked:
            self._end_event()
        self._done = True
        communicator.unfinished.pop(self, None)
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
