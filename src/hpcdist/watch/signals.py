"""Signals that come while the main thread is inside MPI.

Python runs a handler only once the blocked call returns. The C part of its handling is immediate, though, and
writes the signal's number to a descriptor (``signal.set_wakeup_fd``) that the watchdog thread waits on.

SIGUSR1 and SIGTERM write a trace and are remembered for ``stop_requested``. A program that never asks
``stop_requested`` ends by SIGTERM as it always did, after the trace. A handler that the program has installed
stays in its place; an ignored SIGUSR1 is taken over, because job scripts start their ranks with it ignored: as
long as nothing handles it, it would end them.

SIGINT (Ctrl-C) stays Python's. If the call that it found the main thread in has not ended 1 s later, the watchdog ends
it, as it ends one that is overdue: the program then gets its KeyboardInterrupt, or the job is aborted.

A forked child (``multiprocessing``, a DataLoader's worker) has no watchdog: there all is as it was before, so that a
pool can end its workers by SIGTERM, and theirs is not taken for this process's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from typing import Any

# what is watched, and which ways of dealing with it our handler replaces
WATCHED = {signal.SIGUSR1: (signal.SIG_DFL, signal.SIG_IGN), signal.SIGTERM: (signal.SIG_DFL,), signal.SIGINT: ()}


class Signals:
    """The signals that have come to this process."""

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair()
        for end in (self.reader, self.writer):
            end.setblocking(False)
        self.received: set[int] = set()
        self.is_asked = False  # whether the program asks for them itself, by stop_requested
        self._theirs = -1  # the descriptor that was set before ours
        self._replaced: dict[int, Any] = {}  # what our handler stands in the place of
        self._forking = threading.local()  # the mask of a thread that forks
        self._installed = False

    def install(self) -> None:
        """Begin to watch; only the main thread may (``signal.set_wakeup_fd``), elsewhere this does nothing."""
        if self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._theirs = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        for number, replaced in WATCHED.items():
            if signal.getsignal(number) in replaced:
                self._replaced[number] = signal.signal(number, self._note)
        self._installed = True
        os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._remove)

    def _block(self) -> None:
        """Hold signals back while a child may still have what is this process's."""
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _remove(self) -> None:
        """Undo ``install``."""
        signal.set_wakeup_fd(self._theirs)
        for number, before in self._replaced.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, before)
        self._unblock()

    def _note(self, number: int, frame: object) -> None:
        self.received.add(number)

    def arrived(self) -> list[int]:
        """Return the watched signals that came since the last look; for the watchdog thread."""
        try:
            data = self.reader.recv(4096)
        except OSError:
            return []
        if self._theirs >= 0:
            try:
                os.write(self._theirs, data)
            except OSError:
                self._theirs = -1
        numbers = [number for number in dict.fromkeys(data) if number in WATCHED]
        self.received.update(number for number in numbers if number != signal.SIGINT)
        return numbers

    def ends_process(self, number: int) -> bool:
        """Tell whether a signal is to end the process now."""
        return number == signal.SIGTERM and not self.is_asked and signal.getsignal(number) == self._note


def end_by(number: int) -> None:
    """End the process by a signal as if it had never been caught, from any thread."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(number, None)  # SIG_DFL; Python's own signal.signal is for the main thread alone
    os.kill(os.getpid(), number)
