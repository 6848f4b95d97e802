"""Vector calls: MPI's collectives with a share for each rank, directly on the tensors of a list.

MPI_Allgatherv, MPI_Gatherv and MPI_Scatterv (MPI 6.5 to 6.7) take a count and a displacement for each rank, here in
bytes, because data is only moved. The tensor with the lowest address is the buffer. If a rank's tensors cannot be
described so (they share memory, or lie further apart than MPI can count), that rank copies them, through memory that is
kept: the first access to a page can take longer than its copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from ctypes import memmove
from operator import add, sub
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.datatypes import BYTE, COUNT_MAX, address, addresses_from, starts_of
from hpcdist.backends.mpi.exchange import Exchange
from hpcdist.backends.mpi.repetition import Prepared
from hpcdist.core.buffers import LOWEST_PLACE, PLACES_KEPT, TensorList, check_memory
from hpcdist.core.call import Call
from hpcdist.core.table import ALL_GATHER, GATHER, SCATTER, Row

# MPI 4 has calls with displacements of 64 bits, and mpi4py makes them
REACH = 2**62 if MPI.Get_version() >= (4, 0) else COUNT_MAX
VECTORS = frozenset({ALL_GATHER, GATHER, SCATTER})
# bytes of all shares up to which an all_gather is the vector call. MPICH's takes 1.5 to 10 times as long as its
# MPI_Allgather from 1 MiB on (2 ranks, a Xeon); messages take as long as MPI_Allgather
VECTOR_MAX = COUNT_MAX if MPI.get_vendor()[0] == "Open MPI" else 1 << 17
KEPT_MAX = 1 << 28  # bytes that are kept from one call to the next
FLAT_MAX = 1 << 20  # bytes up to which a repeated list is copied by a prepared function


class KeptMemory:
    """Memory that calls use one after another; more than KEPT_MAX lasts for one call only."""

    def __init__(self) -> None:
        self._kept = MPI.buffer.allocate(0)

    def of(self, nbytes: int) -> MPI.buffer:
        if nbytes <= len(self._kept):
            return self._kept
        made = MPI.buffer.allocate(nbytes)
        if nbytes <= KEPT_MAX:
            self._kept = made
        return made


class Vectors:
    """The vector calls of one communicator; one thread at a time, as for its other collectives."""

    def __init__(self, communicator: Communicator, exchange: Exchange) -> None:
        self._comm, self._size, self._exchange = communicator.comm, communicator.size, exchange
        self._one, self._all = KeptMemory(), KeptMemory()

    def flatten(self, tensors: TensorList) -> torch.Tensor:
        """Return the elements of a list one after another, in memory that the next call reuses."""
        nbytes, dtype = tensors.nbytes, tensors.dtype
        if not nbytes:
            return torch.empty(0, dtype=dtype, device="cpu")
        memory = self._all.of(nbytes)
        copy(addresses_from(memory.address, tensors.sizes), tensors.addresses, tensors.sizes)
        return torch.frombuffer(memory, dtype=dtype, count=tensors.numel())

    def flattener(self, dtype: torch.dtype) -> Callable[[list[torch.Tensor], int], torch.Tensor]:
        """Return a function that does the same for repeated lists of a dtype and size in bytes, not 0."""
        kept: dict[int, tuple[MPI.buffer, torch.Tensor]] = {}  # by bytes

        def flatten(tensors: list[torch.Tensor], nbytes: int) -> torch.Tensor:
            if (found := kept.get(nbytes)) is None:
                if len(kept) >= PLACES_KEPT:
                    kept.clear()
                memory = self._all.of(nbytes)
                found = kept[nbytes] = memory, torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize)
            (memory, flat), start = found, 0
            for each in tensors:
                if (place := each.data_ptr()) < LOWEST_PLACE:
                    check_memory(each)
                if length := each.nbytes:
                    memory[start : start + length] = address(place, length)
                    start += length
            return flat

        return flatten

    def prepared(self, call: Call) -> Prepared | None:
        """Return how to make an all_gather, gather or scatter by one vector call; None if it needs more."""
        row, send, recv, _, root, counts, *_ = call
        is_read = row is SCATTER
        one, each = (recv, send) if is_read else (send, recv)
        itemsize, size = one.itemsize, self._size
        is_list = each.__class__ is TensorList
        parts = 2 if one.dtype.is_complex else 1  # of an element, as the call board counts them
        largest = VECTOR_MAX if row is ALL_GATHER else COUNT_MAX
        function = getattr(self._comm, row.mpi)
        last = () if root is None else (root,)
        sizes = None if counts is None else [count * itemsize for count in counts[1]]
        total = sum(sizes or ())

        def describe(places: Any) -> tuple[tuple[Any, ...] | None, int]:
            count, own, *addresses = places
            if each is not None and not is_list and is_read:  # the first tensor is that of all shares
                count, own, addresses = count // size, addresses[0], [own]
            nbytes = count * itemsize
            count *= parts
            if (nbytes * size if sizes is None else total) > largest or not nbytes:
                return None, count
            shares: Any = None
            if each is not None:
                if not is_list:
                    addresses = addresses_from(addresses[0], sizes or [nbytes] * size)
                if sizes is None:
                    shares = even_shares(addresses, nbytes, own)
                elif are_apart(addresses, sizes, own, nbytes) and (
                    not is_list or (0 not in sizes and can_be_displaced(addresses, sizes, False))
                ):
                    shares = describe_shares(addresses, sizes)
                if shares is None:
                    return None, count
            with_one = address(own, nbytes), BYTE
            return ((shares, with_one, *last) if is_read else (with_one, shares, *last)), count

        return Prepared(function, describe)

    def move(self, call: Call) -> None:
        """Run an all_gather, gather or scatter; the side with a share for each rank is one tensor or a list."""
        row, send, recv, _, root, counts, *_ = call
        is_read = row is SCATTER
        one, each = (recv, send) if is_read else (send, recv)
        nbytes, itemsize = one.nbytes, one.itemsize
        sizes = [nbytes] * self._size if counts is None else [count * itemsize for count in counts[1]]
        total = sum(sizes)  # the same on all ranks
        addresses: Any = None if each is None else starts_of(each, sizes)
        own = address(one.data_ptr(), nbytes)
        is_apart = addresses is None or are_apart(addresses, sizes, own.address, nbytes)
        if not is_apart:  # with MPI_IN_PLACE this rank's call would differ from the others'
            own = self._one.of(nbytes)
            if not is_read:
                memmove(own.address, one.data_ptr(), nbytes)
        if total > COUNT_MAX or (row is ALL_GATHER and total > VECTOR_MAX):
            self._send_shares(row, own.address, nbytes, addresses, sizes, root)
        else:
            places = addresses
            if each.__class__ is TensorList and not can_be_displaced(addresses, sizes, is_read):
                places = addresses_from(self._all.of(total).address, sizes)
                if is_read:
                    copy(places, addresses, sizes)
            with_one = own, nbytes, BYTE
            shares = None if places is None else describe_shares(places, sizes)
            last = () if root is None else (root,)
            getattr(self._comm, row.mpi)(*((shares, with_one) if is_read else (with_one, shares)), *last)
            if places is not addresses and not is_read:
                copy(addresses, places, sizes)
        if is_read and not is_apart:
            memmove(one.data_ptr(), own.address, nbytes)

    def _send_shares(
        self, row: Row, own: int, nbytes: int, addresses: list[int] | None, sizes: list[int], root: int | None
    ) -> None:
        """Do the same by messages, of any size: this rank's own share has one address, those of all have others."""
        ones = [nbytes if row is ALL_GATHER or rank == root else 0 for rank in range(self._size)]
        places, lengths = ([own] * self._size, [0] * self._size) if addresses is None else (addresses, sizes)
        if row is SCATTER:
            self._exchange.send_each(places, lengths, [own] * self._size, ones)
        else:
            self._exchange.send_each([own] * self._size, ones, places, lengths)


def describe_shares(addresses: Sequence[int], sizes: Sequence[int]) -> tuple[Any, ...]:
    """Return shares as the buffer of a vector call."""
    low = min(addresses)
    displacements = [place - low for place in addresses]
    return address(low, max(map(add, displacements, sizes))), sizes, displacements, BYTE


def even_shares(addresses: Sequence[int], nbytes: int, own: int) -> tuple[Any, ...] | None:
    """Return shares of some bytes as the buffer of a vector call; None if they need a copy.

    They do if they share memory with each other or with this rank's own, or are too far apart for MPI's counts.
    """
    low = min(addresses)
    displacements = [place - low for place in addresses]
    ordered = sorted([*displacements, own - low])
    reach = max(displacements)
    if reach > REACH or min(map(sub, ordered[1:], ordered)) < nbytes:
        return None
    return address(low, reach + nbytes), [nbytes] * len(addresses), displacements, BYTE


def copy(targets: Iterable[int], sources: Iterable[int], sizes: Sequence[int]) -> None:
    for target, source, size in zip(targets, sources, sizes, strict=True):
        memmove(target, source, size)


def are_apart(addresses: Sequence[int], sizes: Sequence[int], place: int, nbytes: int) -> bool:
    """Tell whether a buffer shares no memory with any of some tensors."""
    end = place + nbytes
    return not any(other < end and place < other + size for other, size in zip(addresses, sizes, strict=True))


def can_be_displaced(addresses: Sequence[int], sizes: Sequence[int], is_read: bool) -> bool:
    """Tell whether MPI can count from the lowest of some tensors to each of them, and may write to all of them."""
    if max(addresses) - min(addresses) > REACH:
        return False
    end = 0
    for place, size in () if is_read else sorted(zip(addresses, sizes, strict=True)):
        if place < end and size:
            return False  # MPI may forward received data from one of them, so they must not overlap
        end = place + size
    return True
