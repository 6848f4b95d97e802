"""Receives of one communicator: posted to MPI, or matched by a probe once the message has come (MPI 3.8.2).

No receive writes past its tensor. MPICH cuts a message that is longer than its buffer. Open MPI writes one above its
eager limit whole, if the buffer is one run of memory; so its receives are described as two runs at one place, for which
it unpacks and cuts the message. That takes up to twice the time for large messages, which are matched instead: their
length is known before they are received.

Under MPICH and ULFM a receive from anyone is matched. MPICH 5.0.2 over UCX never ends one that is posted after its
message has come from another node (2 + 2 and 1 + 2 ranks over TCP, plain mpi4py); a probe finds that message. ULFM
keeps a posted one after a death (MPI_ERR_PROC_FAILED_PENDING), so that it might write to its memory later.

MPI does not know of a receive that will be matched. While no thread waits for it, the progress thread probes for its
message. If MPI allows no such thread all are posted, since a sender may wait for this rank in another call.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.datatypes import BYTE, CUTS, receive_buffer, run, send_buffer
from hpcdist.backends.mpi.process import ulfm
from hpcdist.core.waiting import wait_until

PROBES = 1000  # probes before the first nap of a wait
LARGE = 1 << 15  # bytes, above which a receive is matched if MPI does not cut
ANYONE = MPI.ANY_SOURCE


class MatchedReceive:
    """A receive that begins once its message has come; has the methods of an MPI_Request.

    The message goes to the tensor, unless it is longer; without a tensor it is only matched.
    """

    def __init__(self, queue: Receives, tensor: torch.Tensor | None, source: int, tag: int) -> None:
        self._queue = queue
        self.tensor, self.source, self.tag = tensor, source, tag
        self.status = MPI.Status()  # the status of the probe
        self.message: MPI.Message | None = None  # the matched message
        self.request: MPI.Request | None = None  # the request that receives it
        self.error: MPI.Exception | None = None  # the error in place of a request
        self.is_cancelled = False  # whether it was cancelled

    def takes(self, source: int, tag: int) -> bool:
        """Tell whether a message from a rank, or from anyone, may be for this receive, if no earlier one takes it."""
        return self.tag == tag and (self.source == source or ANYONE in (source, self.source))

    def begin(self, matched: MPI.Message) -> None:
        """Begin to receive a matched message, into other memory if it is too long, so that its sender goes on."""
        if self.tensor is not None:
            length = self.status.Get_elements(BYTE)
            buffer = send_buffer(self.tensor)
            if length > self.tensor.nbytes:
                self._spare = MPI.buffer.allocate(length)
                buffer = [self._spare, *run(length)]
            self.request = matched.Irecv(buffer)
        self.message = matched  # set last: a waiting thread reads it without the lock, and then tests the request

    def is_matched(self) -> bool:
        """Tell whether the message has been matched; probe for it otherwise."""
        if self.message is None:
            self._queue.match()
            if self.error is not None:
                raise self.error
        return self.message is not None

    def Test(self, status: MPI.Status) -> bool:
        """Tell whether the message has been received; probe for it otherwise."""
        if self.is_cancelled:
            status.Set_cancelled(True)
            return True
        return self.is_matched() and bool(self.request.Test(status))  # type: ignore[union-attr]  # it has a tensor

    def Get_status(self) -> bool:
        """Tell whether the message has been received, or the receive was cancelled; probe for it otherwise."""
        return self.is_cancelled or (self.is_matched() and self.request.Get_status())  # type: ignore[union-attr]

    def Wait(self, status: MPI.Status) -> bool:
        wait_until(lambda: self.Test(status), looks=PROBES)
        return True

    def Cancel(self) -> None:
        """Give the receive up, unless its message has been matched."""
        self.is_cancelled = self._queue.drop(self)


class Receives:
    """The receives of one communicator; those that will be matched wait here in the order in which they were made.

    The earlier of two receives gets the first message that fits both (MPI 3.5). So while one waits, later ones that fit
    the same messages wait behind it, even if they could be posted.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.posts_anyone = not CUTS and not ulfm.is_tolerant()  # whether a receive from any source is posted
        self.waiting: list[MatchedReceive] = []  # receives that will be matched
        self._lock = threading.Lock()
        self._is_closed = False
        self._has_threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def begin(self, tensor: torch.Tensor, src: int | None, tag: int, blocks: bool = False) -> Any:
        """Begin to receive; return the request. ``blocks``: its rank waits for it at once."""
        source = ANYONE if src is None else src
        is_posted = (CUTS or tensor.nbytes <= LARGE) and (src is not None or self.posts_anyone)
        if is_posted or not (blocks or self._has_threads):
            with self._lock:
                if not any(each.takes(source, tag) for each in self.waiting):
                    return self._comm.Irecv(receive_buffer(tensor), source, tag)
        return self._add(tensor, source, tag)

    def expect(self, src: int | None, tag: int) -> MatchedReceive:
        """Begin a receive that only matches a message which no earlier one takes; can be cancelled until it comes."""
        return self._add(None, ANYONE if src is None else src, tag)

    def match(self) -> None:
        """Match the messages that have come with the receives that wait."""
        with self._lock:
            while self.waiting and not self._is_closed and self._match_one():
                pass

    def drop(self, receive: MatchedReceive) -> bool:
        """Remove a receive; tell whether its message had not come."""
        with self._lock:
            if receive in self.waiting:
                self.waiting.remove(receive)
                return True
        return False

    def close(self) -> None:
        """Stop probing, before the communicator is freed."""
        with self._lock:
            self._is_closed = True

    def _add(self, tensor: torch.Tensor | None, source: int, tag: int) -> MatchedReceive:
        made = MatchedReceive(self, tensor, source, tag)
        with self._lock:
            self.waiting.append(made)
        self.match()
        return made

    def _match_one(self) -> bool:
        """Match a message; False if there is none.

        A message that a receive's probe finds may have come after the earlier receives were probed, and fit one of
        them, or follow one that does. So it is not matched then, and all receives are probed again.
        """
        for index, each in enumerate(self.waiting):
            status = each.status
            try:
                source, tag = each.source, each.tag
                if index:  # there is none before the first one
                    if not self._comm.Iprobe(source, tag, status):
                        continue
                    source, tag = status.Get_source(), status.Get_tag()
                    if any(earlier.takes(source, tag) for earlier in self.waiting[:index]):
                        return True
                matched = self._comm.Improbe(source, tag, status)
                if matched is None:  # it has not come, or a posted receive has taken it
                    continue
                each.begin(matched)
            except MPI.Exception as error:
                each.error = error
            self.waiting.remove(each)
            return True
        return False
