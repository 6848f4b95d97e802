"""Progress thread: moves messages while their rank is in no call of MPI.

MPI need not move messages outside its calls (MPI 3.7.4), and neither Open MPI nor MPICH does. While a rank that has
begun to receive computes, or waits for a file, a store or a GPU, the sender of a large message blocks; if the rank
waits for that sender's next step, both wait forever. So a thread drives MPI while messages are under way, or a window
is open to which a one-sided call may be a message. It completes no request: the steps after a message (a copy, an
error) run on the thread that waits for it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any

from mpi4py import MPI

from hpcdist.core import shutdown

LOOK_SECONDS = 2e-3  # seconds between two polls; shorter naps can starve a crowded machine (``core.waiting``)
IDLE_LOOKS = 8  # polls without a message under way before the thread sleeps until one begins: to wake it takes 20 µs


class Progress:
    """The progress thread of this process, and the sources of messages that it drives."""

    def __init__(self) -> None:
        self.is_asleep = True  # then ``wake`` must be called when a message begins
        self._sources: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()  # held while the thread is in MPI
        self._alarm = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def follow(self, source: Any) -> None:
        """Drive the messages of a source as long as it exists; ``wake`` announces a message.

        Its ``drive`` drives MPI if a message is under way, or may be, and tells whether one is.
        """
        with self._lock:
            self._sources.add(source)

    def leave(self, source: Any) -> None:
        """Stop driving a source: otherwise the thread may keep an object that refers to itself alive."""
        with self._lock:
            self._sources.discard(source)

    def wake(self) -> None:
        """Wake the thread, if this MPI allows calls of several threads."""
        self.is_asleep = False
        with self._lock:
            if self._thread is None and not self._is_stopped and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
                self._thread = threading.Thread(target=self._serve, name="hpcdist-progress", daemon=True)
                key = MPI.Comm.Create_keyval(delete_fn=self.stop)
                MPI.COMM_SELF.Set_attr(key, None)  # MPI_Finalize deletes it first (MPI 11.2.4)
                self._thread.start()
        self._alarm.set()

    def stop(self, *_: object) -> None:
        """Make no more calls of MPI."""
        with self._lock:
            self._is_stopped = True
        self._alarm.set()

    def leave_to_parent(self) -> None:
        """Make no calls of MPI in a forked child, which lacks the thread; that may have held the lock."""
        self._lock = threading.Lock()
        self._is_stopped, self.is_asleep = True, False

    def _serve(self) -> None:
        idle = 0
        while not self._is_stopped:
            time.sleep(LOOK_SECONDS)
            idle = 0 if self._look() else idle + 1
            if idle >= IDLE_LOOKS:
                self._alarm.clear()
                self.is_asleep = True
                if not self._look():  # none was begun before ``is_asleep`` was set
                    self._alarm.wait()
                self.is_asleep, idle = False, 0

    def _look(self) -> bool:
        """Drive MPI if a message is under way; tell whether one is."""
        with self._lock:
            if self._is_stopped:
                return False
            is_any = False
            for source in list(self._sources):
                is_any |= source.drive()
            return is_any


PROGRESS = Progress()
# before the end of Python stops the thread in the middle of a call
shutdown.register(shutdown.Stage.PROGRESS, PROGRESS.stop)
os.register_at_fork(after_in_child=PROGRESS.leave_to_parent)
