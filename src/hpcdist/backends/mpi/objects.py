"""How do objects travel over MPI? By pickle protocol 5 with out-of-band buffers, through ``mpi4py.util.pkl5``.

Arrays inside an object are sent from where they are, not copied into the pickle, and may be larger than 2 GiB.
Gathering small ones, such as a dict of settings or losses, is one MPI_Allgather of slots of one size; a slot says how
many bytes its object has, so that all ranks see alike whether another round is needed.
"""

from __future__ import annotations

import pickle
from abc import abstractmethod
from typing import Any, NamedTuple

from mpi4py import MPI
from mpi4py.util import pkl5

from hpcdist.core.backend import Backend
from hpcdist.core.errors import DistBackendError

BYTE = MPI.BYTE

SLOT = 512  # bytes
TOO_LARGE = bytes(SLOT)  # no pickle begins with a zero, and none minds what follows its end


class Translation(NamedTuple):
    """Raises c10d's error for MPI's inside the ``with`` block that this is given to."""

    backend: PicklingBackend
    call: str

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Translate."""
        if isinstance(error, MPI.Exception):
            raise self.backend._failure(self.call, error) from error


class PicklingBackend(Backend):
    """The object calls of a backend that has an MPI communicator."""

    comm: MPI.Intracomm
    context: Any = None  # the duplicate that pkl5 sends on, kept so that it can be revoked with ours
    _pickling: Any = None

    @abstractmethod
    def _failure(self, call: str, error: MPI.Exception) -> DistBackendError:
        """Return what a call raises when MPI has failed in it."""

    @property
    def messages(self) -> Any:
        """The same communicator with mpi4py's calls for objects, large ones included; its messages need no one else."""
        if self._pickling is None:
            self._pickling = pkl5.Intracomm(self.comm)
        return self._pickling

    @property
    def pickling(self) -> Any:
        """The same for its collectives, which every rank calls: they go over a duplicate, made by the first of them."""
        if self.context is None:
            # mpi4py duplicates with the GIL held: a rank that waited in there for a late one would stop its own
            # watchdog, so all come together first
            self.comm.Barrier()
            self.context = pkl5._commctx_intra(self.messages)[0]  # type: ignore[attr-defined]
        return self.messages

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather every rank's object on all ranks."""
        apart: list[pickle.PickleBuffer] = []
        data = pickle.dumps(value, 5, buffer_callback=apart.append)
        slots = bytearray(SLOT * self.size)
        try:
            slot = TOO_LARGE if apart or len(data) > SLOT else data.ljust(SLOT)
            self.comm.Allgather((slot, BYTE), (slots, BYTE))
            if 0 in slots[::SLOT]:
                gathered = self.pickling.allgather([pickle.PickleBuffer(data), *apart])
                return [pickle.loads(parts[0], buffers=parts[1:]) for parts in gathered]
        except MPI.Exception as error:
            raise self._failure("all_gather_object", error) from error
        return [pickle.loads(slots[at : at + SLOT]) for at in range(0, len(slots), SLOT)]

    def gather_object(self, value: Any, root: int) -> list[Any] | None:
        """Gather every rank's object on the root."""
        with self._translating("gather_object"):
            return self.pickling.gather(value, root)

    def broadcast_object(self, value: Any, root: int) -> Any:
        """Hand the root's object to all ranks."""
        with self._translating("broadcast_object"):
            return self.pickling.bcast(value, root)

    def scatter_object(self, values: list[Any] | None, root: int) -> Any:
        """Hand each rank its object of the root's list."""
        with self._translating("scatter_object"):
            return self.pickling.scatter(values, root)

    def send_object(self, value: Any, dst: int) -> None:
        """Send an object."""
        with self._translating("send_object"):
            self.messages.send(value, dst)

    def recv_object(self, src: int | None) -> tuple[Any, int]:
        """Receive an object; return it and its sender."""
        status = MPI.Status()
        with self._translating("recv_object"):
            value = self.messages.recv(None, MPI.ANY_SOURCE if src is None else src, status=status)
        return value, status.Get_source()

    def _translating(self, call: str) -> Translation:
        return Translation(self, call)
