"""How do objects travel over MPI? By pickle protocol 5 with out-of-band buffers, through ``mpi4py.util.pkl5``.

Arrays inside an object are sent from where they are, not copied into the pickle, and may be larger than 2 GiB.
Gathering small ones, such as a dict of settings or losses, is one MPI_Allgather of slots of one size. A slot that
begins with a zero says that its object needs more, or could not be pickled, so that all ranks see alike whether another
round follows, and how large the slots of the next call are. An object is pickled before anyone else is asked: mpi4py
would raise on that rank alone, between two messages that the others wait for.
"""

from __future__ import annotations

import pickle
import struct
from abc import abstractmethod
from typing import Any, NamedTuple

from mpi4py import MPI
from mpi4py.util import pkl5

from hpcdist.backends.mpi.datatypes import BYTE
from hpcdist.core.backend import Backend
from hpcdist.core.errors import DistBackendError
from hpcdist.core.objects import packed, unpacked

LARGEST_SLOT = 4096  # bytes
_head = struct.Struct("<xq")  # no pickle begins with a zero; then the bytes that it needs, 0 where that says nothing
_loads = pickle.loads


class Slots:
    """The slots of one size that objects are gathered in, which all ranks of a group change alike."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.each = struct.Struct(f"{size}s").iter_unpack

    def grown(self, gathered: bytearray) -> Slots:
        """Return the slots that would have held what some of these did not, or these where none would."""
        heads = [_head.unpack_from(gathered, at)[0] for at in range(0, len(gathered), self.size) if not gathered[at]]
        most = max(heads)
        return Slots(1 << (most - 1).bit_length()) if self.size < most <= LARGEST_SLOT else self


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
    _slots = Slots(256)

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
        data, apart, failure = packed(value, self.rank)
        slots = self._slots
        size = slots.size
        if len(data) <= size and not apart and failure is None:  # a pickle does not mind what follows its end
            slot = data.ljust(size)
        else:
            slot = _head.pack(0 if apart or failure else len(data)).ljust(size)
        received = bytearray(size * self.size)
        try:
            self.comm.Allgather((slot, BYTE), (received, BYTE))
            if 0 not in received[::size]:
                return [_loads(each) for (each,) in slots.each(received)]
            self._slots = slots.grown(received)
            gathered = self.pickling.allgather([pickle.PickleBuffer(data), *apart])
        except MPI.Exception as error:
            raise self._failure("all_gather_object", error) from error
        if failure is not None:
            raise failure
        return [unpacked(*parts) for parts in gathered]

    def gather_object(self, value: Any, root: int) -> list[Any] | None:
        """Gather every rank's object on the root."""
        data, apart, failure = packed(value, self.rank)
        with self._translating("gather_object"):
            gathered = self.pickling.gather([pickle.PickleBuffer(data), *apart], root)
        if failure is not None:
            raise failure
        return None if gathered is None else [unpacked(*parts) for parts in gathered]

    def broadcast_object(self, value: Any, root: int) -> Any:
        """Hand the root's object to all ranks."""
        parts, failure = None, None
        if self.rank == root:
            data, apart, failure = packed(value, root)
            parts = [pickle.PickleBuffer(data), *apart]
        with self._translating("broadcast_object"):
            received = self.pickling.bcast(parts, root)
        if failure is not None:
            raise failure
        return value if self.rank == root else unpacked(*received)

    def scatter_object(self, values: list[Any] | None, root: int) -> Any:
        """Hand each rank its object of the root's list."""
        parts, failure = None, None
        if self.rank == root and values is not None:
            each_packed = [packed(value, root) for value in values]
            bad = next((each for each in each_packed if each[2] is not None), None)  # nobody gets an object then
            failure = bad[2] if bad is not None else None
            parts = [[pickle.PickleBuffer(data), *apart] for data, apart, _ in (bad or each for each in each_packed)]
        with self._translating("scatter_object"):
            received = self.pickling.scatter(parts, root)
        if failure is not None:
            raise failure
        return unpacked(*received)

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
