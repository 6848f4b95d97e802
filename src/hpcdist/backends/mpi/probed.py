"""Receives by matched probe (MPI 3.8.2), for an MPI whose receives from any rank may hang.

MPICH 5.0.2 over UCX never ends a receive with MPI_ANY_SOURCE if the message came from another node before the receive
was made (2 + 2 and 1 + 2 ranks over TCP, plain mpi4py); MPI_Test itself hangs then. MPI_Improbe finds that message, and
the receive of a matched message ends. Over libfabric (``MPICH_CH4_NETMOD=ofi``) nothing hangs.
"""

from __future__ import annotations

import os
import re
import threading
import time
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


class ProbedReceive:
    """A receive that begins once its message is there; in place of an MPI_Request.

    Args:
        queue: the receives of its communicator.
        buffer: what mpi4py receives to.
        source, tag: of the message; MPI_ANY_SOURCE and MPI_ANY_TAG too.
    """

    def __init__(self, queue: ProbedReceives, buffer: list[Any], source: int, tag: int) -> None:
        self._queue = queue
        self.buffer, self.source, self.tag = buffer, source, tag
        self.request: MPI.Request | None = None
        self.error: MPI.Exception | None = None
        self._is_cancelled = False

    def Test(self, status: MPI.Status) -> bool:
        """Tell whether the message has been received; look for it otherwise."""
        if self._is_cancelled:
            status.Set_cancelled(True)
            return True
        self._queue.match()
        if self.error is not None:
            raise self.error
        return self.request is not None and bool(self.request.Test(status))

    def Wait(self, status: MPI.Status) -> bool:
        """Wait until the message has been received, or the receive was cancelled."""
        spins, began = 0, time.monotonic()
        while not self.Test(status):
            spins += 1
            if spins > SPINS:
                nap(time.monotonic() - began)
        return True

    def Cancel(self) -> None:
        """Give the receive up, unless its message has been matched."""
        self._is_cancelled = self._queue.drop(self)


class ProbedReceives:
    """The receives of one communicator that wait for their messages, in the order in which they were made.

    While one from any rank waits, later ones with named ranks wait behind it: whoever was made first takes the first
    message that fits both (MPI 3.5).
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._waiting: list[ProbedReceive] = []
        self._lock = threading.Lock()

    def begin(self, buffer: list[Any], source: int | None, tag: int) -> Any:
        """Begin to receive; return the request."""
        if source is not None and not self._waiting:
            return self._comm.Irecv(buffer, source, tag)
        made = ProbedReceive(self, buffer, MPI.ANY_SOURCE if source is None else source, tag)
        with self._lock:
            self._waiting.append(made)
        self.match()
        return made

    def match(self) -> None:
        """Give the messages that have come to the receives that they fit."""
        with self._lock:
            for each in list(self._waiting):
                try:
                    message = self._comm.Improbe(each.source, each.tag)
                    if message is None:
                        continue
                    each.request = message.Irecv(each.buffer)
                except MPI.Exception as error:
                    each.error = error
                self._waiting.remove(each)

    def drop(self, receive: ProbedReceive) -> bool:
        """Forget a receive; tell whether its message had not come."""
        with self._lock:
            if receive in self._waiting:
                self._waiting.remove(receive)
                return True
        return False
