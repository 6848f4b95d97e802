"""Object collectives over MPI: pickle protocol 5 with out-of-band buffers, through ``mpi4py.util.pkl5``.

Arrays inside an object are sent from where they are, not copied into the pickle, and may be larger than 2 GiB.
Gathering small ones, such as a dict of settings or losses, is one MPI_Allgather of slots of one size. A slot that
begins with a zero says that its object needs more, or could not be pickled, so that all ranks see alike whether another
round follows, and how large its slots are. An object is pickled before anyone else is asked: mpi4py
would raise on that rank only, between two messages that the others wait for.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

from mpi4py import MPI
from mpi4py.util import pkl5

from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.datatypes import BYTE
from hpcdist.core.objects import Objects, packed, packed_list, unpacked

LARGEST_SLOT = 4096  # bytes
_head = struct.Struct("<xq")  # no pickle begins with a zero; then the bytes that it needs, 0 where that says nothing
_loads = pickle.loads


class Slots:
    """The slots of one size that objects are gathered in, which all ranks of a group change alike."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.each = struct.Struct(f"{size}s").iter_unpack

    def grown(self, gathered: bytearray) -> Slots:
        """Return the slots that hold what these did not, or these if it has to go in another way."""
        heads = [_head.unpack_from(gathered, at)[0] for at in range(0, len(gathered), self.size) if not gathered[at]]
        return Slots(1 << (max(heads) - 1).bit_length()) if 0 < min(heads) <= max(heads) <= LARGEST_SLOT else self


class MPIObjects(Objects):
    """The object calls on one communicator."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._comm, self._rank, self._size = communicator.comm, communicator.rank, communicator.size
        self._messages: Any = None
        self._has_duplicate = False
        self._slots = Slots(256)

    @property
    def _pickling(self) -> Any:
        """The communicator with mpi4py's calls for objects, large ones included; its messages need no one else."""
        if self._messages is None:
            self._messages = pkl5.Intracomm(self._comm)
        return self._messages

    @property
    def _collective(self) -> Any:
        """The same for its collectives, which every rank calls: they go over a duplicate, made by the first of them."""
        if not self._has_duplicate:
            # mpi4py duplicates with the GIL held: a rank that waited in there for a late one would stop its own
            # watchdog, so all come together first
            self._comm.Barrier()
            self._communicator.derived.append(pkl5._commctx_intra(self._pickling)[0])  # type: ignore[attr-defined]
            self._has_duplicate = True
        return self._pickling

    def all_gather(self, value: Any) -> list[Any]:
        """Gather every rank's object on all ranks."""
        data, apart, failure = packed(value, self._rank)
        is_whole = not apart and failure is None
        gathered = None
        try:
            slots, received = self._gather_slots(data, is_whole)
            while 0 in received[:: slots.size]:
                self._slots = slots.grown(received)
                if self._slots is slots:
                    gathered = self._collective.allgather([pickle.PickleBuffer(data), *apart])
                    break
                slots, received = self._gather_slots(data, is_whole)
        except MPI.Exception as error:
            raise self._communicator.failure("all_gather_object", error) from error
        self._check("all_gather_object", failure)
        if gathered is None:
            return [_loads(each) for (each,) in slots.each(received)]
        return [unpacked(*parts) for parts in gathered]

    def _gather_slots(self, data: bytes, is_whole: bool) -> tuple[Slots, bytearray]:
        slots = self._slots
        size = slots.size
        if is_whole and len(data) <= size:  # a pickle does not mind what follows its end
            slot = data.ljust(size)
        else:
            slot = _head.pack(len(data) if is_whole else 0).ljust(size)
        received = bytearray(size * self._size)
        self._comm.Allgather((slot, BYTE), (received, BYTE))
        return slots, received

    def gather(self, value: Any, root: int) -> list[Any] | None:
        """Gather every rank's object on the root."""
        data, apart, failure = packed(value, self._rank)
        with self._communicator.translating("gather_object"):
            gathered = self._collective.gather([pickle.PickleBuffer(data), *apart], root)
        self._check("gather_object", failure)
        return None if gathered is None else [unpacked(*parts) for parts in gathered]

    def broadcast(self, value: Any, root: int) -> Any:
        """Hand the root's object to all ranks."""
        parts, failure = None, None
        if self._rank == root:
            data, apart, failure = packed(value, root)
            parts = [pickle.PickleBuffer(data), *apart]
        with self._communicator.translating("broadcast_object"):
            received = self._collective.bcast(parts, root)
        self._check("broadcast_object", failure)
        return value if self._rank == root else unpacked(*received)

    def scatter(self, values: list[Any] | None, root: int) -> Any:
        """Hand each rank its object of the root's list."""
        parts, failure = None, None
        if self._rank == root and values is not None:
            each_packed, failure = packed_list(values, root)
            parts = [[pickle.PickleBuffer(data), *apart] for data, apart in each_packed]
        with self._communicator.translating("scatter_object"):
            received = self._collective.scatter(parts, root)
        self._check("scatter_object", failure)
        return unpacked(*received)

    def _check(self, call: str, failure: Exception | None) -> None:
        if self._communicator.is_checked:
            self._communicator.check(call)
        if failure is not None:
            raise failure

    def send(self, value: Any, dst: int) -> None:
        """Send an object."""
        with self._communicator.translating("send_object"):
            self._pickling.send(value, dst)

    def recv(self, src: int | None) -> tuple[Any, int]:
        """Receive an object; return it and its sender."""
        status = MPI.Status()
        with self._communicator.translating("recv_object"):
            value = self._pickling.recv(None, MPI.ANY_SOURCE if src is None else src, status=status)
        return value, status.Get_source()
