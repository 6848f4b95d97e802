"""Messages of tensors over one MPI communicator."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.communicator import Communicator, Token
from hpcdist.backends.mpi.datatypes import BYTE, CUTS, landing, message
from hpcdist.backends.mpi.progress import PROGRESS
from hpcdist.backends.mpi.receives import LARGE
from hpcdist.backends.mpi.requests import RequestWork
from hpcdist.core.backend import Message
from hpcdist.core.journal import Journal
from hpcdist.core.work import Work


class PointToPoint:
    """Sends and receives on one communicator."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._begun = partial(RequestWork, communicator)
        self.between = partial(MessageSet, communicator, self._begun)
        self._comm = communicator.comm
        PROGRESS.follow(communicator)

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        """Send by MPI_Send (MPI 3.2.1)."""
        try:
            self._comm.Send(message(tensor), dst, tag)
        except MPI.Exception as error:
            raise self._communicator.failure("send", error) from error

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> int:
        """Receive by MPI_Irecv and MPI_Wait (MPI 3.7): unlike MPI_Recv, past the timeout it can be cancelled."""
        communicator, nbytes = self._communicator, tensor.nbytes
        receives, status, request = communicator.receives, MPI.Status(), None
        try:
            if src is not None and not receives.waiting and nbytes <= LARGE:  # the short way, for latency
                request = self._comm.Irecv(landing(tensor), src, tag)
            else:
                request = receives.begin(tensor, src, tag, blocks=True)
            communicator.receiving[get_ident()] = token = Token(request)
            request.Wait(status)
        except MPI.Exception as error:
            raise communicator.failed_receive("recv", error, status, nbytes) from error
        except BaseException:  # Ctrl-C, which the watchdog may have cancelled the receive for
            if request is not None:
                with suppress(MPI.Exception):
                    request.Cancel()
                self._begun(request, tensor, [tensor]).is_completed()  # kept until it has ended
            raise
        finally:
            communicator.receiving.pop(get_ident(), None)
        if token.reason:
            token.check(status)
        if status.Get_count(BYTE) > nbytes:
            raise communicator.too_long("recv", status, nbytes)
        return status.Get_source()

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        """Begin to send by MPI_Isend (MPI 3.7.2)."""
        try:
            request = self._comm.Isend(message(tensor), dst, tag)
        except MPI.Exception as error:
            raise self._communicator.failure("isend", error) from error
        return self._begun(request, tensor, [])

    def irecv(self, tensor: torch.Tensor, src: int | None, tag: int, finish: Callable[[], None] | None) -> Work:
        """Begin to receive by MPI_Irecv (MPI 3.7.2)."""
        receives = self._communicator.receives
        try:
            if src is not None and not receives.waiting and tensor.nbytes <= LARGE:  # the short way, for latency
                request = self._comm.Irecv(landing(tensor), src, tag)
            else:
                request = receives.begin(tensor, src, tag)
        except MPI.Exception as error:
            raise self._communicator.failure("irecv", error) from error
        return self._begun(request, tensor, [tensor], finish)


class MessageSet:
    """Messages to and from some ranks on memory that stays, exchanged by MPI_Isend, MPI_Irecv and MPI_Wait (MPI 3.7).

    Each receive is waited for by itself, so that past the timeout it can be cancelled; the others are cancelled then.
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
        # the tensor, what MPI takes of it, its bytes, the peer, and the journal's words
        self._receives = []
        for tensor, peer in recvs:
            nbytes = tensor.nbytes
            buffer = landing(tensor) if CUTS or nbytes <= LARGE else None  # else it may have to be matched
            self._receives.append((tensor, buffer, nbytes, peer, tensor.shape, tensor.dtype))
        self._sends = [(tensor, message(tensor), peer, tensor.shape, tensor.dtype) for tensor, peer in sends]

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
            if buffer is not None and not receives.waiting:  # the short way, for latency
                requests.append(receive(buffer, peer, tag))
            else:
                requests.append(receives.begin(tensor, peer, tag))
        for _, buffer, peer, shape, dtype in self._sends:
            journal.messages = number = journal.messages + 1
            records.append(record := (journal, number, "isend", shape, dtype, peer))
            push(record)
            requests.append(send(buffer, peer, tag))

    def _end(self, journal: Journal, records: list[tuple[Any, ...]], requests: list[Any]) -> Exception | None:
        """Wait for the messages; return the error of one that was too long, after which the others still come."""
        communicator, status, failure = self._communicator, MPI.Status(), None
        for record, request, (_, _, nbytes, *_) in zip(records, requests, self._receives, strict=False):
            try:
                if not request.Test(status):  # once one has come, most others have
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
                if status.Get_count(BYTE) > nbytes:
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
            self._begun(request, tensor, [tensor] if is_receive else []).is_completed()
