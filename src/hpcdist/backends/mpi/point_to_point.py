"""Messages of tensors over one MPI communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.datatypes import message
from hpcdist.backends.mpi.requests import Requests
from hpcdist.core.backend import Message
from hpcdist.core.journal import Journal
from hpcdist.core.supervised import Unfinished
from hpcdist.core.work import Work


class PointToPoint:
    """Sends and receives on one communicator."""

    def __init__(self, communicator: Communicator, unfinished: Unfinished) -> None:
        self._communicator = communicator
        self._begun = Requests(communicator, unfinished).begun
        self._comm = communicator.comm

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        """Send by MPI_Send (MPI 3.2.1)."""
        self._send(message(tensor), dst, tag)

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> int:
        """Receive by MPI_Irecv and MPI_Wait (MPI 3.7): unlike MPI_Recv, past the timeout it can be cancelled."""
        return self._recv(message(tensor), src, tag)

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        """Begin to send by MPI_Isend (MPI 3.7.2)."""
        try:
            request = self._comm.Isend(message(tensor), dst, tag)
        except MPI.Exception as error:
            raise self._communicator.failure("isend", error) from error
        return self._begun(request, tensor, [])

    def irecv(self, tensor: torch.Tensor, src: int | None, tag: int, finish: Callable[[], None] | None) -> Work:
        """Begin to receive by MPI_Irecv (MPI 3.7.2)."""
        try:
            if src is not None and self._communicator.probed is None:
                request = self._comm.Irecv(message(tensor), src, tag)
            else:
                request = self._communicator.begin_receive(message(tensor), src, tag)
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

    def _recv(self, buffer: list[Any], src: int | None, tag: int) -> int:
        communicator = self._communicator
        status = MPI.Status()
        try:
            communicator.receiving = request = communicator.begin_receive(buffer, src, tag)
            request.Wait(status)
        except MPI.Exception as error:
            raise communicator.failure("recv", error) from error
        except KeyboardInterrupt:  # the watchdog has cancelled the receive for it
            communicator.interruption = None
            raise
        finally:
            communicator.receiving = None
        if communicator.interruption is not None:
            communicator.check_cancelled(status)
        return status.Get_source()


class MessageSet:
    """Messages to and from some ranks on memory that stays, exchanged by MPI_Isend, MPI_Irecv and MPI_Wait (MPI 3.7).

    Each receive is waited for by itself, so that past the timeout it can be cancelled; the others are cancelled then.
    Receives name their senders, and no user has the tag, so that none has to be probed for.
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
        receive, send = communicator.comm.Irecv, communicator.comm.Isend
        for tensor, peer in recvs:
            self._messages.append((tensor, receive, message(tensor), peer, "irecv", tensor.shape, tensor.dtype))
        for tensor, peer in sends:
            self._messages.append((tensor, send, message(tensor), peer, "isend", tensor.shape, tensor.dtype))
        self._tag = tag

    def __call__(self, journal: Journal) -> None:
        """Exchange the messages.

        Raises:
            DistBackendError: MPI failed, or a receive was cancelled.
        """
        communicator, tag, receives = self._communicator, self._tag, self._receives
        begun: list[tuple[tuple[Any, ...], MPI.Request]] = []
        status = MPI.Status()
        is_first = False
        try:
            for _, call, buffer, peer, name, shape, dtype in self._messages:
                record = journal.message(name, shape, dtype, peer)
                begun.append((record, call(buffer, peer, tag)))
            for record, request in begun:
                receives -= 1
                if not is_first and journal.current is not None:  # another thread's call blocks
                    with journal.begin(record):
                        request.Wait(status)
                    continue
                journal.current, is_first = record, True
                communicator.receiving = request if receives >= 0 else None
                request.Wait(status)
                if communicator.interruption is not None and receives >= 0:
                    communicator.check_cancelled(status)
        except BaseException as error:
            if is_first:
                communicator.receiving = None
            self._give_up([request for _, request in begun])
            if isinstance(error, MPI.Exception):
                raise communicator.failure("exchange", error) from error
            raise
        finally:
            if is_first:
                communicator.receiving = journal.current = None

    def _give_up(self, requests: list[MPI.Request]) -> None:
        """Cancel the receives that have not ended, and keep the memory of the sends until they have."""
        for index, request in enumerate(requests):
            if request == MPI.REQUEST_NULL:
                continue
            if index < self._receives:
                with suppress(MPI.Exception):
                    request.Cancel()
                    request.Wait()
            else:
                self._begun(request, self._messages[index][0], [])
