"""Work of an asynchronous call, and the queue whose thread carries such calls out."""

from __future__ import annotations

import threading
from _thread import allocate_lock, get_ident
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import is_grad_enabled, is_inference_mode_enabled

from hpcdist.core import hooks
from hpcdist.core.errors import DistBackendError
from stores.keep_alive import KeptAlive

if TYPE_CHECKING:
    from hpcdist.core.hooks import Event

NO_TIMEOUT = timedelta(0)  # c10d: Work.wait() without a limit of its own


class Work(KeptAlive, torch.distributed.Work):
    """A collective or message under way; torch's Work, so that c10d code takes it as one and C++ may keep it.

    ``wait`` returns True when the buffers may be used, raises what the call raised, and may be called
    from any thread and more than once.
    """

    # what most never set stays with the class: a message's Work costs as much as its call to MPI
    _error: BaseException | None = None
    _done = False
    _future: torch.futures.Future | None = None
    _call: tuple[Any, ...] | None = None  # its record in the group's journal
    _limit: float | None = None  # seconds, of the wait under way where it has a limit of its own
    _event: Event | None = None

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result
        self._guard = allocate_lock()  # between finishing and asking for the future or the event's end

    # -- for the one who carries the call out --------------------------------------------------------

    def _finish(self, error: BaseException | None = None) -> None:
        with self._guard:
            self._error = error
            self._done = True
            future = self._future
            event, self._event = self._event, None
        if event is not None:
            event.__exit__(None, None, None)
        if future is not None:
            self._fulfil(future)

    def _ends(self, event: Event) -> None:
        """Let a profiler's event end when the call ends."""
        with self._guard:
            if not self._done:
                self._event = event
                return
        event.__exit__(None, None, None)

    def _fulfil(self, future: torch.futures.Future) -> None:
        if self._error is None:
            future.set_result(self._result)
        else:
            future.set_exception(self._error)

    def _block(self, seconds: float | None) -> bool:
        """Return True once the call has ended, False when the time is over first."""
        raise NotImplementedError

    def _await(self, seconds: float | None) -> bool:
        """Block as ``_block`` does, and let the group's journal say so meanwhile."""
        if self._call is None:
            return self._block(seconds)
        journal = self._call[0]
        self._limit = seconds
        journal.current, journal.waited = self._call, self
        try:
            return self._block(seconds)
        finally:
            journal.current = journal.waited = None

    def _interrupt(self, reason: str) -> bool:
        """Make a wait for this Work raise; return False where that cannot be done."""
        return False

    def _poll(self) -> None:
        """Notice, where nobody else does, that the call has ended."""

    # -- c10d's names --------------------------------------------------------------------------------

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until the buffers may be used.

        Args:
            timeout: the most to wait; zero stands for the group's own limit.

        Raises:
            DistBackendError: the time is over; the call itself goes on.
        """
        if not self._done:
            seconds = timeout.total_seconds() or None
            if not self._await(seconds):
                raise DistBackendError(
                    f"wait timeout after {(seconds or 0) * 1000:.0f}ms: the operation has not ended and is still under "
                    f"way. {hooks.explain(self._call)}".rstrip()
                )
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait, as c10d does for work on the CPU."""
        self.wait()

    def is_completed(self) -> bool:
        """Tell, without waiting, whether the call has ended."""
        if not self._done:
            self._poll()
        return self._done

    def is_success(self) -> bool:
        """Tell whether the call has ended without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return what the call raised, or None."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Wait and return the output tensors."""
        self.wait()
        return self._result

    def source_rank(self) -> int:
        """Return the sender of a receive, as a rank of the group."""
        raise RuntimeError("source_rank() is for the Work of a receive; this one is a collective or a send")

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future:
        """Return a future of the output tensors."""
        if self._future is None:
            future: torch.futures.Future = torch.futures.Future()
            with self._guard:
                self._future, done = future, self._done
            if done:
                self._fulfil(future)
            else:
                self._pursue()
        assert self._future is not None
        return self._future

    def _pursue(self) -> None:
        """See to it that a future asked for is fulfilled though nobody waits."""


class DoneWork(Work):
    """A call that had ended before its Work was made."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__(result)
        self._done = True


class QueuedWork(Work):
    """A call that a worker thread carries out."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__(result)
        self._ended = allocate_lock()
        self._ended.acquire()

    def _finish(self, error: BaseException | None = None) -> None:
        if not self._done:  # one that was given up may still end
            super()._finish(error)
            self._ended.release()

    def _block(self, seconds: float | None) -> bool:
        if not self._ended.acquire(timeout=-1 if seconds is None else seconds):
            return False
        self._ended.release()
        return True


class AllWork(Work):
    """Several calls that are waited for as one (c10d's coalesced calls)."""

    def __init__(self, works: list[Work], result: list[torch.Tensor]) -> None:
        super().__init__(result)
        self._works = works

    def _block(self, seconds: float | None) -> bool:
        limit = NO_TIMEOUT if seconds is None else timedelta(seconds=seconds)
        for work in self._works:
            work.wait(limit)
        self._finish()
        return True

    def _poll(self) -> None:
        if all(work.is_completed() for work in self._works):
            self._finish(next((e for work in self._works if (e := work.exception())), None))

    def _pursue(self) -> None:
        def ended(_: torch.futures.Future) -> None:
            if not self._done:
                self._poll()

        for work in self._works:
            work.get_future().add_done_callback(ended)


class Queue:
    """One worker thread that carries out the calls on one communicator in the order they were made."""

    def __init__(self, name: str) -> None:
        self._calls: deque[tuple[Callable[[], None], QueuedWork]] = deque()
        self._wake = threading.Condition()
        self._last: QueuedWork | None = None
        self._closing = False
        self.running: QueuedWork | None = None  # the call that the thread is in
        self.broken: DistBackendError | None = None  # why the thread is given up
        self._thread = threading.Thread(target=self._serve, name=f"hpcdist-{name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None], result: list[torch.Tensor]) -> Work:
        """Queue a call; ``result`` is what its Work will show.

        A call made by the callback of a future, on the worker thread, follows at once: that is its place on ranks
        where the future had ended before the callback was added, and nobody else could carry it out.
        """
        work = QueuedWork(result)
        if get_ident() == self._thread.ident:
            carry_out(call, work)
            return work
        call = in_modes_of_caller(call)
        with self._wake:
            if self.broken is not None:
                raise DistBackendError(f"this group can no longer be used: {self.broken}")
            self._calls.append((call, work))
            self._last = work
            self._wake.notify()
        return work

    def drain(self) -> None:
        """Wait until everything queued has ended, so that a synchronous call keeps its place."""
        last = self._last
        if last is not None and self.broken is None and threading.current_thread() is not self._thread:
            last._block(None)
            with self._wake:
                if last is self._last:
                    self._last = None  # its buffers belong to the caller again
        if self.broken is not None:  # also where the watchdog gave the calls up meanwhile: their thread is still in one
            raise DistBackendError(f"this group can no longer be used: {self.broken}")

    def close(self) -> None:
        """Carry out what is queued and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread and self.broken is None:
            self._thread.join()

    def pending(self) -> list[QueuedWork]:
        """Return the calls that have not ended, the running one first."""
        running = self.running
        return [*([running] if running is not None else []), *(work for _, work in list(self._calls))]

    def fail(self, error: DistBackendError) -> None:
        """Give the running call and all after it up, so that their waits raise; the thread may never return."""
        with self._wake:
            self.broken = error
            given_up = self.pending()
            self._calls.clear()
        for work in given_up:
            work._finish(error)

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not self._calls and not self._closing:
                    self._wake.wait()
                if not self._calls:
                    return
                call, work = self._calls.popleft()
                self.running = work
            carry_out(call, work)
            self.running = None
            del call, work  # the buffers belong to the caller again


def in_modes_of_caller(call: Callable[[], None]) -> Callable[[], None]:
    """Return a call that runs in this thread's modes of autograd wherever it is carried out.

    Writing to an inference tensor raises outside ``torch.inference_mode()``, and writing to a parameter outside
    ``torch.no_grad()``. Both modes belong to a thread.
    """
    is_inference = is_inference_mode_enabled()
    if not is_inference and is_grad_enabled():
        return call  # as any thread begins

    def run() -> None:
        with torch.inference_mode() if is_inference else torch.no_grad():
            call()

    return run


def carry_out(call: Callable[[], None], work: QueuedWork) -> None:
    """Run a call and end its Work."""
    try:
        call()
    except BaseException as error:
        work._finish(error)
    else:
        work._finish()
