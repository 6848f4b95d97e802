"""CUDA streams of a communicator, and the Works of the calls on them: c10d's stream semantics.

A synchronous call is queued on the current stream, in order with the kernels around it. An asynchronous one runs on a
side stream of its communicator, after the work that the current stream has at that moment; ``wait()`` makes the then
current stream wait, not the host. The host waits only in the same cases as c10d's: for a barrier, if ``wait`` has a
limit, and under ``TORCH_NCCL_BLOCKING_WAIT=1``.

**Lifetime of memory.** The device reads and writes memory long after the call that queued it has returned, and torch's
allocator gives the memory of a dropped tensor to the next one that is made on its stream. On the current stream that is
harmless, because all uses of the new tensor are queued behind the call. For the side stream ``PendingCall.keepalive``
keeps all memory that the call uses: the caller's tensors, their copies and products, and the copies back at the end. It
is released when the stream on which the call began waits for the call, since all later uses of the memory are behind
that wait, as after an abort; or when the host has seen the call's end. No other object holds or frees it: the Work of a
call also holds its outputs, and belongs to the caller, so the list of calls under way does not contain it.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import torch

from hpcdist.backends.nccl.variables import blocks_in_wait
from hpcdist.core.errors import DistBackendError
from hpcdist.core.hooks import Event
from hpcdist.core.journal import RING
from hpcdist.core.waiting import wait_until
from hpcdist.core.work import NO_TIMEOUT, Work

# calls between two searches for ended ones: to query an event costs 4 µs, with the switch to the device
# and past a capture, of the 14 µs of a call (bench --device cuda, async)
SWEEP_EVERY = 16
SWEEP_BYTES = 1 << 20  # or from one call with so much memory to the next, which takes longer than to query
ABORT_SECONDS = 5.0  # seconds that an abort waits for the device, if it must
# seconds to wait for the end of a communicator whose calls a graph has held: since NCCL 2.26 it ends when the
# last such graph does, which may be with the process
GRAPH_SECONDS = 1.0
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
HERE = nullcontext()


@cache
def capture_mode() -> Callable[[Any], int] | None:
    """Return the driver's function that exchanges a thread's capture mode; None if this torch is not built for CUDA."""
    return None if torch.version.cuda is None else ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode


@contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread query events inside although a graph is being captured, which a query would invalidate."""
    exchange, mode = capture_mode(), ctypes.c_int(RELAXED)
    if exchange is None:
        yield
        return
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


class Streams:
    """The side stream of one communicator, and its place among the caller's streams, which are those of ``cuda``.

    ``interrupt`` ends the communicator, and every Work on it. With a high priority kernels of the side stream come
    before others that wait for room on the GPU.
    """

    def __init__(
        self,
        device: torch.device,
        interrupt: Callable[[str], bool],
        cuda: Any,
        is_high_priority: bool = False,
    ) -> None:
        self.device = device
        self.cuda = cuda
        self.interrupt = interrupt
        self.side = cuda.Stream(device, priority=-1) if is_high_priority else cuda.Stream(device)
        # some releases of torch.xpu lack captures
        self.is_capturing: Callable[[], bool] = getattr(cuda, "is_current_stream_capturing", bool)
        # the reason of an abort: its calls have ended, but failed
        self.failure: DistBackendError | None = None
        self.is_told = False  # whether a Work has given it to a caller
        self.blocks_in_wait = blocks_in_wait()
        self._last = cuda.Event()  # behind the latest synchronous call
        self._last_call: Any = None  # its record
        self.is_in_graph = False  # whether a graph has captured calls
        self._mark: PendingCall | None = None  # the synchronous calls up to some moment, until the device has made them
        self.under_way: deque[PendingCall] = deque()
        self._guard = threading.Lock()  # of what is taken from under_way: the watchdog does so too
        self._unswept = 0  # calls since those that have ended were last looked for
        self._free_events: deque[Any] = deque()  # events whose calls have ended, to be recorded again
        # torch.cuda.current_stream makes a new object each time, 2 µs; this one is a lookup
        self._current = torch.accelerator.current_stream if cuda is torch.cuda else cuda.current_stream
        self._index = device.index
        self._known: dict[int, Any] = {}  # streams by id

    def current(self) -> Any:
        """Return the stream that is current on the communicator's device."""
        number = self._current(self._index).stream_id
        stream = self._known.get(number)
        if stream is None:
            stream = self._known[number] = self.cuda.current_stream(self.device)
        return stream

    def on_device(self) -> AbstractContextManager[Any]:
        """Put the thread on the communicator's device.

        NCCL's calls and queries of events start a context, some 500 MiB, on the device of the thread that makes them:
        GPU 0, if it has chosen none.
        """
        return HERE if self.cuda.current_device() == self._index else self.cuda.device(self.device)

    def event_behind(self, stream: Any) -> Any:
        """Return an event behind everything on a stream."""
        try:
            event = self._free_events.pop()
        except IndexError:
            event = self.cuda.Event()
        event.record(stream)
        return event

    def fork(self, stream: Any) -> None:
        """Make the side stream wait for the present work on a stream."""
        event = self.event_behind(stream)
        event.wait(self.side)
        self._free_events.append(event)  # a wait is for what was recorded before it

    @contextmanager
    def on_side(self) -> Iterator[None]:
        """Make the side stream the current one."""
        with self.on_device(), self.cuda.stream(self.side):
            yield

    @contextmanager
    def querying(self) -> Iterator[None]:
        """Query events inside, from any thread."""
        with self.on_device(), beside_captures():
            yield

    def keep(self, call: PendingCall) -> None:
        """Hold what a call touches until it has ended, though the caller may drop its Work; on the device.

        Inside a graph's capture nothing runs yet and events cannot be queried: the caller's Work holds the memory.
        """
        if self.is_capturing():
            call.is_captured = self.is_in_graph = True
            return
        self.under_way.append(call)
        if self.failure is not None:  # aborted meanwhile, after the calls under way were failed
            self.fail_all(self.failure)
        self._unswept += 1
        if self._unswept >= SWEEP_EVERY or call.nbytes >= SWEEP_BYTES:
            with self._guard, self.querying():
                self._sweep()

    def _sweep(self) -> None:
        """Release the calls that have ended, in order; the caller has the guard and may query events."""
        self._unswept = 0
        while self.under_way and self.under_way[0].look():
            call = self.under_way.popleft()
            if call.owns_end and call.error is None:
                self._free_events.append(call.end)

    def pending(self) -> list[Work]:
        """Return the asynchronous calls that the device has not ended; any thread may ask."""
        with self._guard, self.querying():
            self._sweep()
            # a copy: another thread may add calls meanwhile
            return [call.shown() for call in list(self.under_way) if not call.look()]

    def fail_all(self, error: DistBackendError) -> None:
        """End every call under way with an error: the communicator was aborted.

        The abort ends the kernels, but the device reaches the ends of the work behind them later.
        """
        with self._guard:
            while self.under_way:
                call = self.under_way.popleft()
                if call.keepalive:
                    self._free_behind(call)
                call.finish(error)

    def _free_behind(self, call: PendingCall) -> None:
        """Make the stream on which a call began wait for its end, and so the next users of its memory."""
        with suppress(RuntimeError), self.querying():  # the device has failed, and runs no more work
            with self.cuda.stream(call.begun_on):
                is_capturing = self.is_capturing()
            if not is_capturing:
                call.end.wait(call.begun_on)
                return
            # a capture cannot wait for earlier work, and the host must not wait forever
            wait_until(call.end.query, ABORT_SECONDS)

    def mark(self, current: Any) -> None:
        """Note that the synchronous call recorded last was queued, so that ``oldest`` can tell whether it has ended.

        The thread is on the device.
        """
        if self.is_capturing():
            self.is_in_graph = True
            return
        self._last.record(current)
        self._last_call = RING.last()

    def settle(self, name: str) -> None:
        """Wait on the host until the device has made the communicator's calls; for other streams only after a capture.

        DistBackendError while the current stream is captured into a graph; RuntimeError if the device has failed.
        """
        with self.on_device():
            if self.is_capturing():
                raise DistBackendError(
                    f"{name} waits for the device, and a CUDA graph is being captured on the current stream: do it "
                    "before or after the capture"
                )
            if self.is_in_graph:  # torch queues replays, on any stream, without our events behind them
                self.cuda.synchronize(self.device)
                return
            with self._guard:
                behind = [self._last, *([self._mark.end] if self._mark is not None else [])]
            self.side.synchronize()
            for event in behind:
                event.synchronize()

    def oldest(self) -> Work | None:
        """Return the first call that the device has not ended; any thread may ask.

        Synchronous calls have no Work. One object represents all of them until now, and its event is not recorded
        again: later calls of a program, behind one that hangs, must not hide it.
        """
        with self._guard, self.querying():
            if self._mark is None or self._mark.look():
                mark = PendingCall(self, None, (), 0, self._last, self._last_call)
                self._mark = None if mark.look() else mark
                if self._mark is not None:
                    self._last = self.cuda.Event()
            self._sweep()
            first = self.under_way[0] if self.under_way else self._mark
            return None if first is None else first.shown()


def oldest(of: Iterable[Streams]) -> Work | None:
    """Return the first call of some communicators that the device has not ended."""
    return next((work for streams in of if (work := streams.oldest()) is not None), None)


class PendingCall:
    """A call on a side stream, or the work of another stream until some moment, until the device has finished it.

    The caller's Work, which may not exist any more, and the watchdog share it.
    """

    __slots__ = (
        *("_shown", "begun_on", "call", "end", "error", "has_ended"),
        *("is_captured", "keepalive", "nbytes", "owns_end", "streams"),
    )

    def __init__(
        self,
        streams: Streams,
        begun_on: Any,
        keepalive: tuple[Any, ...],
        nbytes: int,
        end: Any = None,
        call: Any = None,
    ) -> None:
        self.streams = streams
        self.begun_on = begun_on  # the stream that was current at its begin
        self.keepalive = keepalive  # the memory that it uses, kept as described in this module
        self.nbytes = nbytes  # bytes of its larger buffer
        self.end = end  # the event behind it; None until it is queued, inside a group call at the group's end
        self.owns_end = True  # whether the event is its own, not shared by calls that were launched together
        self.call = RING.last() if call is None else call  # its record in the group's journal
        self.is_captured = False  # whether it is part of a CUDA graph, which may run any number of times: it never ends
        self.has_ended = False  # whether the host has seen its end, with or without an error
        self.error: BaseException | None = None
        self._shown: StreamWork | None = None

    def look(self) -> bool:
        """Tell whether the call has ended; this thread may query events."""
        if not self.has_ended and not self.is_captured and self.end is not None:
            try:
                if self.end.query():
                    self.finish(self.streams.failure)
            except RuntimeError as error:  # the device has failed, and all of its work with it
                self.finish(DistBackendError(f"the device failed before this call had ended: {error}"))
        return self.has_ended

    def finish(self, error: BaseException | None) -> None:
        """Record the end."""
        if not self.has_ended:  # a call that was given up may still end
            self.error, self.keepalive = error, ()
            self.has_ended = True

    def shown(self) -> StreamWork:
        """Return a Work of the call without its outputs, always the same, for the watchdog."""
        if self._shown is None:
            self._shown = StreamWork(self, [])
        return self._shown


class StreamWork(Work):
    """The Work of a call on a side stream."""

    def __init__(
        self, pending: PendingCall, result: list[torch.Tensor], source: int | None = None, is_barrier: bool = False
    ) -> None:
        super().__init__(result)
        self.pending = pending
        self._call = pending.call
        self._source = source
        self._is_barrier = is_barrier

    def _ends(self, event: Event) -> None:
        """End a profiler's event now, as c10d does: the profiler records the kernels themselves.

        The host may check the call only after the profiler has ended, and torch crashes on an event that ends so late.
        """
        event.__exit__(None, None, None)

    def _poll(self) -> None:
        pending = self.pending
        if not pending.has_ended:
            with pending.streams.querying():
                pending.look()
        if pending.has_ended:
            self._finish(pending.error)

    def exception(self) -> BaseException | None:
        """Return the error of the call, or None."""
        self.is_completed()
        return super().exception()

    def _see(self) -> None:
        streams, error = self.pending.streams, self.pending.error
        if error is not None and error is streams.failure:
            streams.is_told = True

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Make the current stream wait for the call; with a limit, or for a barrier, the host too."""
        pending, streams = self.pending, self.pending.streams
        if not pending.has_ended:
            current = self._block_stream()
            if timeout is not NO_TIMEOUT and timeout > NO_TIMEOUT:
                if not wait_until(self.is_completed, seconds := timeout.total_seconds()):
                    raise DistBackendError(
                        f"wait timeout after {seconds * 1000:.0f}ms: the operation has not ended and is still under way"
                    )
            elif self._is_barrier or streams.blocks_in_wait:
                current.synchronize()
            failure = streams.failure
            if failure is not None and not pending.has_ended:  # during an abort, which ends its kernel first
                streams.is_told = True
                raise failure
        if pending.error is not None:
            self._see()
            raise pending.error
        return True

    def _block_stream(self) -> Any:
        """Make the current stream wait for the call, and return it."""
        pending = self.pending
        if pending.end is None:
            raise DistBackendError(
                "wait() inside a group call: the operation begins when the coalescing manager or "
                "batch_isend_irecv ends, so wait after it"
            )
        current = pending.streams.current()
        pending.end.wait(current)
        if current is pending.begun_on:
            pending.keepalive = ()  # another stream's wait does not order the first stream's later uses of the memory
        return current

    def block_current_stream(self) -> None:
        """Make the current stream wait for the call; the host does not wait, not even for a barrier."""
        if not self.pending.has_ended:
            self._block_stream()

    def _interrupt(self, reason: str) -> bool:
        """End the communicator, and with it this call."""
        return self.pending.streams.interrupt(reason)

    def source_rank(self) -> int:
        """Return the sender of a receive."""
        return super().source_rank() if self._source is None else self._source

    def get_future(self) -> torch.futures.Future:
        """Return torch's CUDA future: it is fulfilled at once, and the streams of its waiters wait for the call."""
        if self._future is None:
            if self.pending.end is None:
                raise DistBackendError("get_future() inside a group call: ask after it has ended")
            if self.pending.has_ended:
                self._poll()
            future: torch.futures.Future = torch.futures.Future(devices=self._devices())
            with self.pending.streams.on_side():  # the future's own event is recorded behind the call
                if self._error is None:
                    future.set_result(self._result)
                else:
                    future.set_result(None)
                    future = future.then(self._outcome)  # as in ``Work.get_future``
            self._future = future
        return self._future

    def _devices(self) -> list[int | str | torch.device]:
        device = self.pending.streams.device
        return [device] if device.type == "cuda" else []


def end_apart(streams: Streams, end: Callable[[], Any], seconds: float) -> None:
    """Run an end function of NCCL on a thread of its own, on the streams' device, and wait for a limited time.

    Its errors are not raised: there is no other way to end the object.
    """

    def run() -> None:
        with suppress(Exception), streams.on_device():
            end()

    thread = threading.Thread(target=run, name="hpcdist-nccl-end", daemon=True)
    thread.start()
    thread.join(seconds)


class Held(NamedTuple):
    """A call for a side stream."""

    name: str
    queue: Callable[[int], Any]  # makes it, on the stream of a handle; references all memory of the device
    finish: Callable[[], None] | None  # runs behind it on the side stream
    work: StreamWork
    is_single: bool = True  # whether it is one call of the library, which can be launched together with others


class Batch:
    """Launches calls on side streams: at once, or together at the end of a group call that holds them back.

    ``launch`` makes calls on their side stream; its argument says whether they belong to a group call.
    """

    def __init__(self, launch: Callable[[Streams, list[Held], bool], None]) -> None:
        self.is_open = False  # whether a group call is open, so that calls are held back
        self._launch = launch
        self._held: list[Held] = []
        self._works: list[Work] = []

    def begin(self, call: Held) -> StreamWork:
        """Launch a call, or hold it back."""
        if not self.is_open:
            self._make([call], False)
            return call.work
        self._held.append(call)
        self._works.append(call.work)
        return call.work

    @contextmanager
    def opened(self) -> Iterator[Sequence[Work]]:
        """Hold back the calls made inside and launch them at the end of the outermost group call."""
        if self.is_open:
            yield self._works
            return
        self.is_open, self._held, self._works = True, [], []
        try:
            yield self._works
            self.is_open = False
            for streams in dict.fromkeys(each.work.pending.streams for each in self._held):
                self._make([each for each in self._held if each.work.pending.streams is streams], True)
        except BaseException as error:
            reason = f"the call was not made, because its group call was left by an error: {error}"
            for each in self._held:
                each.work.pending.finish(DistBackendError(reason))
            raise
        finally:
            self.is_open, self._held = False, []

    def _make(self, calls: list[Held], is_group: bool) -> None:
        """Launch calls behind the work on the streams on which they were made, and keep their memory."""
        streams = calls[0].work.pending.streams
        with streams.on_device():
            for stream in dict.fromkeys(call.work.pending.begun_on for call in calls):
                streams.fork(stream)
            self._launch(streams, calls, is_group)
            for call in calls:
                if call.finish is not None:
                    with streams.on_side():
                        call.finish()
            end = streams.event_behind(streams.side)
            for call in calls:
                pending = call.work.pending
                pending.end, pending.owns_end = end, call is calls[-1]
                streams.keep(pending)
