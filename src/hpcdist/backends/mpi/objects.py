"""Object collectives over MPI: pickle protocol 5 with out-of-band buffers.

Arrays inside an object are sent from their own memory, not copied into the pickle, and may be larger than 2 GiB. MPI
moves bytes only (``parts``), so that the receiver decides how they are read: a call with ``weights_only`` unpickles
nothing that could run code.

Gathering small objects, such as a dict of settings or losses, is one MPI_Allgather of slots of one size. A slot that
begins with a zero belongs to an object that needs more room, could not be pickled, or is for ``weights_only``, so that
all ranks know whether another round follows, and how large its slots are. An object is pickled before the first
message, so that no rank waits for one that cannot. Each collective is checked like those on tensors (``call_check``).
"""

from __future__ import annotations

import pickle
import struct
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from mpi4py import MPI

from hpcdist.backends.mpi import parts
from hpcdist.backends.mpi.call_check import CallCheck
from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.datatypes import BYTE
from hpcdist.core.call_words import GATHERS, OBJECTS, ROOT, kind_word
from hpcdist.core.objects import TAG, Objects, pack, pack_list, unpack

LARGEST_SLOT = 4096  # bytes
SAID = {name: kind_word(name) for name in OBJECTS}
_head = struct.Struct("<xq")  # no pickle begins with a zero; then the bytes that the object needs, or 0
_loads = pickle.loads


class Slots:
    """The size of the slots in which objects are gathered; all ranks of a group change it alike."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.each = struct.Struct(f"{size}s").iter_unpack

    def grown(self, gathered: bytearray) -> Slots:
        """Return slots with room for objects that did not fit into these, or these if objects need another way."""
        heads = [_head.unpack_from(gathered, at)[0] for at in range(0, len(gathered), self.size) if not gathered[at]]
        return Slots(1 << (max(heads) - 1).bit_length()) if 0 < min(heads) <= max(heads) <= LARGEST_SLOT else self


class MPIObjects(Objects):
    """The object calls on one communicator."""

    check: CallCheck

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._comm, self._rank, self._size = communicator.comm, communicator.rank, communicator.size
        self._sending, self._receiving = threading.Lock(), threading.Lock()  # an object is several messages
        self._slots = Slots(256)

    def all_gather(self, value: Any, weights_only: bool = False, call: str = "all_gather_object") -> list[Any]:
        return self._checked("all_gather_object", GATHERS.index(call), value, weights_only)

    def gather(self, value: Any, root: int, weights_only: bool = False) -> list[Any] | None:
        return self._checked("gather_object", root, value, weights_only)

    def broadcast(self, value: Any, root: int, weights_only: bool = False) -> Any:
        return self._checked("broadcast_object", root, value, weights_only)

    def scatter(self, values: list[Any] | None, root: int, weights_only: bool = False) -> Any:
        return self._checked("scatter_object", root, values, weights_only)

    def _checked(self, name: str, root: int, value: Any, weights_only: bool) -> Any:
        carry_out = getattr(self, f"_{name}")
        return self.check.make(SAID[name] + root * ROOT, 0, partial(carry_out, value, root, weights_only))

    def stand_in(self, name: str, root: int) -> None:
        """Take part in a collective of other ranks with an empty object; as root of a scatter with one for each."""
        getattr(self, f"_{name}")([None] * self._size if name == "scatter_object" else None, root, False)

    def _all_gather_object(self, value: Any, code: int, weights_only: bool) -> list[Any]:
        call = GATHERS[code]
        self._communicator.check_in_step(call)
        data, apart, failure = pack(value, self._rank, weights_only=weights_only)
        is_in_slot = not (apart or failure or weights_only)
        try:
            slots, received = self._gather_slots(data, is_in_slot)
            while 0 in received[:: slots.size]:
                self._slots = slots.grown(received)
                if self._slots is slots:
                    given = {dst: [data, *apart] for dst in range(self._size)}
                    return self._deliver(call, given, given, failure, weights_only)
                slots, received = self._gather_slots(data, is_in_slot)
        except MPI.Exception as error:
            raise self._communicator.failure(call, error) from error
        self._check(call, failure)
        return [_loads(each) for (each,) in slots.each(received)]

    def _gather_slots(self, data: bytes, is_in_slot: bool) -> tuple[Slots, bytearray]:
        slots = self._slots
        size = slots.size
        if is_in_slot and len(data) <= size:  # a pickle ignores bytes after its end
            slot = data.ljust(size)
        else:
            slot = _head.pack(len(data) if is_in_slot else 0).ljust(size)
        received = bytearray(size * self._size)
        self._comm.Allgather((slot, BYTE), (received, BYTE))
        return slots, received

    def _deliver(
        self,
        call: str,
        given: Mapping[int, parts.Parts],
        sources: Iterable[int],
        failure: BaseException | None,
        weights_only: bool,
    ) -> list[Any]:
        with self._communicator.in_step(call):
            received = parts.deliver(self._communicator.open_private(), given, sources)
        self._check(call, failure)
        return [unpack(*each, weights_only=weights_only) for each in received]

    def _gather_object(self, value: Any, root: int, weights_only: bool) -> list[Any] | None:
        data, apart, failure = pack(value, self._rank, weights_only=weights_only)
        sources = range(self._size if self._rank == root else 0)
        gathered = self._deliver("gather_object", {root: [data, *apart]}, sources, failure, weights_only)
        return gathered if self._rank == root else None

    def _broadcast_object(self, value: Any, root: int, weights_only: bool) -> Any:
        given, failure = None, None
        if self._rank == root:
            data, apart, failure = pack(value, root, weights_only=weights_only)
            given = [data, *apart]
        with self._communicator.in_step("broadcast_object"):
            received = parts.broadcast(self._communicator.open_private(), given, root)
        self._check("broadcast_object", failure)
        return value if self._rank == root else unpack(*received, weights_only=weights_only)

    def _scatter_object(self, values: list[Any] | None, root: int, weights_only: bool) -> Any:
        given, failure = {}, None
        if self._rank == root and values is not None:
            each_packed, failure = pack_list(values, root, weights_only=weights_only)
            given = {dst: [data, *apart] for dst, (data, apart) in enumerate(each_packed)}
        return self._deliver("scatter_object", given, [root], failure, weights_only)[0]

    def _check(self, call: str, failure: BaseException | None) -> None:
        if self._communicator.is_checked:
            self._communicator.check(call)
        if failure is not None:
            raise failure

    def send(self, value: Any, dst: int, weights_only: bool = False) -> None:
        data, apart, failure = pack(value, self._rank, weights_only=weights_only)
        if failure is not None:
            raise failure
        with self._communicator.translating("send_object"), self._sending:
            parts.send(self._comm.Send, [data, *apart], dst, TAG)

    def recv(self, src: int | None, weights_only: bool = False) -> tuple[Any, int]:
        with self._communicator.translating("recv_object"), self._receiving:
            received, sender = parts.receive(self._communicator.match, src, TAG)
        return unpack(*received, weights_only=weights_only), sender
