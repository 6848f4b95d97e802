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
from hpcdist.backends.mpi.datatypes import BYTE, landing, message
from hpcdist.backends.mpi.receives import LARGE
from hpcdist.backends.mpi.requests import Requests, RequestWork
from hpcdist.core.backend import Message
from hpcdist.core.journal import Journal
from hpcdist.core.unfinished import Unfinished
from hpcdist.core.work import Work


class PointToPoint:
    """Sends and receives on one communicator."""

    def __init__(self, communicator: Communicator, unfinished: Unfinished) -> None:
        self._communicator = communicator
        self._begun = partial(RequestWork, Requests(communicator, unfinished))
        self._comm = communicator.comm

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        """Send by MPI_Send (MPI 3.2.1)."""
        self._send(message(tensor), dst, tag)

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> int:
        """Receive by MPI_Irecv and MPI_Wait (MPI 3.7): unlike MPI_Recv, past the timeout it can be cancelled."""
        return self._recv(tensor, src, tag)

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

    def between(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> Callable[[Journal], None]:
        """Describe messages to MPI once; return what exchanges them."""
        return MessageSet(self._communicator, sends, recvs, tag, self._begun)

    def _send(self, buffer: list[Any], dst: int, tag: int) -> None:
        try:
            self._comm.Send(buffer, dst, tag)
        except MPI.Exception as error:
            raise self._communicator.failure("send", error) from error

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> int:
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
            communicator.check_length("recv", status, nbytes)
        return status.Get_source()


class MessageSet:
    """Messages to and from some ranks on memory that stays, exchanged by MPI_Isend, MPI_Irecv and MPI_Wait (MPI 3.7).

    Each receive is waited for by itself, so that past the timeout it can be cancelled; the others are cancelled then.
    """

    def __init__(
        self,
        communicator: Communicator,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        tag: int,
        begun: Callable[..., Work],
    ) -> None:
        self._communicator, self._begun, self._receives = communicator, begun, len(recvs)
        self._messages: list[tuple[Any, ...]] = []  # the tensor, MPI's call, what it takes, and the journal's words
        receive, send = communicator.receives.begin, communicator.comm.Isend
        for tensor, peer in recvs:
            self._messages.append((tensor, receive, tensor, peer, "irecv", tensor.shape, tensor.dtype))
        for tensor, peer in sends:
            self._messages.append((tensor, send, message(tensor), peer, "isend", tensor.shape, tensor.dtype))
        self._tag = tag

    def __call__(self, journal: Journal) -> None:
        """Exchange the messages.

        Raises:
            DistBackendError: MPI failed, or a receive was cancelled.
        """
        communicator, tag = self._communicator, self._tag
        begun: list[tuple[tuple[Any, ...], Any]] = []
        status, failure = MPI.Status(), None
        try:
            for _, call, buffer, peer, name, shape, dtype in self._messages:
                record = journal.message(name, shape, dtype, peer)
                begun.append((record, call(buffer, peer, tag)))
            for index, (record, request) in enumerate(begun):
                with journal.blocking(record):
                    failure = self._await(request, index, status) or failure
        except BaseException as error:
            self._give_up([request for _, request in begun])
            if isinstance(error, MPI.Exception):
                raise communicator.failure("exchange", error) from error
            raise
        if failure is not None:
            raise failure

    def _await(self, request: Any, index: int, status: MPI.Status) -> Exception | None:
        """Wait for a message; return the error of one that was too long, after which the others still come."""
        if index >= self._receives:
            request.Wait()
            return None
        communicator, nbytes = self._communicator, self._messages[index][0].nbytes
        communicator.receiving[get_ident()] = token = Token(request)
        try:
            request.Wait(status)
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            return communicator.failed_receive("exchange", error, status, nbytes)
        finally:
            del communicator.receiving[get_ident()]
        token.check(status)
        if status.Get_count(BYTE) > nbytes:
            return communicator.too_long("exchange", status, nbytes, f"{status.Get_elements(BYTE):,}")
        return None

    def _give_up(self, requests: list[Any]) -> None:
        """Cancel the receives that have not ended, and keep the memory of all messages until they have."""
        for index, request in enumerate(requests):
            if request == MPI.REQUEST_NULL:
                continue
            tensor, is_receive = self._messages[index][0], index < self._receives
            if is_receive:
                with suppress(MPI.Exception):
                    request.Cancel()
            self._begun(request, tensor, [tensor] if is_receive else []).is_completed()
