"""Messages of tensors over one MPI communicator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi import probed
from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.datatypes import message
from hpcdist.backends.mpi.requests import RequestWork
from hpcdist.core.errors import DistBackendError
from hpcdist.core.work import Work


class PointToPoint:
    """Sends and receives on one communicator."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._comm = communicator.comm
        self._probed: probed.ProbedReceives | None = None

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
        return RequestWork(request, tensor, [], None)

    def irecv(self, tensor: torch.Tensor, src: int | None, tag: int, finish: Callable[[], None] | None) -> Work:
        """Begin to receive by MPI_Irecv (MPI 3.7.2)."""
        try:
            request = self._begin_receive(message(tensor), src, tag)
        except MPI.Exception as error:
            raise self._communicator.failure("irecv", error) from error
        return RequestWork(request, tensor, [tensor], finish)

    def _send(self, buffer: list[Any], dst: int, tag: int) -> None:
        try:
            self._comm.Send(buffer, dst, tag)
        except MPI.Exception as error:
            raise self._communicator.failure("send", error) from error

    def _recv(self, buffer: list[Any], src: int | None, tag: int) -> int:
        communicator = self._communicator
        status = MPI.Status()
        try:
            communicator.receiving = request = self._begin_receive(buffer, src, tag)
            request.Wait(status)
        except MPI.Exception as error:
            raise communicator.failure("recv", error) from error
        finally:
            communicator.receiving = None
        if communicator.interruption is not None:
            reason, communicator.interruption = communicator.interruption, None
            if status.Is_cancelled():  # and not come at the last moment
                raise DistBackendError(reason)
        return status.Get_source()

    def _begin_receive(self, buffer: list[Any], src: int | None, tag: int) -> Any:
        """Begin to receive by MPI_Irecv, or by matched probe if this MPI may hang in a receive from any rank."""
        if src is None and self._probed is None and probed.is_needed():
            self._probed = probed.ProbedReceives(self._comm)
        if self._probed is not None:
            return self._probed.begin(buffer, src, tag)
        return self._comm.Irecv(buffer, MPI.ANY_SOURCE if src is None else src, tag)
