"""Receives by matched probe (MPI 3.8.2), for an MPI whose receives from any rank may hang.

MPICH 5.0.2 over UCX never ends a receive with MPI_ANY_SOURCE if the message came from another node before the receive
was made (2 + 2 and 1 + 2 ranks over TCP, plain mpi4py); MPI_Test itself hangs then. MPI_Improbe finds that message, and
the receive of a matched message ends. Over libfabric (``MPICH_CH4_NETMOD=ofi``) nothing hangs.

MPI knows nothing of such a receive until then. While nobody waits for it, the progress thread looks for its message.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from mpi4py import MPI

from hpcdist.core.naps import nap

SPINS = 1000  # probes before the first nap


def netmod(version: str, chosen: str | None) -> str:
    """Return which network module an MPICH uses, or nothing for another MPI.

    Args:
        version: what MPI_Get_library_version returns, with a line such as ``MPICH Device: ch4:ucx,ofi``.
        chosen: the value of ``MPICH_CH4_NETMOD``.
    """
    found = re.search(r"^MPICH Device:\s*ch4:([\w, ]+)", version, re.MULTILINE)
    return (chosen or re.split(r"[ ,]+", found[1].strip())[0]) if found else ""


@cache
def is_needed() -> bool:
    """Tell whether receives from any rank have to be probed for here."""
    return netmod(MPI.Get_library_version(), os.environ.get("MPICH_CH4_NETMOD")) == "ucx"


def wait_until(condition: Callable[[], bool]) -> None:
    """Return once a condition holds, which probes for messages when it is asked."""
    spins, began = 0, time.monotonic()
    while not condition():
        spins += 1
        if spins > SPINS:
            nap(time.monotonic() - began)


class AwaitedMessage:
    """A message that a rank waits for by matched probe, so that another thread can end the wait.

    Attributes:
        status: where a probe describes the message.
        message: the matched one.
        is_cancelled: whether the wait is to end without it.
    """

    def __init__(self, comm: MPI.Intracomm, source: int, tag: int) -> None:
        self._comm, self._source, self._tag = comm, source, tag
        self.status = MPI.Status()
        self.message: MPI.Message | None = None
        self.is_cancelled = False

    def is_matched(self) -> bool:
        """Tell whether the message has been matched; look for it otherwise."""
        if self.message is None:
            self.message = self._comm.Improbe(self._source, self._tag, self.status)
        return self.message is not None

    def Cancel(self) -> None:
        """Give the wait up, unless the message has been matched."""
        self.is_cancelled = self.message is None


class ProbedReceive:
    """A receive that begins once its message is there; in place of an MPI_Request.

    Args:
        queue: the receives of its communicator.
        buffer: what mpi4py receives to; None to match the message, and no more.
        source, tag: of the message; MPI_ANY_SOURCE and MPI_ANY_TAG too.
        status: where a probe describes the message.

    Attributes:
        message: the matched one.
        request: what receives it.
        error: why there is none.
        is_cancelled: whether it was given up.
    """

    def __init__(
        self, queue: ProbedReceives, buffer: list[Any] | None, source: int, tag: int, status: MPI.Status
    ) -> None:
        self._queue = queue
        self.buffer, self.source, self.tag, self.status = buffer, source, tag, status
        self.message: MPI.Message | None = None
        self.request: MPI.Request | None = None
        self.error: MPI.Exception | None = None
        self.is_cancelled = False

    def takes(self, source: int, tag: int) -> bool:
        """Tell whether a message from a rank with a tag, MPI_ANY_TAG for some tag, may be for this receive."""
        return self.source in (source, MPI.ANY_SOURCE) and (self.tag == tag or MPI.ANY_TAG in (self.tag, tag))

    def is_matched(self) -> bool:
        """Tell whether the message has been matched; look for it otherwise."""
        self._queue.match()
        if self.error is not None:
            raise self.error
        return self.message is not None

    def Test(self, status: MPI.Status) -> bool:
        """Tell whether the message has been received; look for it otherwise."""
        if self.is_cancelled:
            status.Set_cancelled(True)
            return True
        return self.is_matched() and bool(self.request.Test(status))  # type: ignore[union-attr]  # it has a buffer

    def Get_status(self) -> bool:
        """Tell whether the message has been received, or the receive was cancelled; look for it otherwise."""
        return self.is_cancelled or (self.is_matched() and self.request.Get_status())  # type: ignore[union-attr]

    def Wait(self, status: MPI.Status) -> bool:
        """Wait until the message has been received, or the receive was cancelled."""
        wait_until(lambda: self.Test(status))
        return True

    def Cancel(self) -> None:
        """Give the receive up, unless its message has been matched."""
        self.is_cancelled = self._queue.drop(self)


class ProbedReceives:
    """The receives of one communicator that wait for their messages, in the order in which they were made.

    Whoever was made first takes the first message that fits both (MPI 3.5). So while one waits, later ones for what it
    may take wait behind it, though they name the sender.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._waiting: list[ProbedReceive] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def begin(self, buffer: list[Any], source: int, tag: int) -> Any:
        """Begin to receive; return the request.

        Args:
            buffer: what mpi4py receives to.
            source, tag: of the message; MPI_ANY_SOURCE and MPI_ANY_TAG too.
        """
        with self._lock:
            if source != MPI.ANY_SOURCE and not any(each.takes(source, tag) for each in self._waiting):
                return self._comm.Irecv(buffer, source, tag)
        return self._add(buffer, source, tag, MPI.Status())

    def expect(self, source: int, tag: int) -> ProbedReceive:
        """Wait for a message that no earlier receive takes, to match it only; to be cancelled if it has not come."""
        return self._add(None, source, tag, MPI.Status())

    def Recv(self, buffer: list[Any], source: int, tag: int) -> None:
        """Receive."""
        self.begin(buffer, source, tag).Wait(MPI.Status())

    def match(self) -> None:
        """Give the messages that have come to the receives that they are for."""
        with self._lock:
            while not self._is_closed and self._match_one():
                pass

    def drop(self, receive: ProbedReceive) -> bool:
        """Forget a receive; tell whether its message had not come."""
        with self._lock:
            if receive in self._waiting:
                self._waiting.remove(receive)
                return True
        return False

    def close(self) -> None:
        """Look for no more messages, before the communicator is freed."""
        with self._lock:
            self._is_closed = True

    def _add(self, buffer: list[Any] | None, source: int, tag: int, status: MPI.Status) -> ProbedReceive:
        made = ProbedReceive(self, buffer, source, tag, status)
        with self._lock:
            self._waiting.append(made)
        self.match()
        return made

    def _match_one(self) -> bool:
        """Match a message; False if there is none.

        What a receive finds may have come after those before it were asked, and be for one of them, or follow a message
        that is. So it stays where it is then, and all are asked again.
        """
        for index, each in enumerate(self._waiting):
            status = each.status
            try:
                if not self._comm.Iprobe(each.source, each.tag, status):
                    continue
                source, tag = status.Get_source(), status.Get_tag()
                if any(earlier.takes(source, tag) for earlier in self._waiting[:index]):
                    return True
                each.message = self._comm.Improbe(source, tag, status)
                if each.message is None:  # a receive of another kind has taken it
                    continue
                if each.buffer is not None:
                    each.request = each.message.Irecv(each.buffer)
            except MPI.Exception as error:
                each.error = error
            self._waiting.remove(each)
            return True
        return False
