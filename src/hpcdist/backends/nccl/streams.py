"""On which CUDA stream does a call run, and what does waiting for it mean? c10d's stream semantics.

A synchronous call is queued on the current stream, where it is in order with the kernels around it. An
asynchronous one runs on a side stream of its communicator, after what the current stream holds at that moment;
``wait()`` makes the stream that is then current wait, not the host. The host waits only where c10d's does: for a
barrier, and where ``wait`` is given a limit.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch

from hpcdist.core.errors import DistBackendError
from hpcdist.core.journal import RING
from hpcdist.core.work import NO_TIMEOUT, Work

SHORTEST_NAP, LONGEST_NAP = 20e-6, 2e-3  # seconds between two looks at an event while a limit runs


class Streams:
    """The side stream of one communicator, and its place among the caller's streams."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.device = device
        self.cuda = cuda
        self.side = cuda.Stream(device)
        self._before = cuda.Event()
        self.interrupt: Callable[[str], bool] = cannot  # ends the communicator, and every Work on it
        self._last = cuda.Event()  # behind the latest synchronous call
        self._last_call: Any = None  # its record
        self._mark: EventWork | None = None  # the synchronous calls until some moment, while the device is at them
        self.under_way: deque[StreamWork] = deque()
        self._guard = threading.Lock()  # the watchdog looks at them too

    def current(self) -> Any:
        """Return the stream that is current on the communicator's device."""
        return self.cuda.current_stream(self.device)

    def fork(self) -> Any:
        """Make the side stream wait for what the current stream holds now; return the current stream."""
        current = self.current()
        self._before.record(current)
        self.side.wait_event(self._before)
        return current

    def on_side(self) -> AbstractContextManager[Any]:
        """Make the side stream the current one."""
        return self.cuda.stream(self.side)

    def record_end(self) -> Any:
        """Return an event behind everything on the side stream."""
        event = self.cuda.Event()
        event.record(self.side)
        return event

    def keep(self, work: StreamWork) -> StreamWork:
        """Hold a Work, and with it its buffers, until the device is through, though the caller may drop it.

        Inside a graph's capture nothing runs yet and events cannot be asked; the caller's Work holds the buffers.
        """
        if self.cuda.is_current_stream_capturing():
            return work
        with self._guard:
            self._sweep()
            self.under_way.append(work)
        return work

    def _sweep(self) -> None:
        while self.under_way and self.under_way[0].is_completed():
            self.under_way.popleft()

    def fail_all(self, error: BaseException) -> None:
        """End every Work that is under way with an error: the communicator was aborted."""
        with self._guard:
            while self.under_way:
                self.under_way.popleft().fail(error)

    def mark(self, current: Any) -> None:
        """Note that the synchronous call recorded last was queued, so that ``oldest`` can tell whether it has ended."""
        if not self.cuda.is_current_stream_capturing():
            self._last.record(current)
            self._last_call = RING.last()

    def oldest(self) -> Work | None:
        """Return the first call that the device is not through with; any thread may ask.

        Synchronous calls have no Work. One stands for all of them until now, and the event behind it is not recorded
        again: a program that goes on to queue calls behind one that hangs must not hide it.
        """
        if self._mark is None or self._mark.is_completed():
            mark = EventWork([], self._last)
            mark._call = self._last_call
            self._mark = None if mark.is_completed() else mark
            if self._mark is not None:
                self._last = self.cuda.Event()
        with self._guard:
            self._sweep()
            return self.under_way[0] if self.under_way else self._mark


class EventWork(Work):
    """What a stream held at some moment; done when the device has come to the event behind it."""

    def __init__(self, result: list[torch.Tensor], end: Any) -> None:
        super().__init__(result)
        self._end = end

    def _poll(self) -> None:
        try:
            ended = self._end is not None and self._end.query()
        except RuntimeError as error:  # the device has failed, and all that it held with it
            self._finish(DistBackendError(f"the device failed before this call had ended: {error}"))
            return
        if ended:
            self._finish()


class StreamWork(EventWork):
    """A call on a side stream.

    It is *launched* once it is queued on the device, which inside a group call is at the group's end.
    """

    def __init__(
        self,
        streams: Streams,
        begun_on: Any,
        result: list[torch.Tensor],
        buffers: list[torch.Tensor],
        source: int | None = None,
        is_barrier: bool = False,
    ) -> None:
        super().__init__(result, None)
        self._streams = streams
        self._buffers = buffers  # not to be freed while the side stream uses them
        self._source = source
        self._is_barrier = is_barrier
        self._begun_on = begun_on

    def launched(self, end: Any) -> None:
        """Take the event that ends the call."""
        self._end = end

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        if not self._done:
            self._finish(error)

    def _finish(self, error: BaseException | None = None) -> None:
        self._buffers = []
        super()._finish(error)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Make the current stream wait for the call; with a limit, or for a barrier, the host too.

        Raises:
            DistBackendError: the time is over, or the communicator was aborted.
        """
        if self._error is not None:
            raise self._error
        if self._end is None:
            raise DistBackendError(
                "wait() inside a group call: the operation begins when the coalescing manager or "
                "batch_isend_irecv ends, so wait after it"
            )
        current = self._streams.current()
        current.wait_event(self._end)
        if current != self._begun_on:  # this stream's later use is not in the allocator's books
            for tensor in self._buffers:
                tensor.record_stream(self._streams.side)
        self._buffers = []
        seconds = timeout.total_seconds()
        if seconds > 0:
            if not self._block(seconds):
                raise DistBackendError(
                    f"wait timeout after {seconds * 1000:.0f}ms: the operation has not ended and is still under way"
                )
        elif self._is_barrier:
            current.synchronize()
            if self._error is not None:  # the watchdog has ended it
                raise self._error
        return True

    def synchronize(self) -> None:
        """Make the current stream wait."""
        self.wait()

    def _block(self, seconds: float | None) -> bool:
        deadline = None if seconds is None else time.monotonic() + seconds
        nap = SHORTEST_NAP
        while not self.is_completed():
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP)
        if self._error is not None:
            raise self._error
        return True

    def _interrupt(self, reason: str) -> bool:
        """End the communicator, and with it this call."""
        return self._streams.interrupt(reason)

    def _fulfil(self, future: torch.futures.Future) -> None:
        """Do nothing: the future was fulfilled when it was asked for."""

    def result(self) -> list[torch.Tensor]:
        """Make the current stream wait and return the output tensors."""
        self.wait()
        return self._result

    def source_rank(self) -> int:
        """Return the sender of a receive."""
        return super().source_rank() if self._source is None else self._source

    def get_future(self) -> torch.futures.Future:
        """Return a future that is fulfilled at once, and whose waiters' streams wait: torch's CUDA future."""
        if self._future is None:
            if self._end is None:
                raise DistBackendError("get_future() inside a group call: ask after it has ended")
            devices: list[int | str | torch.device] = (
                [self._streams.device] if self._streams.device.type == "cuda" else []
            )
            future: torch.futures.Future = torch.futures.Future(devices=devices)
            with self._streams.on_side():  # the future's own event goes behind the call
                if self._error is None:
                    future.set_result(self._result)
                else:
                    future.set_exception(self._error)
            self._future = future
        return self._future


def cannot(reason: str) -> bool:
    """Stand for a communicator that nobody has said how to end."""
    return False


class Batch:
    """The calls held back inside a group call, to be launched as one."""

    def __init__(self) -> None:
        self.calls: list[tuple[Streams, Callable[[int], None], Callable[[], None] | None, StreamWork]] = []

    def add(
        self,
        streams: Streams,
        call: Callable[[int], None],
        finish: Callable[[], None] | None,
        work: StreamWork,
    ) -> StreamWork:
        """Hold a call back; ``call`` takes the handle of the stream to run on."""
        self.calls.append((streams, call, finish, work))
        return work

    def launch(self, group: Callable[[], AbstractContextManager[Any]]) -> None:
        """Queue all calls on the device in one group."""
        every = dict.fromkeys(streams for streams, *_ in self.calls)
        for streams in every:
            streams.fork()
        with group():
            for streams, call, _, _ in self.calls:
                call(streams.side.cuda_stream)
        for streams, _, finish, _ in self.calls:
            if finish is not None:
                with streams.on_side():
                    finish()
        ends = {streams: streams.record_end() for streams in every}
        for streams, _, _, work in self.calls:
            work.launched(ends[streams])
            streams.keep(work)
