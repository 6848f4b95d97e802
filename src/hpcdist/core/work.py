"""Work: torch's handle of a call under way, for calls of every backend.

What the Work of one backend does not share stands with it: ``core.queue`` has the CPU backends' asynchronous calls.
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
from hpcdist.core.errors import DistBackendError, MismatchError, explained
from hpcdist.core.hooks import Event
from hpcdist.core.printing import shown
from hpcdist_stores.keep_alive import KeptAlive

NO_TIMEOUT = timedelta(0)  # c10d: Work.wait() without a limit of its own
SHORTEST_TIMEOUT = timedelta(microseconds=1)
ASKED_FROM = 16  # messages under way before they are asked whether they have ended: asking costs an MPI call each
LONGEST_TIMEOUT = timedelta(seconds=1e9)  # 31 years: Python's locks and timers do not hold ``timedelta.max``


def check_timeout(timeout: Any, is_optional: bool = True, may_be_zero: bool = False) -> None:
    """Raise c10d's error for a limit of calls that is no timedelta, not above zero, or None unless it is optional."""
    if timeout is None and is_optional:
        return
    if not isinstance(timeout, timedelta):
        raise TypeError(f"Expected timeout argument to be of type datetime.timedelta, got {shown(timeout)}")
    if timeout < NO_TIMEOUT or not (timeout or may_be_zero):
        least = "zero or more" if may_be_zero else "more than zero"
        raise MismatchError(f"Invalid timeout: {timeout.total_seconds():g} s; expected a timedelta of {least}")


TorchWork = torch.distributed.Work


class PythonHalf(type(TorchWork)):  # type: ignore[misc]
    """Type of the Works, made without their C++ half, most of a Work's cost; ``_for_cpp`` makes it if C++ needs it."""

    __call__ = type.__call__  # pybind11's own refuses an object without that half


class Work(TorchWork, metaclass=PythonHalf):
    """A collective or message under way; torch's Work, so that c10d code takes it as one.

    ``wait`` returns True when the buffers may be used, raises what the call raised, and may be called
    from any thread and more than once.
    """

    # A Work costs as much as its MPI call. What every call sets is a slot, because the first entry of an object's
    # ``__dict__`` takes 1 µs; what most calls never set stays with the class. What is told of the end (a future, an
    # event, a lock) is an entry of ``__dict__`` from when somebody asks until it is popped, which is atomic.
    __slots__ = ("__dict__", "_call", "_done", "_error", "_has_half", "_result")

    _call: tuple[Any, ...] | None  # its record in the group's journal
    _done: bool
    _error: BaseException | None
    _has_half: bool  # whether it has its C++ half
    _result: list[Any]  # the output tensors, or several lists of them
    _is_asked = False  # whether somebody is to be told of the end
    _future: torch.futures.Future | None = None

    def __init__(self, result: list[Any]) -> None:
        self._result = result
        self._done = self._has_half = False
        self._call = self._error = None

    def _whole(self) -> Work:
        """Return the Work with its C++ half, for C++ that holds the Python half too, as it does of a method's result.

        Another class, as that of ``_for_cpp``, takes C++ 1 µs more.
        """
        if not self._has_half:
            TorchWork.__init__(self)
            self._has_half = True
        return self

    def _for_cpp(self) -> Work:
        """Return the Work, which C++ may call and keep from now on: it lives until C++ has released it too."""
        if not isinstance(self, KeptAlive):
            self._whole()
            self.__class__ = kept(self.__class__)
        return self

    # -- for the one who carries the call out --------------------------------------------------------

    def _finish(self, error: BaseException | None = None) -> None:
        if self._done:  # a call that was given up may still end
            return
        self._error = error
        if self._is_asked:
            self._end_event()  # who sees that the call has ended may end the profile
        self._done = True
        if self._is_asked:
            self._tell()

    def _end_event(self) -> None:
        """End the profiler's event, once, if there is one."""
        event = self.__dict__.pop("_event", None)
        if event is not None:
            event.__exit__(None, None, None)

    def _tell(self) -> None:
        """Tell of the end whoever has asked, once; who asks after it has ended calls this too."""
        self._end_event()
        future = self.__dict__.pop("_promise", None)
        if future is not None:
            future.set_result(None)

    def _ask(self, name: str, value: Any) -> None:
        """Leave what is to be told of the end."""
        self.__dict__[name] = value
        self._is_asked = True
        if self._done:
            self._tell()

    def _ends(self, event: Event) -> None:
        """Let a profiler's event end when the call ends."""
        self._ask("_event", event)

    def _carry_out(self) -> bool:
        """Carry the call out on this thread if nobody has begun to, and tell whether it has ended.

        A wait with a limit of its own does not ask for it, because nothing ends a call of MPI in time.
        """
        return False

    def _block(self, seconds: float | None) -> bool:
        """Return True once the call has ended, False when the time is over first."""
        raise NotImplementedError

    def _await(self, seconds: float | None) -> bool:
        """Block as ``_block`` does, and let the group's journal say so meanwhile."""
        if (call := self._call) is None:
            return self._block(seconds)
        with call[0].blocking(call, self, seconds):
            return self._block(seconds)

    def _see(self) -> None:
        """Take note that somebody sees its error, if it has one."""

    def _interrupt(self, reason: str) -> bool:
        """Make a wait for this Work raise; return False if that cannot be done."""
        return False

    def _outlive(self, reason: str, seconds: float) -> None:
        """Have a later wait raise after so many seconds: the group has ended, so the watchdog does not look at it."""

    def _poll(self) -> None:
        """Notice, where nobody else does, that the call has ended."""

    def _devices(self) -> list[int | str | torch.device]:
        """Return the GPUs whose streams wait for the call if the host does not."""
        return []

    # -- c10d's names --------------------------------------------------------------------------------

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until the buffers may be used.

        Args:
            timeout: the most to wait; zero stands for the group's own limit, and less than that is over at once.

        Raises:
            DistBackendError: the time is over; the call itself goes on.
        """
        # no CPU backend's Work has another: torch.compile, which would trace into what this runs, knows it by its code
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
                raise DistBackendError(explained(text, "call-timeout"))
        if self._error is not None:
            self._see()
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
        """See to it that a future asked for is fulfilled though nobody waits."""


@cache
def kept(kind: type[Work]) -> type[Work]:
    """Return the class of those Works of a class that C++ may keep."""
    return PythonHalf(kind.__name__, (KeptAlive, kind), {"__slots__": (), "__module__": kind.__module__})


def in_cpp(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of torch's Work, which needs the C++ half."""

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
    """A call that had ended before its Work was made."""

    __slots__ = ()

    def __init__(self, result: list[Any]) -> None:
        self._result, self._done, self._has_half = result, True, False
        self._call = self._error = None


class AllWork(Work):
    """Several calls that are waited for as one (c10d's coalesced calls).

    It has ended when its parts have. A wait ends nothing: those of a device only order the stream that is current then.
    """

    __slots__ = ("_works",)

    def __init__(self, works: list[Work], result: list[Any]) -> None:
        super().__init__(result)
        self._works = works

    def _carry_out(self) -> bool:
        """Carry out its parts, if it has any, as a wait for the last would; leave an error to ``_block``."""
        for work in reversed(self._works):
            if not (work._done or work._carry_out()) or work._error is not None:
                return False
        if self._works:
            self._finish()
        return self._done

    def _block(self, seconds: float | None) -> bool:
        end, failed = None if seconds is None else time.monotonic() + seconds, None
        for work in self._works:
            # a limit of zero would be none
            limit = NO_TIMEOUT if end is None else max(timedelta(seconds=end - time.monotonic()), SHORTEST_TIMEOUT)
            try:
                work.wait(limit)
            except Exception as error:  # the others may still write
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
        if self._devices():  # whose Works end theirs when the call is queued
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
        """Make the current stream wait for every part; the host goes on."""
        for work in self._works:
            work.block_current_stream()

    def exception(self) -> BaseException | None:
        """Return what the first part that failed raised, or None."""
        return self._error or next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future:
        """Return a future of the output tensors, fulfilled when those of the parts are."""
        if self._future is None:
            # the future of several has no devices: one that has them lets the streams of those who use it wait
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
    """A call that a coalescing manager holds back: it has not ended before the manager begins it."""

    __slots__ = ("_is_held",)

    def __init__(self) -> None:
        super().__init__([], [])
        self._is_held = True

    def _begin(self, works: list[Work]) -> None:
        """Stand for the calls that the manager has begun in its place; without any, it has ended."""
        self._works, self._is_held = works, False
        if self._is_asked:
            self._pursue()

    def _drop(self, error: BaseException) -> None:
        """Have ended, if the manager has not begun the call, because an error has left its block."""
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
        """Return a future of the call; a wait for it inside of the manager's block would not end."""
        return Work.get_future(self) if self._is_held or self._future is not None else super().get_future()


class Unfinished(dict[Work, None]):
    """Works of the messages under way on a communicator, kept with their buffers though the caller may drop them.

    Whoever notices the end of one takes it out; another thread may have done so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.limit = ASKED_FROM  # from how many on they are asked whether they have ended

    def hold(self, work: Work) -> None:
        """Keep one, and ask all if they are twice as many as were left the last time."""
        if len(self) >= self.limit:
            self.sweep()
        self[work] = None

    def sweep(self) -> None:
        """Ask all whether they have ended."""
        for each in list(self):
            each.is_completed()  # which releases it
        self.limit = max(ASKED_FROM, 2 * len(self))
