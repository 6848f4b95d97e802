"""How do messages travel over MPI, and how is a receive taken back that nobody answers?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi import probed, repeated
from hpcdist.backends.mpi.datatypes import message
from hpcdist.backends.mpi.objects import PicklingBackend
from hpcdist.backends.mpi.requests import RequestWork
from hpcdist.core.errors import DistBackendError
from hpcdist.core.work import Work


class MessagingBackend(PicklingBackend):
    """The messages of a backend that has an MPI communicator.

    Attributes:
        interruption: why a blocked call was made to raise.
    """

    interruption: str | None = None
    _receiving: MPI.Request | probed.ProbedReceive | None = None  # the receive that blocks now
    _probed: probed.ProbedReceives | None = None

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        """Send by MPI_Send (MPI 3.2.1)."""
        self.send_memory(message(tensor), dst, tag)

    def send_memory(self, buffer: list[Any], dst: int, tag: int) -> None:
        """Send what a buffer of MPI describes."""
        try:
            self.comm.Send(buffer, dst, tag)
        except MPI.Exception as error:
            raise self._failure("send", error) from error

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> int:
        """Receive by MPI_Irecv and MPI_Wait (MPI 3.7): unlike MPI_Recv, past the timeout it can be cancelled."""
        return self.recv_memory(message(tensor), src, tag)

    def recv_memory(self, buffer: list[Any], src: int | None, tag: int) -> int:
        """Receive to what a buffer of MPI describes, and return the sender."""
        status = MPI.Status()
        try:
            request = self._begin_receive(buffer, src, tag)
            self._receiving = request
            request.Wait(status)
        except MPI.Exception as error:
            raise self._failure("recv", error) from error
        finally:
            self._receiving = None
        if self.interruption is not None:
            reason, self.interruption = self.interruption, None
            if status.Is_cancelled():  # and not come at the last moment
                raise DistBackendError(reason)
        return status.Get_source()

    def _begin_receive(self, buffer: list[Any], src: int | None, tag: int) -> Any:
        """Begin to receive by MPI_Irecv, or by matched probe where this MPI may hang in a receive from any rank."""
        if src is None and self._probed is None and probed.is_needed():
            self._probed = probed.ProbedReceives(self.comm)
        if self._probed is not None:
            return self._probed.begin(buffer, src, tag)
        return self.comm.Irecv(buffer, MPI.ANY_SOURCE if src is None else src, tag)

    def repeated_message(self, what: str) -> Callable[[torch.Tensor, Any, int], Any]:
        """Return what runs a message again, with the memory described once."""
        return repeated.message_of(self.send_memory if what == "send" else self.recv_memory)

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        """Begin to send by MPI_Isend (MPI 3.7.2)."""
        try:
            request = self.comm.Isend(message(tensor), dst, tag)
        except MPI.Exception as error:
            raise self._failure("isend", error) from error
        return self.hold(RequestWork(request, tensor, [], None))

    def irecv(self, tensor: torch.Tensor, src: int | None, tag: int, finish: Callable[[], None] | None) -> Work:
        """Begin to receive by MPI_Irecv (MPI 3.7.2)."""
        try:
            request = self._begin_receive(message(tensor), src, tag)
        except MPI.Exception as error:
            raise self._failure("irecv", error) from error
        return self.hold(RequestWork(request, tensor, [tensor], finish))
