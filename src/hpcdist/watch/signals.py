"""Signals that arrive while the main thread is inside MPI.

Python runs a handler only once the blocked call returns. The C part of its handling is immediate, though, and
writes the signal's number to a descriptor (``signal.set_wakeup_fd``) that the watchdog thread waits on.

SIGUSR1 and SIGTERM write a trace and are remembered for ``stop_requested``. A program that never calls
``stop_requested`` ends by SIGTERM as usual, after the trace. A handler that the program has installed stays in
place, and so does one in C (``faulthandler.register``), until the program calls ``stop_requested``, which would
not learn of the signal. An ignored SIGUSR1 gets our handler too, because job scripts start their ranks with it ignored:
without a handler it would end them.

SIGINT (Ctrl-C) raises KeyboardInterrupt as usual. If the main thread is still in the interrupted call 1 s later, the
watchdog ends that call, as an overdue one: the program then gets its KeyboardInterrupt, or the job is aborted. The
program may have caught its KeyboardInterrupt, and be in the next call, before the watchdog looks. So a handler of ours
replaces Python's, also as ``signal.default_int_handler``, and writes to the descriptor that it has run. Where Python
would only print the KeyboardInterrupt, as in the ``__del__`` of a Work, it runs again a moment later.

Python has only one such descriptor, and asyncio, for example, sets its own with its first handler and none after its
last: the watchdog would see no signal any more, and SIGTERM would do nothing. So ours stays set,
``signal.set_wakeup_fd`` only stores the program's, and the watchdog forwards signals to that.

In a forked child (``multiprocessing``, a DataLoader's worker), which has no watchdog, all of this is undone, so that a
pool can end its workers by SIGTERM, and their signals do not count as this process's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from _thread import interrupt_main, start_new_thread
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from hpcdist_stores.keep_alive import PRINTING

# the signals, and the handlers that ours replaces
WATCHED = {signal.SIGUSR1: (signal.SIG_DFL, signal.SIG_IGN), signal.SIGTERM: (signal.SIG_DFL,), signal.SIGINT: ()}

AGAIN_SECONDS = 0.001
HANDLED = 0  # in place of a signal's number: Python has raised KeyboardInterrupt for all earlier SIGINTs

set_wakeup_fd = signal.set_wakeup_fd  # Python's own
default_int_handler = signal.default_int_handler


class Signals:
    """The signals that this process has received."""

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair()
        for end in (self.reader, self.writer):
            end.setblocking(False)
        self.received: set[int] = set()
        self._noted: set[int] = set()  # those of them that our handler has handled, and none of the program's
        self.is_asked = False  # whether the program uses stop_requested
        # the program's descriptor for signals, and whether Python warns if it is full
        self._theirs = (-1, True)
        self._replaced: dict[int, Any] = {}  # the handlers that ours replaces
        self._left: list[signal.Signals] = []  # the signals of handlers in C
        self._is_installed = False
        self._raises = self._raise  # one object, because programs compare it

    def install(self) -> None:
        """Install the handlers; only on the main thread (``signal.set_wakeup_fd``), elsewhere do nothing."""
        if self._is_installed or threading.current_thread() is not threading.main_thread():
            return
        self._theirs = (self._hold(), True)
        signal.set_wakeup_fd = self._want
        self._left = [number for number in WATCHED if is_handled_in_c(number)]
        self._handle([number for number in WATCHED if number not in self._left])
        signal.default_int_handler = self._raises  # type: ignore[assignment]  # which does not always raise
        if signal.getsignal(signal.SIGINT) is default_int_handler:
            signal.signal(signal.SIGINT, self._raises)
        self._is_installed = True

    def _handle(self, numbers: list[signal.Signals]) -> None:
        for number in numbers:
            if signal.getsignal(number) in WATCHED[number]:
                self._replaced[number] = signal.signal(number, self._note)

    def ask(self) -> None:
        """Record that the program uses ``stop_requested``, on any thread."""
        self.is_asked = True
        if self._left and threading.current_thread() is threading.main_thread():
            self._handle(self._left)
            self._left = []

    def _hold(self) -> int:
        """Let signals be written to our descriptor, and return the previous one."""
        return set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)

    def _want(self, fd: int, /, *, warn_on_full_buffer: bool = True) -> int:
        """Store the program's descriptor, and return the previous one: ``signal.set_wakeup_fd`` for the program."""
        before, _ = self._theirs
        set_wakeup_fd(fd, warn_on_full_buffer=warn_on_full_buffer)  # which checks it
        self._hold()
        self._theirs = (fd, warn_on_full_buffer)
        return before

    def remove(self) -> None:
        """Undo ``install``, in a forked child, and close the parent's descriptors."""
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

    def release(self) -> None:
        """Let SIGTERM, also one that has come, end the process without the watchdog, whose thread ends with Python."""
        if self._is_installed and self.ends_process(signal.SIGTERM):
            signal.signal(signal.SIGTERM, self._replaced[signal.SIGTERM])
            if signal.SIGTERM in self._noted:
                end_by(signal.SIGTERM)

    def _note(self, number: int, frame: object) -> None:
        """Handle a signal, once the main thread runs Python."""
        self.received.add(number)
        self._noted.add(number)
        before = self._hold()
        if before != self.writer.fileno():  # set by Python's own function, which was imported before
            self._theirs = (before, True)
            with suppress(OSError):
                self.writer.send(bytes([number]))

    def _raise(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT as Python does, and write that it was handled."""
        caller = frame
        while caller is not None:
            if caller.f_code in PRINTING:
                start_new_thread(interrupt_later, ())
                return
            caller = caller.f_back
        with suppress(OSError):
            self.writer.send(bytes([HANDLED]))
        default_int_handler(number, frame)

    def arrived(self) -> list[int]:
        """Return the watched signals since the last call, and HANDLED, in the order of their last arrivals.

        For the watchdog thread.
        """
        try:
            data = self.reader.recv(4096)
        except OSError:
            return []
        numbers = [number for number in dict.fromkeys(data[::-1]) if number in WATCHED or number == HANDLED][::-1]
        # before the program's handler, which may call ``stop_requested`` at once
        self.received.update(number for number in numbers if number not in (signal.SIGINT, HANDLED))
        (theirs, _), forwarded = self._theirs, data.replace(bytes([HANDLED]), b"")
        if forwarded and theirs >= 0:
            with suppress(OSError):  # it was closed, or is full
                os.write(theirs, forwarded)
        return numbers

    def ends_process(self, number: int) -> bool:
        """Tell whether a signal must end the process now."""
        return number == signal.SIGTERM and not self.is_asked and signal.getsignal(number) == self._note


def interrupt_later() -> None:
    """Let the main thread handle SIGINT again, when it has left the code that it is in."""
    time.sleep(AGAIN_SECONDS)
    interrupt_main()


def is_pythons(handler: Any) -> bool:
    """Tell whether a handler of SIGINT is Python's own: it raises KeyboardInterrupt, or is ``asyncio.run``'s.

    The latter (from Python 3.11 on) cancels the task, and raises KeyboardInterrupt after the loop has ended.
    """
    is_asyncios = getattr(getattr(handler, "func", None), "__module__", None) == "asyncio.runners"
    return handler in (signal.default_int_handler, default_int_handler) or is_asyncios


def is_handled_in_c(number: int) -> bool:
    """Tell whether C code has set a handler that Python does not know, such as ``faulthandler.register``.

    MPI's own, such as MPICH's for SIGUSR1 with the device ch3, does not count.
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
    """End the process by a signal as if it had no handler, from any thread."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(number, None)  # SIG_DFL; Python's own signal.signal is for the main thread only
    os.kill(os.getpid(), number)
