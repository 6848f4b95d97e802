"""Messages of tensors over one MPI communicator, and their Work."""

from __future__ import annotations

import threading
from _thread import allocate_lock, get_ident
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.communicator import Communicator, Token
from hpcdist.backends.mpi.datatypes import BYTE, CUTS, Descriptions, receive_buffer, send_buffer
from hpcdist.backends.mpi.process import ulfm
from hpcdist.backends.mpi.progress import PROGRESS
from hpcdist.backends.mpi.receives import ANYONE, LARGE, MatchedReceive
from hpcdist.core.backend import Message
from hpcdist.core.errors import DistBackendError
from hpcdist.core.journal import Journal
from hpcdist.core.waiting import wait_until
from hpcdist.core.work import DoneWork, Work


class PointToPoint:
    """Sends and receives on one communicator."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._begun = partial(RequestWork, communicator)
        self.between = partial(MessageSet, communicator, self._begun)
        self._comm = communicator.comm
        self._sent, self._received = Descriptions(send_buffer), Descriptions(receive_buffer)
        PROGRESS.follow(communicator)

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        """Send by MPI_Send (MPI 3.2.1)."""
        try:
            place = tensor.data_ptr(), tensor.nbytes
            self._comm.Send(self._sent.get(place) or self._sent.add(place, tensor), dst, tag)
        except MPI.Exception as error:
            raise self._communicator.failure("send", error) from error

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> int:
        """Receive by MPI_Irecv and MPI_Wait (MPI 3.7): unlike MPI_Recv, past the timeout it can be cancelled."""
        communicator, nbytes = self._communicator, tensor.nbytes
        receives, status, request = communicator.receives, MPI.Status(), None
        try:
            if nbytes <= LARGE and (src is not None or receives.posts_anyone) and not receives.waiting:  # ``irecv``
                place = tensor.data_ptr(), nbytes
                buffer = self._received.get(place) or self._received.add(place, tensor)
                request = self._comm.Irecv(buffer, ANYONE if src is None else src, tag)
            else:
                request = receives.begin(tensor, src, tag, blocks=True)
            communicator.receiving[get_ident()] = token = Token(request)
            request.Wait(status)
        except MPI.Exception as error:
            raise communicator.failed_receive("recv", error, status, nbytes) from error
        except BaseException:  # Ctrl-C, for which the watchdog may have cancelled the receive
            if request is not None:
                with suppress(MPI.Exception):
                    request.Cancel()
                self._begun(request, tensor, nbytes).is_completed()  # kept until it has ended
            raise
        finally:
            communicator.receiving.pop(get_ident(), None)
        if token.reason:
            token.check(status)
        if status.Get_elements(BYTE) > nbytes:
            raise communicator.too_long("recv", status, nbytes)
        return status.Get_source()

    def isend(self, tensor: torch.Tensor, dst: int, tag: int, finish: Callable[[], None] | None = None) -> Work:
        """Begin to send by MPI_Isend (MPI 3.7.2)."""
        place, request = (tensor.data_ptr(), tensor.nbytes), None
        try:
            request = self._comm.Isend(self._sent.get(place) or self._sent.add(place, tensor), dst, tag)
            if finish is None and request.Test():  # as most small ones; a Work of a message under way takes 1 µs more
                return DoneWork([])
        except MPI.Exception as error:
            failure = self._communicator.failure("isend", error)
            if request is not None:  # MPI may still read the tensor
                ulfm.settle(request, tensor)
            raise failure from error
        return RequestWork(self._communicator, request, tensor, None, finish)

    def irecv(self, tensor: torch.Tensor, src: int | None, tag: int, finish: Callable[[], None] | None) -> Work:
        """Begin to receive by MPI_Irecv (MPI 3.7.2)."""
        communicator, nbytes = self._communicator, tensor.nbytes
        receives = communicator.receives
        try:
            # shorter, for latency
            if nbytes <= LARGE and (src is not None or receives.posts_anyone) and not receives.waiting:
                place = tensor.data_ptr(), nbytes
                buffer = self._received.get(place) or self._received.add(place, tensor)
                request = self._comm.Irecv(buffer, ANYONE if src is None else src, tag)
            else:
                request = receives.begin(tensor, src, tag)
        except MPI.Exception as error:
            raise communicator.failure("irecv", error) from error
        return RequestWork(communicator, request, tensor, nbytes, finish)


class MessageSet:
    """Messages to and from some ranks on fixed memory, exchanged by MPI_Isend, MPI_Irecv and MPI_Wait (MPI 3.7).

    Each receive has a wait of its own, so that past the timeout it can be cancelled; then the others are cancelled too.
    """

    def __init__(
        self,
        communicator: Communicator,
        begun: Callable[..., Work],
        sends: Sequence[Message],
        recvs: Sequence[Message],
        tag: int,
    ) -> None:
        self._communicator, self._begun, self._tag = communicator, begun, tag
        # the tensor, its buffer for MPI, its bytes, the peer, and the words of the record
        self._receives = []
        for tensor, peer in recvs:
            nbytes = tensor.nbytes
            buffer = receive_buffer(tensor) if CUTS or nbytes <= LARGE else None  # else it may need a matched receive
            self._receives.append((tensor, buffer, nbytes, peer, tensor.shape, tensor.dtype))
        self._sends = [(tensor, send_buffer(tensor), peer, tensor.shape, tensor.dtype) for tensor, peer in sends]

    def __call__(self, journal: Journal) -> None:
        """Exchange the messages."""
        records: list[tuple[Any, ...]] = []
        requests: list[Any] = []
        try:
            self._begin(journal, records, requests)
            failure = self._end(journal, records, requests) if requests else None
        except BaseException as error:
            self._give_up(requests)
            if isinstance(error, MPI.Exception):
                raise self._communicator.failure("exchange", error) from error
            raise
        if failure is not None:
            raise failure

    def _begin(self, journal: Journal, records: list[tuple[Any, ...]], requests: list[Any]) -> None:
        """Begin the messages, receives first, and add their records and requests."""
        communicator, tag, push = self._communicator, self._tag, journal.push
        receives, receive, send = communicator.receives, communicator.comm.Irecv, communicator.comm.Isend
        for tensor, buffer, _, peer, shape, dtype in self._receives:
            journal.messages = number = journal.messages + 1  # ``Journal.message`` without a call, for latency
            records.append(record := (journal, number, "irecv", shape, dtype, peer))
            push(record)
            if buffer is not None and not receives.waiting:  # shorter, for latency
                requests.append(receive(buffer, peer, tag))
            else:
                requests.append(receives.begin(tensor, peer, tag))
        for _, buffer, peer, shape, dtype in self._sends:
            journal.messages = number = journal.messages + 1
            records.append(record := (journal, number, "isend", shape, dtype, peer))
            push(record)
            requests.append(send(buffer, peer, tag))

    def _end(self, journal: Journal, records: list[tuple[Any, ...]], requests: list[Any]) -> Exception | None:
        """Wait for the messages; return the error of one that was too long: the others are still received."""
        communicator, status, failure = self._communicator, MPI.Status(), None
        for record, request, (_, _, nbytes, *_) in zip(records, requests, self._receives, strict=False):
            try:
                if not request.Test(status):  # once one has come, most others have too
                    communicator.receiving[get_ident()] = token = Token(request)
                    try:
                        journal.run(record, request.Wait, status)
                    finally:
                        del communicator.receiving[get_ident()]
                    if token.reason:
                        token.check(status)
            except MPI.Exception as error:
                if error.Get_error_class() != MPI.ERR_TRUNCATE:
                    raise
                failure = communicator.failed_receive("exchange", error, status, nbytes)
            else:
                if status.Get_elements(BYTE) > nbytes:
                    failure = communicator.too_long("exchange", status, nbytes)
        for index in range(len(self._receives), len(requests)):
            if not requests[index].Test():
                journal.run(records[index], requests[index].Wait, None)
        return failure

    def _give_up(self, requests: list[Any]) -> None:
        """Cancel the receives that have not ended, and keep the memory of all messages until they have."""
        for index, request in enumerate(requests):
            if request == MPI.REQUEST_NULL:
                continue
            tensor, is_receive = [*self._receives, *self._sends][index][0], index < len(self._receives)
            if is_receive:
                with suppress(MPI.Exception):
                    request.Cancel()
            self._begun(request, tensor, self._receives[index][2] if is_receive else None).is_completed()


class RequestWork(Work):
    """An MPI_Isend or MPI_Irecv under way; it holds the buffer until the request is complete.

    The result is the tensor of a receive, empty for a send; ``finish`` runs when the message has ended.
    """

    __slots__ = ("_buffer", "_communicator", "_request", "_room", "_status", "_turn", "_when_done")

    _has_ended = False  # although no thread has completed the request
    _is_driven = False  # set by the progress thread, which has the turn meanwhile
    _reason: str | None = None  # the reason of a cancellation
    _after: tuple[str, float] | None = None  # why the group has ended, and the seconds that a wait may take then

    def __init__(
        self,
        communicator: Communicator,
        request: MPI.Request | MatchedReceive,
        buffer: torch.Tensor,
        room: int | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._done, self._has_half, self._error, self._call = False, False, None, None
        self._communicator = communicator
        self._request = request
        self._buffer: torch.Tensor | None = buffer
        self._when_done = finish
        self._room = room  # the bytes of a receive's buffer; None of a send
        self._status: Any
        if room is None:
            self._result, self._status = [], None
        else:
            self._result, self._status = [buffer], MPI.Status()
        self._turn = allocate_lock()  # one thread at a time may complete a request (MPI 11.6.2)
        unfinished = communicator.unfinished
        if len(unfinished) >= unfinished.limit:  # the same as ``hold``, without the call, for latency
            unfinished.sweep()
        unfinished[self] = None
        if PROGRESS.is_asleep:
            PROGRESS.wake()

    def _carry_out(self) -> bool:
        """Complete the request, if no other thread does; blocks as ``_await`` and ``_block`` do."""
        call, turn = self._call, self._turn
        if call is None or not turn.acquire(False):
            return self._done
        try:
            if not self._done:
                self._complete(self._request.Test)  # most have ended; to record a blocked call would double the cost
                if not self._done:
                    call[0].run(call, self._complete, self._request.Wait, self)
        finally:
            turn.release()
        return self._done

    def _block(self, seconds: float | None) -> bool:
        if seconds is not None:
            return wait_until(self.is_completed, seconds)
        if self._after is not None:
            reason, limit = self._after
            if not wait_until(self.is_completed, limit):
                raise DistBackendError(f"{reason}, and a message that is still under way has not ended in {limit:g} s")
            return True
        with self._turn:
            if not self._done:
                self._complete(self._request.Wait)
        return True

    def _outlive(self, reason: str, seconds: float) -> None:
        self._call, self._after = None, (reason, seconds)

    def _poll(self) -> None:
        if self._turn.acquire(self._is_driven):  # not while another thread waits
            try:
                if not self._done:
                    self._complete(self._request.Test)
            finally:
                self._turn.release()

    def _is_under_way(self) -> bool:
        """Tell whether the message is under way; drives MPI, and completes nothing (MPI_Request_get_status, 3.7.6)."""
        if self._has_ended:
            return False
        if not self._turn.acquire(False):  # another thread waits for it, in MPI
            return True
        self._is_driven = True
        try:
            self._has_ended = self._done or self._request.Get_status()
        except MPI.Exception:  # raised again in the wait
            self._has_ended = True
        finally:
            self._is_driven = False
            self._turn.release()
        return not self._has_ended

    def _interrupt(self, reason: str) -> bool:
        """Cancel a receive, which ends its wait (MPI 3.8.4), once: see ``Token``; a send cannot be cancelled."""
        if not self._result:
            return False
        if self._reason is None:
            self._reason = reason
            self._request.Cancel()
        return True

    def _complete(self, call: Callable[..., bool]) -> None:
        communicator, buffer = self._communicator, self._buffer
        error: Exception | None = None
        try:
            if not call(self._status):
                return
            if self._reason is not None and self._status.Is_cancelled():
                error = DistBackendError(self._reason)
            elif self._room is not None and self._status.Get_elements(BYTE) > self._room:
                error = communicator.too_long("irecv", self._status, self._room)
            if error is None and self._when_done is not None:
                self._when_done()
        except MPI.Exception as failure:
            if self._room is not None:
                error = communicator.failed_receive("irecv", failure, self._status, self._room)
            else:
                error = communicator.failure("isend", failure)
            error.__cause__ = failure
            if isinstance(self._request, MPI.Request):
                ulfm.settle(self._request, buffer)
        self._buffer = self._when_done = None
        self._error = error  # ``_finish`` without a call
        if self._is_asked:
            self._end_event()
        self._done = True
        communicator.unfinished.pop(self, None)
        if self._is_asked:
            self._tell()

    def _pursue(self) -> None:
        threading.Thread(target=self._block, args=(None,), name="hpcdist-message", daemon=True).start()

    def source_rank(self) -> int:
        """Return the sender of a receive, as a rank of the group; the Work must have ended."""
        if not self._result:
            return super().source_rank()
        self.wait()
        return self._status.Get_source()
