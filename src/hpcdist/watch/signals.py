"""Signals that come while the main thread is inside MPI.

Python runs a handler only once the blocked call returns. The C part of its handling is immediate, though, and
writes the signal's number to a descriptor (``signal.set_wakeup_fd``) that the watchdog thread waits on.

SIGUSR1 and SIGTERM write a trace and are remembered for ``stop_requested``. A program that never asks
``stop_requested`` ends by SIGTERM as it always did, after the trace. A handler that the program has installed
stays in its place, and so does one that only C knows (``faulthandler.register``), until the program asks
``stop_requested``, which would not be told of the signal. An ignored SIGUSR1 is taken over, because job scripts start
their ranks with it ignored: as long as nothing handles it, it would end them.

SIGINT (Ctrl-C) raises KeyboardInterrupt as ever. If the call that it found the main thread in has not ended 1 s later,
the watchdog ends it, as one that is overdue: the program then gets its KeyboardInterrupt, or the job is aborted.
The program may have caught its KeyboardInterrupt, and be in the next call, before the watchdog looks. So a handler of
ours takes the place of Python's, as ``signal.default_int_handler`` too, and writes to the descriptor that it has run.

Python has one such descriptor, and asyncio, for one, sets its own with its first handler and none after its last: the
watchdog would see no signal any more, and SIGTERM would do nothing. So ours stays set, ``signal.set_wakeup_fd``
only notes which one the program wants, and the watchdog writes there what comes.

A forked child (``multiprocessing``, a DataLoader's worker) has no watchdog: there all is as it was before, so that a
pool can end its workers by SIGTERM, and theirs is not taken for this process's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

# what is watched, and which ways of dealing with it our handler replaces
WATCHED = {signal.SIGUSR1: (signal.SIG_DFL, signal.SIG_IGN), signal.SIGTERM: (signal.SIG_DFL,), signal.SIGINT: ()}

HANDLED = 0  # in place of a signal's number: Python has raised KeyboardInterrupt for each SIGINT before

set_wakeup_fd = signal.set_wakeup_fd  # Python's own
default_int_handler = signal.default_int_handler


class Signals:
    """The signals that have come to this process."""

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair()
        for end in (self.reader, self.writer):
            end.setblocking(False)
        self.received: set[int] = set()
        self.is_asked = False  # whether the program asks for them itself, by stop_requested
        # the descriptor that the program wants signals to be written to, and whether Python warns if it takes no more
        self._theirs = (-1, True)
        self._replaced: dict[int, Any] = {}  # what our handler stands in the place of
        self._left: list[signal.Signals] = []  # the signals that were left to a handler of C's
        self._is_installed = False
        self._raises = self._raise  # one object, which programs compare

    def install(self) -> None:
        """Begin to watch; only the main thread may (``signal.set_wakeup_fd``), elsewhere this does nothing."""
        if self._is_installed or threading.current_thread() is not threading.main_thread():
            return
        self._theirs = (self._hold(), True)
        signal.set_wakeup_fd = self._want
        self._left = [number for number in WATCHED if is_handled_in_c(number)]
        self._handle([number for number in WATCHED if number not in self._left])
        signal.default_int_handler = self._raises
        if signal.getsignal(signal.SIGINT) is default_int_handler:
            signal.signal(signal.SIGINT, self._raises)
        self._is_installed = True

    def _handle(self, numbers: list[signal.Signals]) -> None:
        for number in numbers:
            if signal.getsignal(number) in WATCHED[number]:
                self._replaced[number] = signal.signal(number, self._note)

    def ask(self) -> None:
        """Note that the program asks for signals itself, on whatever thread."""
        self.is_asked = True
        if self._left and threading.current_thread() is threading.main_thread():
            self._handle(self._left)
            self._left = []

    def _hold(self) -> int:
        """Have signals written to our descriptor, and return the one until now."""
        return set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)

    def _want(self, fd: int, /, *, warn_on_full_buffer: bool = True) -> int:
        """Note which descriptor the program wants, and return the one until now: ``signal.set_wakeup_fd`` to it."""
        before, _ = self._theirs
        set_wakeup_fd(fd, warn_on_full_buffer=warn_on_full_buffer)  # which checks it
        self._hold()
        self._theirs = (fd, warn_on_full_buffer)
        return before

    def remove(self) -> None:
        """Undo ``install``, in a forked child, and close what is its parent's."""
        if self._is_installed:
            if signal.set_wakeup_fd == self._want:
                signal.set_wakeup_fd = set_wakeup_fd
            set_wakeup_fd(-1)
            theirs, warns = self._theirs
            with suppress(OSError, ValueError):  # it was closed
                set_wakeup_fd(theirs, warn_on_full_buffer=warns)
            for number, before in self._replaced.items():
                if signal.getsignal(number) == self._note:
                    signal.signal(number, before)
            if signal.default_int_handler is self._raises:
                signal.default_int_handler = default_int_handler
            if signal.getsignal(signal.SIGINT) is self._raises:
                signal.signal(signal.SIGINT, default_int_handler)
            self._is_installed = False
        self.reader.close()
        self.writer.close()

    def _note(self, number: int, frame: object) -> None:
        """Handle a signal, once the main thread runs Python."""
        self.received.add(number)
        before = self._hold()
        if before != self.writer.fileno():  # set past ``_want``, by who had imported Python's own function before
            self._theirs = (before, True)
            with suppress(OSError):
                self.writer.send(bytes([number]))

    def _raise(self, number: int, frame: FrameType | None) -> NoReturn:
        """Handle SIGINT as Python does, and write that it was handled."""
        with suppress(OSError):
            self.writer.send(bytes([HANDLED]))
        default_int_handler(number, frame)

    def arrived(self) -> list[int]:
        """Return the watched signals that came since the last look, and HANDLED, in the order in which each came last.

        For the watchdog thread.
        """
        try:
            data = self.reader.recv(4096)
        except OSError:
            return []
        numbers = [number for number in dict.fromkeys(data[::-1]) if number in WATCHED or number == HANDLED][::-1]
        # before the program's handler, which may ask at once whether it is to stop
        self.received.update(number for number in numbers if number not in (signal.SIGINT, HANDLED))
        (theirs, _), forwarded = self._theirs, data.replace(bytes([HANDLED]), b"")
        if forwarded and theirs >= 0:
            with suppress(OSError):  # it was closed, or takes no more
                os.write(theirs, forwarded)
        return numbers

    def ends_process(self, number: int) -> bool:
        """Tell whether a signal is to end the process now."""
        return number == signal.SIGTERM and not self.is_asked and signal.getsignal(number) == self._note


def is_pythons(handler: Any) -> bool:
    """Tell whether a handler of SIGINT is Python's own: it raises KeyboardInterrupt, or is that of ``asyncio.run``.

    That one (from Python 3.11 on) cancels the task, and raises KeyboardInterrupt once the loop has ended.
    """
    is_asyncios = getattr(getattr(handler, "func", None), "__module__", None) == "asyncio.runners"
    return handler in (signal.default_int_handler, default_int_handler) or is_asyncios


def is_handled_in_c(number: int) -> bool:
    """Tell whether C code has set a handler that Python does not know, as ``faulthandler.register`` does.

    That of MPI, such as MPICH's for SIGUSR1 with the device ch3, counts as none.
    """
    if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
        return False
    libc = ctypes.CDLL(None)
    action, where = ctypes.create_string_buffer(256), (ctypes.c_char_p * 4)()  # a sigaction, which begins with it
    libc.sigaction(int(number), None, action)
    handler = ctypes.c_void_p.from_buffer(action)
    if handler.value in (None, int(signal.SIG_IGN)):
        return False
    libc.dladdr(handler, where)
    return not Path(os.fsdecode(where[0] or b"")).name.startswith("libmp")


def end_by(number: int) -> None:
    """End the process by a signal as if it had never been caught, from any thread."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(number, None)  # SIG_DFL; Python's own signal.signal is for the main thread only
    os.kill(os.getpid(), number)
