"""Queue of the asynchronous calls on one communicator, and their Work.

The first thread that comes carries a queued call out: a ``wait()`` that finds it not begun runs it, and all before it,
on the caller's own thread; otherwise the queue's worker thread does. To hand a call over to a thread takes 12 to 25 µs,
so the worker waits a moment before it takes a small call; for most of them ``wait()`` comes first.
"""

from __future__ import annotations

import threading
from _thread import allocate_lock, get_ident
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import is_grad_enabled, is_inference_mode_enabled

from hpcdist.core.errors import CallsDifferError, DistBackendError
from hpcdist.core.work import Work

LARGE_BYTES = 1 << 16  # from here on a call takes longer than to wake the worker, which is woken at once
SHORTEST_NAP = 50e-6  # seconds that the worker leaves a small call to a thread that waits for it
# between two looks of the worker while others carry all calls out: each costs them up to ten switches of threads,
# because torch's operators release the GIL for a moment, too short for the worker to take it
LONGEST_NAP = 4e-3
IDLE_NAP = 1e-3  # seconds between two looks without new calls
IDLE_LOOKS = 16  # at an unused queue, before the worker sleeps until it is woken
TURN_SECONDS = 0.01  # seconds between two tries to get a turn that only callbacks hold


class QueuedWork(Work):
    """A call in a queue, carried out by the first thread that comes."""

    __slots__ = ("_buffers", "_queue", "_run")

    _buffers: tuple[Any, ...]  # the arguments of ``_run``
    _queue: Queue
    _run: Callable[..., None] | None  # None once it has begun

    def __init__(
        self,
        queue: Queue,
        run: Callable[..., None],
        result: list[torch.Tensor],
        record: tuple[Any, ...] | None,
        buffers: tuple[Any, ...],
    ) -> None:
        self._result, self._call, self._queue, self._run, self._buffers = result, record, queue, run, buffers
        self._done, self._has_half, self._error = False, False, None

    def _carry_out(self) -> bool:
        """Carry out the calls up to this one on this thread, unless another thread has the queue's turn.

        A callback on the thread that has it may wait for a later call.
        """
        queue = self._queue
        has_come = queue._turn.acquire(False)
        if has_come:
            queue.carrier = get_ident()
        elif queue.carrier != get_ident():
            return self._done
        try:
            queue._steal(self)
        finally:
            if has_come:
                queue.carrier = None  # ``_end_turn`` without a call
                queue._turn.release()
                if queue._is_urgent and queue._calls:
                    queue._wake()
        return self._done

    def _tell(self) -> None:
        super()._tell()
        ended = self.__dict__.pop("_ended", None)
        if ended is not None:
            ended.release()

    def _block(self, seconds: float | None) -> bool:
        lock = allocate_lock()
        lock.acquire()
        ended = self.__dict__.setdefault("_lock", lock)
        if ended is lock:
            self._ask("_ended", lock)
        self._queue.hasten()
        if not ended.acquire(timeout=-1 if seconds is None else seconds):
            return False
        ended.release()
        return True

    def _poll(self) -> None:
        self._queue.hasten()

    def _pursue(self) -> None:
        self._queue.hasten()

    def _see(self) -> None:
        unseen = self._queue.unseen
        if unseen is not None and unseen is self._error:
            self._queue.see(unseen)


class Queue:
    """The asynchronous calls on one communicator, carried out one by one in the order in which they were made.

    The thread that carries calls out has the turn. The worker thread sleeps while the queue is not used, and the first
    call wakes it. From then on it looks at the queue now and then, and carries out calls that it has seen before; it is
    woken at once for a large call, a thread that blocks, and a future. It does not sleep while calls are queued.
    """

    def __init__(self, name: str) -> None:
        self._calls: deque[QueuedWork] = deque()
        self._turn = allocate_lock()
        self.carrier: int | None = None  # the thread that has the turn
        self._stolen: QueuedWork | None = None  # the call that a waiting thread carries out
        self._alarm = allocate_lock()  # released to wake the worker
        self._alarm.acquire()
        # the last small call, until the next one or the worker's next idle look: C++ drops the Python half of a Work
        # last, and ``keep_alive`` would have to keep it, for up to 6 µs
        self._latest: QueuedWork | None = None
        self._is_asleep = False
        self._is_used = False  # since the worker's last look
        self._begun = 0  # how many calls have been begun
        self._is_urgent = False  # whether the worker carries out at once the calls that it finds
        self._closing = False
        self.running: QueuedWork | None = None  # the call that the worker thread is in; not a waiting thread's
        self.broken: DistBackendError | None = None  # why the worker thread is given up
        self.unseen: CallsDifferError | None = None  # of a call in which ranks differ, until a caller has got it
        self._thread = threading.Thread(target=self._serve, name=f"hpcdist-{name}", daemon=True)
        self._thread.start()

    def put(
        self,
        run: Callable[..., None],
        result: list[torch.Tensor],
        is_large: bool = False,
        record: tuple[Any, ...] | None = None,
        buffers: tuple[Any, ...] = (),
    ) -> QueuedWork:
        """Queue a call on buffers, and return its Work, with this result; a large one wakes the worker at once.

        A call made by the callback of a future, on the thread that carries the calls out, follows at once: that is its
        place on ranks on which the future had ended before the callback was added. If ranks differ in an earlier call,
        and no caller has got that error yet, this one ends with it. Raises DistBackendError if an earlier call was
        given up.
        """
        self._latest = None
        work = QueuedWork(self, run, result, record, buffers)
        if self.carrier is not None and self.carrier == get_ident():
            self._follow(work)
            return work
        if self.broken is not None:
            raise self._given_up()
        self._calls.append(work)
        self._is_used = True
        if is_large:
            self.hasten()
            return work
        self._latest = work
        if self._is_asleep:
            self._wake()
        return work

    def drain(self) -> None:
        """Carry out or wait for all queued calls, so that a synchronous call keeps its place.

        Raises:
            CallsDifferError: that of a call that nobody has waited for.
        """
        self._latest = None
        if (self._calls or self._turn.locked()) and self.carrier != get_ident():
            self._clear()
        if self.broken is not None:  # the watchdog may have given the calls up meanwhile: their thread is still in one
            raise self._given_up()
        if self.unseen is not None:
            raise self.see(self.unseen)

    def close(self) -> None:
        """Carry out what is queued and end the thread.

        Raises:
            CallsDifferError: that of a call that nobody has waited for.
        """
        self._clear()
        self._closing = True
        self._wake()
        if get_ident() != self._thread.ident and self.broken is None:
            self._thread.join()
        if self.unseen is not None and self.broken is None:
            raise self.see(self.unseen)

    def hasten(self) -> None:
        """Let the worker carry out the queued calls as soon as it can have the turn."""
        if self.running is None:  # else it continues until the queue is empty
            self._is_urgent = True
            self._wake()

    def pending(self) -> list[QueuedWork]:
        """Return the calls that have not ended, the one under way first."""
        under_way = self.running if self.running is not None else self._stolen
        queued = list(self._calls)
        return queued if under_way is None else [under_way, *(work for work in queued if work is not under_way)]

    def fail(self, error: DistBackendError) -> None:
        """Give up the running call and all after it, so that their waits raise; the thread may never return."""
        self.broken = error
        for work in self.pending():
            work._finish(error)

    def see(self, unseen: CallsDifferError) -> CallsDifferError:
        """Return a difference, which the caller raises, and end all queued calls with it.

        Other ranks may have other calls behind the one that differs, and would match them with these.
        """
        for work in list(self._calls):
            work._finish(unseen)
        if self.unseen is unseen:
            self.unseen = None
        return unseen

    def _given_up(self) -> DistBackendError:
        return DistBackendError(f"this group can no longer be used: {self.broken}")

    def _wake(self) -> None:
        self._is_asleep = False
        with suppress(RuntimeError):  # woken already
            self._alarm.release()

    def _clear(self) -> None:
        """Carry out the queued calls, on this thread if it gets the turn; return when no call is under way."""
        if self.carrier == get_ident():
            self._steal()
            return
        seconds = 0.0
        while self.broken is None:
            if self._turn.acquire(timeout=seconds):
                self.carrier = get_ident()
                try:
                    self._steal()
                finally:
                    self._end_turn()
                return
            pending = self.pending()
            if pending and not pending[-1]._done:
                pending[-1]._block(None)
            else:
                seconds = TURN_SECONDS  # only a callback is under way

    def _end_turn(self) -> None:
        """Give the turn back, and wake the worker if it was asked to hurry."""
        self.carrier = None
        self._turn.release()
        if self._is_urgent and self._calls:
            self._wake()

    def _steal(self, last: QueuedWork | None = None) -> None:
        """Carry out the calls up to the last one, or all, on a thread that waits.

        They block it as synchronous calls do, so the journal records that.
        """
        calls, before = self._calls, self._stolen
        try:
            while calls and (last is None or not last._done):
                self._stolen = work = calls[0]
                calls.popleft()
                if (call := work._call) is None:
                    self._carry_out(work)
                    continue
                journal = call[0]
                if journal.current is not None or journal.further:
                    with journal.blocking(call):
                        self._carry_out(work)
                    continue
                journal.current = call, None, self.carrier, None  # ``Journal.run`` without its cost
                try:
                    self._carry_out(work)
                finally:
                    journal.current = None
        finally:
            self._stolen = before

    def _follow(self, work: QueuedWork) -> None:
        """Carry out at once a call of a callback on the thread that carries calls out, where the watchdog sees it."""
        if self.running is not None:  # the worker's thread
            before, self.running = self.running, work
            try:
                self._carry_out(work)
            finally:
                self.running = before
        elif work._call is not None:
            with work._call[0].blocking(work._call):
                self._carry_out(work)
        else:
            self._carry_out(work)

    def _carry_out(self, work: QueuedWork) -> None:
        """Run a call, and end its Work."""
        run, buffers = work._run, work._buffers
        work._run, work._buffers = None, ()
        self._begun += 1
        if run is None or work._done:  # given up
            return
        if self.unseen is not None:
            work._finish(self.unseen)
            return
        try:
            run(*buffers)
        except BaseException as error:
            del run, buffers  # the caller owns them again
            if isinstance(error, CallsDifferError):
                self.unseen = error
            work._finish(error)
            if not isinstance(error, Exception) and self.running is None:
                raise  # Ctrl-C, for the thread that waits
        else:
            del run, buffers
            if work._done or work._is_asked:
                work._finish()
                return
            work._done = True  # the same without a call, for latency
            if work._is_asked:
                work._tell()

    # -- the worker thread ---------------------------------------------------------------------------

    def _serve(self) -> None:
        seen = -1  # how many calls had been begun at the last look, if one was queued then
        nap, idle, gave_way = SHORTEST_NAP, 0, False
        while True:
            is_old = seen == self._begun or self._is_urgent or self._closing
            if self._calls and is_old and self._turn.acquire(False):
                self._carry_out_all()
                seen, nap, idle, gave_way = -1, SHORTEST_NAP, 0, False
                continue
            if self._calls:
                seen, idle = self._begun, 0
                # if other threads came for the calls that were left to them, it leaves them more time
                gave_way = not gave_way
                self._alarm.acquire(timeout=SHORTEST_NAP if gave_way else nap)
            elif self._closing:
                return
            else:
                seen, idle, gave_way = -1, 0 if self._is_used else idle + 1, False
                self._is_used = self._is_urgent = False
                self._latest = None
                if idle:
                    nap = min(nap, IDLE_NAP)
                if idle < IDLE_LOOKS:
                    self._alarm.acquire(timeout=nap)
                else:
                    self._is_asleep = True
                    if not self._calls and not self._closing:
                        self._alarm.acquire()
                    self._is_asleep = False
                    nap, idle = SHORTEST_NAP, 0
                    continue
            nap = min(2 * nap, LONGEST_NAP)

    def _carry_out_all(self) -> None:
        self.carrier = get_ident()
        self._is_urgent = False
        while self._calls:
            self.running = self._calls[0]
            self._calls.popleft()
            self._carry_out(self.running)
            self.running = None
        self.carrier = None
        self._turn.release()


def in_modes_of_caller(call: Callable[[], None]) -> Callable[[], None]:
    """Return a call that runs in this thread's modes of autograd wherever it is carried out.

    Writing to an inference tensor raises outside ``torch.inference_mode()``, and writing to a parameter outside
    ``torch.no_grad()``. Both modes belong to a thread.
    """
    modes = is_inference_mode_enabled(), is_grad_enabled()

    def run() -> None:
        if modes == (is_inference_mode_enabled(), is_grad_enabled()):
            call()
            return
        is_inference, has_grad = modes
        with torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad):
            call()

    return run
