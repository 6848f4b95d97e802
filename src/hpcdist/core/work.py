"""Work: torch's handle of a call under way, for calls of every backend.

Each backend's own Works are in its modules: ``core.queue`` has those of the CPU backends' asynchronous calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed

from hpcdist.core import hooks
from hpcdist.core.errors import DistBackendError, MismatchError
from hpcdist.core.hooks import Event
from hpcdist.core.printing import add_hint, format_value
from hpcdist_stores.keep_alive import KeptAlive

NO_TIMEOUT = timedelta(0)  # c10d's value of Work.wait() without a limit
SHORTEST_TIMEOUT = timedelta(microseconds=1)
ASKED_FROM = 16  # messages under way before they are polled, which costs an MPI call each
LONGEST_TIMEOUT = timedelta(seconds=1e9)  # 31 years: Python's locks and timers cannot hold ``timedelta.max``


def check_timeout(timeout: Any, is_optional: bool = True, may_be_zero: bool = False) -> None:
    """Raise c10d's error unless a limit of calls is a timedelta above zero, or None if it is optional."""
    if timeout is None and is_optional:
        return
    if not isinstance(timeout, timedelta):
        raise TypeError(f"Expected timeout argument to be of type datetime.timedelta, got {format_value(timeout)}")
    if timeout < NO_TIMEOUT or not (timeout or may_be_zero):
        least = "zero or more" if may_be_zero else "more than zero"
        raise MismatchError(f"Invalid timeout: {timeout.total_seconds():g} s; expected a timedelta of {least}")


TorchWork = torch.distributed.Work


class PythonHalf(type(TorchWork)):  # type: ignore[misc]
    """Metaclass that makes Works without their C++ half, most of the cost; ``_for_cpp`` makes it if C++ needs it."""

    __call__ = type.__call__  # pybind11's own metaclass refuses an object without that half


class Work(TorchWork, metaclass=PythonHalf):
    """A collective or message under way, derived from torch's Work, so that code for c10d can use it.

    ``wait`` returns True when the buffers may be used, raises what the call raised, and may be called
    from any thread and more than once.
    """

    # A Work costs as much as its MPI call. Attributes that every call sets are slots, because the first entry of an
    # object's ``__dict__`` takes 1 µs; rare ones have defaults in the class. Objects to notify of the end (a future, an
    # event, a lock) are entries of ``__dict__`` from their registration until they are popped, which is atomic.
    __slots__ = ("__dict__", "_call", "_done", "_error", "_has_half", "_result")

    _call: tuple[Any, ...] | None  # its record in the group's journal
    _done: bool
    _error: BaseException | None
    _has_half: bool  # whether it has its C++ half
    _result: list[Any]  # the output tensors, or several lists of them
    _is_asked = False  # whether there is an object to notify of the end
    _future: torch.futures.Future | None = None

    def __init__(self, result: list[Any]) -> None:
        self._result = result
        self._done = self._has_half = False
        self._call = self._error = None

    def _whole(self) -> Work:
        """Return the Work with its C++ half, for C++ that holds the Python half too, such as a method's result.

        Another class, as that of ``_for_cpp``, takes C++ 1 µs more.
        """
        if not self._has_half:
            TorchWork.__init__(self)
            self._has_half = True
        return self

    def _for_cpp(self) -> Work:
        """Return the Work in a form that C++ may call and keep: it lives until C++ has released it too."""
        if not isinstance(self, KeptAlive):
            self._whole()
            self.__class__ = kept(self.__class__)
        return self

    # -- for the code that carries the call out ------------------------------------------------------

    def _finish(self, error: BaseException | None = None) -> None:
        if self._done:  # already ended by an error, such as of a call that was given up
            return
        self._error = error
        if self._is_asked:
            self._end_event()  # a thread that sees the end of the call may end the profile
        self._done = True
        if self._is_asked:
            self._tell()

    def _end_event(self) -> None:
        """End the profiler's event, once, if there is one."""
        event = self.__dict__.pop("_event", None)
        if event is not None:
            event.__exit__(None, None, None)

    def _tell(self) -> None:
        """Notify the registered objects of the end, once; also called by a registration after the end."""
        self._end_event()
        future = self.__dict__.pop("_promise", None)
        if future is not None:
            future.set_result(None)

    def _ask(self, name: str, value: Any) -> None:
        """Register an object to notify of the end."""
        self.__dict__[name] = value
        self._is_asked = True
        if self._done:
            self._tell()

    def _ends(self, event: Event) -> None:
        """End a profiler's event when the call ends."""
        self._ask("_event", event)

    def _carry_out(self) -> bool:
        """Carry the call out on this thread if no thread has begun it, and tell whether it has ended.

        A wait with a limit of its own does not call this, because a call of MPI could not be ended in time.
        """
        return False

    def _block(self, seconds: float | None) -> bool:
        """Return True once the call has ended, False when the time is over first."""
        raise NotImplementedError

    def _await(self, seconds: float | None) -> bool:
        """Block as ``_block`` does, recorded in the group's journal."""
        if (call := self._call) is None:
            return self._block(seconds)
        with call[0].blocking(call, self, seconds):
            return self._block(seconds)

    def _see(self) -> None:
        """Record that a caller gets its error, if it has one."""

    def _interrupt(self, reason: str) -> bool:
        """Make a wait for this Work raise; return False if that is impossible."""
        return False

    def _outlive(self, reason: str, seconds: float) -> None:
        """Let a later wait raise after some seconds: the group has ended, so the watchdog does not watch it."""

    def _poll(self) -> None:
        """Detect the end of the call, if no other thread does."""

    def _devices(self) -> list[int | str | torch.device]:
        """Return the GPUs whose streams wait for the call in place of the host."""
        return []

    # -- c10d's names --------------------------------------------------------------------------------

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until the buffers may be used.

        Args:
            timeout: the longest wait; zero is the group's own limit, and a negative one is over at once.

        Raises:
            DistBackendError: the time is over; the call itself goes on.
        """
        # all CPU backends' Works have this one: torch.compile, which would trace into it, identifies it by its code
        if not self._done and (timeout or not self._carry_out()):
            if isinstance(timeout, float):  # pybind11 takes it for seconds
                timeout = timedelta(seconds=min(timeout, LONGEST_TIMEOUT.total_seconds()))
            elif not isinstance(timeout, timedelta):
                raise TypeError(f"wait: timeout is {timeout!r} of type {type(timeout).__name__}; expected a timedelta")
            seconds = min(timeout, LONGEST_TIMEOUT).total_seconds() or None
            if not self._await(seconds if seconds is None else max(seconds, 0.0)):
                text = (
                    f"wait timeout after {(seconds or 0) * 1000:.0f}ms: the operation has not ended and is still under "
                    f"way. {hooks.explain(self._call)}".rstrip()
                )
                raise DistBackendError(add_hint(text, "call-timeout"))
        if self._error is not None:
            self._see()
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait, as c10d does for calls on the CPU."""
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
        """Return the error of the call, or None."""
        self._see()
        return self._error

    def result(self) -> list[Any]:
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
        future: torch.futures.Future | None = self._future
        if future is None:
            # ``set_exception`` would hand C++ the exception as a value, on which DDP's reducer crashes: a callback that
            # raises is what makes an error of C++'s own
            promise: torch.futures.Future = torch.futures.Future()
            made = promise.then(self._outcome)
            future = self.__dict__.setdefault("_future", made)
            if future is made:
                self._ask("_promise", promise)
                if not self._done:
                    self._pursue()
        assert future is not None
        return future

    def _outcome(self, _: torch.futures.Future) -> list[Any]:
        """Return the output tensors of a call that has ended, or raise what it raised."""
        if self._error is not None:
            self._see()
            raise self._error
        return self._result

    def _pursue(self) -> None:
        """Make sure that a future is fulfilled without a wait."""


@cache
def kept(kind: type[Work]) -> type[Work]:
    """Return the subclass for Works that C++ may keep."""
    return PythonHalf(kind.__name__, (KeptAlive, kind), {"__slots__": (), "__module__": kind.__module__})


def in_cpp(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of torch's Work that first makes the C++ half."""

    @wraps(method)
    def call(self: Work, *args: Any, **kwargs: Any) -> Any:
        return method(self._for_cpp(), *args, **kwargs)

    return call


for _name, _method in vars(TorchWork).items():
    if _name not in vars(Work):
        if isinstance(_method, property) and _method.fget is not None:  # ``timeout`` of torch 2.14
            setattr(Work, _name, property(in_cpp(_method.fget)))
        elif callable(_method) and not isinstance(_method, staticmethod):
            setattr(Work, _name, in_cpp(_method))


class DoneWork(Work):
    """The Work of a call that has already ended."""

    __slots__ = ()

    def __init__(self, result: list[Any]) -> None:
        self._result, self._done, self._has_half = result, True, False
        self._call = self._error = None


class AllWork(Work):
    """Several calls with one Work (c10d's coalesced calls).

    It has ended when its parts have. A wait for device calls does not end it: it only orders the current stream.
    """

    __slots__ = ("_works",)

    def __init__(self, works: list[Work], result: list[Any]) -> None:
        super().__init__(result)
        self._works = works

    def _carry_out(self) -> bool:
        """Carry out its parts, like a wait for the last one; errors are left to ``_block``."""
        for work in reversed(self._works):
            if not (work._done or work._carry_out()) or work._error is not None:
                return False
        if self._works:
            self._finish()
        return self._done

    def _block(self, seconds: float | None) -> bool:
        end, failed = None if seconds is None else time.monotonic() + seconds, None
        for work in self._works:
            # a limit of zero would mean no limit
            limit = NO_TIMEOUT if end is None else max(timedelta(seconds=end - time.monotonic()), SHORTEST_TIMEOUT)
            try:
                work.wait(limit)
            except Exception as error:  # the other parts may still write
                failed = failed or error
        if failed is not None:
            self.is_completed()
            raise failed
        if self._is_asked:
            self._tell()
        return True

    def _poll(self) -> None:
        if all(work.is_completed() for work in self._works):
            self._finish(self.exception())

    def _ends(self, event: Event) -> None:
        if self._devices():  # their Works end events when the call is queued
            event.__exit__(None, None, None)
        else:
            super()._ends(event)

    def _pursue(self) -> None:
        def ended(_: torch.futures.Future) -> None:
            self.is_completed()

        for work in self._works:
            work.get_future().add_done_callback(ended)

    def _devices(self) -> list[int | str | torch.device]:
        return list(dict.fromkeys(device for work in self._works for device in work._devices()))

    def block_current_stream(self) -> None:
        """Make the current stream wait for every part; the host does not wait."""
        for work in self._works:
            work.block_current_stream()

    def exception(self) -> BaseException | None:
        """Return the error of the first part that failed, or None."""
        return self._error or next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future:
        """Return a future of the output tensors, fulfilled when those of the parts are."""
        if self._future is None:
            # a future of several parts has no devices: with devices, the streams of its users would wait
            promise: torch.futures.Future = torch.futures.Future(devices=self._devices())
            parts = torch.futures.collect_all([work.get_future() for work in self._works])

            def outcome(_: torch.futures.Future) -> list[Any]:
                for part in parts.value():
                    part.wait()
                return self._result

            self._future = promise.then(outcome)
            parts.add_done_callback(lambda _: promise.set_result(None))
        return self._future


class HeldWork(AllWork):
    """A call that a coalescing manager holds back until its end."""

    __slots__ = ("_is_held",)

    def __init__(self) -> None:
        super().__init__([], [])
        self._is_held = True

    def _begin(self, works: list[Work]) -> None:
        """Take over the calls that the manager has begun for it; without any it has ended."""
        self._works, self._is_held = works, False
        if self._is_asked:
            self._pursue()

    def _drop(self, error: BaseException) -> None:
        """End with an error if the manager has not begun the call, because its block was left by an exception."""
        if self._is_held:
            self._finish(
                DistBackendError(f"the call was not made, because its group call was left by an error: {error}")
            )

    def _check(self) -> None:
        if self._is_held:
            raise ValueError(
                "this call is held back by a coalescing manager, which begins it when its `with` block ends; expected "
                "wait() after the block"
            )

    def _block(self, seconds: float | None) -> bool:
        self._check()
        return super()._block(seconds)

    def _poll(self) -> None:
        if not self._is_held:
            super()._poll()

    def _pursue(self) -> None:
        if self._is_held:
            return
        super()._pursue()
        self._poll()

    def get_future(self) -> torch.futures.Future:
        """Return a future of the call; a wait for it inside the manager's block would not end."""
        return Work.get_future(self) if self._is_held or self._future is not None else super().get_future()


class Unfinished(dict[Work, None]):
    """Works of the messages under way on a communicator, kept with their buffers even if the caller drops them.

    The thread that detects the end of one removes it; another thread may have done so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.limit = ASKED_FROM  # the number from which they are polled

    def hold(self, work: Work) -> None:
        """Keep one, and poll all if there are twice as many as were left after the last poll."""
        if len(self) >= self.limit:
            self.sweep()
        self[work] = None

    def sweep(self) -> None:
        """Poll all."""
        for each in list(self):
            each.is_completed()  # this releases it
        self.limit = max(ASKED_FROM, 2 * len(self))
