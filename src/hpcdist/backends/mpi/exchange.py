"""All-to-all exchange: a share from each rank to each other rank, by one MPI function for shares of any sizes.

The choice between MPI_Alltoall and MPI_Alltoallv would depend on the counts of one rank, and ranks that chose
differently would wait for each other forever. So three ranks and more call MPI_Alltoallw (MPI 6.8), and two exchange
one message each by MPI_Sendrecv (MPI 3.10). How a rank describes a share to MPI is a local matter: as a count of bytes
if a C int holds it, else as a derived datatype (MPI 5.1). On 2 ranks and 64 B, MPI_Alltoallw takes 3.9 µs in Open MPI
and 5.7 in MPICH, MPI_Alltoall 2.3 and 5.2, MPI_Sendrecv and the copy of a rank's own share 2.5 and 3.5.

Open MPI writes a share that is longer than its receiver expects whole (``receives``), and in 4.1.4 that receiver never
returns from MPI (``ompi_request_default_wait_all``). So there each exchange compares the shares first, unless the check
of calls has done so (HPCDIST_CHECK_CALLS=0).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from ctypes import memmove
from operator import add, setitem, sub
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.datatypes import BYTE, COUNT_MAX, address, addresses_from, run, starts_of
from hpcdist.backends.mpi.repetition import Prepared
from hpcdist.core.buffers import TensorList, do_overlap
from hpcdist.core.errors import MismatchError
from hpcdist.core.table import Counts, scale

TAG = 1  # on the private duplicate, on which objects have tag 0
COPY_MAX = 1 << 18  # bytes up to which a copy keeps the GIL, which saves 0.5 µs
ALL = slice(None)


class Exchange:
    """The exchanges of one communicator, by one MPI function for shares of any sizes."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._comm, self._rank, self._size = communicator.comm, communicator.rank, communicator.size

    def run(
        self, send: torch.Tensor | TensorList, recv: torch.Tensor | TensorList, counts: Counts | None, is_new: bool
    ) -> list[str]:
        """Send each rank its share of one tensor and receive one from each into another; every rank calls.

        Shares lie one after another, or are a list's tensors; ``recv`` shares no memory with ``send``. ``counts`` are
        the elements to and from each rank, None for equal shares. With ``is_new``, the same on all ranks, each pair of
        ranks compares its shares first, by one more exchange of two numbers. Shares that differ are skipped, and
        returned as text. MismatchError if this rank's share for itself differs, which only this rank knows.
        """
        size = self._size
        if counts is None:
            sent, received = ([tensor.nbytes // size] * size for tensor in (send, recv))
        else:
            sent, received = scale(counts, send.itemsize)
        sources, targets = starts_of(send, sent), starts_of(recv, received)
        ways = self._compare(sent, received) if is_new else []
        rank = self._rank
        to_self, from_self = sent[rank], received[rank]
        if to_self != from_self:  # after the others got their shares: MPI would end the call here only
            sent[rank] = received[rank] = 0
        self.move(sources, sent, targets, received)
        if to_self != from_self and not ways:
            raise MismatchError(
                f"exchange: rank {rank} of {size} sends itself {to_self} bytes and receives {from_self} from itself; "
                "its own splits of input and output must be equal"
            )
        return ways

    def _compare(self, sent: list[int], received: list[int]) -> list[str]:
        """Compare the bytes to and from each rank with its own; different ones become 0 on both."""
        mine = array("q", [number for pair in zip(sent, received, strict=True) for number in pair])
        theirs, ways = array("q", bytes(8 * len(mine))), []
        self._comm.Alltoall([mine, MPI.INT64_T], [theirs, MPI.INT64_T])
        for rank in range(self._size):
            out, into = theirs[2 * rank : 2 * rank + 2]
            if rank != self._rank and (sent[rank], received[rank]) != (into, out):
                ways.append(
                    f"rank {self._rank}: all_to_all, {sent[rank]} bytes to rank {rank} and {received[rank]} from it; "
                    f"rank {rank}: {out} bytes to rank {self._rank} and {into} from it"
                )
                sent[rank] = received[rank] = 0
        return ways

    def send_each(self, sources: list[int], sent: list[int], targets: list[int], received: list[int]) -> None:
        """Do the same as ``move`` by a message for each share: for large ones on MPICH in 0.7 of its time (3 ranks)."""
        private, rank = self._communicator.open_private(), self._rank
        others = [(rank + step) % self._size for step in range(1, self._size)]
        requests = [
            begin([address(places[r], lengths[r]), *run(lengths[r])], r, TAG)
            for begin, places, lengths in ((private.Irecv, targets, received), (private.Isend, sources, sent))
            for r in others
            if lengths[r]
        ]
        memmove(targets[rank], sources[rank], sent[rank])
        for request in requests:
            request.Wait()

    def move(self, sources: list[int], sent: list[int], targets: list[int], received: list[int]) -> None:
        """Send each rank bytes from an address, and receive from each likewise; every rank calls."""
        rank, other = self._rank, 1 - self._rank
        if self._size != 2:
            with ExitStack() as made:
                self._comm.Alltoallw(spread(sources, sent, made), spread(targets, received, made))
            return
        source = [address(sources[other], sent[other]), *run(sent[other])]
        target = [address(targets[other], received[other]), *run(received[other])]
        self._communicator.open_private().Sendrecv(source, other, TAG, target, other, TAG)
        memmove(targets[rank], sources[rank], sent[rank])  # releases the GIL

    def prepared(self, send: Any, recv: Any, counts: Counts | None) -> Prepared | None:
        """Return how to exchange shares by one call of MPI (two ranks also copy their own share), or None."""
        size, rank, itemsize = self._size, self._rank, send.itemsize
        are_lists = isinstance(send, TensorList), isinstance(recv, TensorList)
        is_even = counts is None or len({*counts[0], *counts[1]}) == 1
        if any(are_lists) != all(are_lists):
            return None
        parts = 2 if send.dtype.is_complex else 1

        def describe(places: Any) -> tuple[tuple[Any, ...] | None, int]:
            count, *places = places
            if is_even:
                count = count if all(are_lists) else count // size
                sent = received = [count * itemsize] * size
            else:
                sent, received = scale(counts, itemsize)  # type: ignore[arg-type]  # there are some
            count *= parts
            if (
                0 in sent
                or 0 in received
                or sent[rank] != received[rank]
                or (size == 2 and max(*sent, *received) > COUNT_MAX)
            ):
                return None, count
            if all(are_lists):
                sources, targets = places[:size], places[size:]
            else:
                sources, targets = addresses_from(places[0], sent), addresses_from(places[1], received)
            ordered = sorted((*sources, *targets))
            are_apart = is_even and min(map(sub, ordered[1:], ordered)) >= sent[0]  # the usual case
            if not are_apart and do_overlap(zip(sources, sent, strict=True), zip(targets, received, strict=True)):
                return None, count
            if size != 2:
                read, written = together(sources, sent), together(targets, received)
                return (None if read is None or written is None else (read, written)), count
            own = targets[rank], sources[rank], sent[rank]
            return (
                self._communicator.open_private().Sendrecv,  # the first exchange makes it
                (address(sources[other], sent[other]), BYTE), (address(targets[other], received[other]), BYTE),
                *((memmove, *own) if own[2] > COPY_MAX else (setitem, address(own[0], own[2]), ALL, address(*own[1:]))),
            ), count  # fmt: skip

        other = 1 - rank
        if size != 2:
            return Prepared(self._comm.Alltoallw, describe)

        def swap(sendrecv: Any, sent: Any, received: Any, copy: Any, *own: Any) -> None:
            sendrecv(sent, other, TAG, received, other, TAG)
            copy(*own)

        return Prepared(swap, describe)


def together(addresses: Sequence[int], lengths: list[int]) -> list[Any] | None:
    """Return the memory that contains all shares, and their layout in it; None if it is too large."""
    low = min(addresses)
    offsets = [place - low for place in addresses]
    span = max(map(add, offsets, lengths))
    return [address(low, span), lengths, offsets, [BYTE] * len(lengths)] if span <= COUNT_MAX else None


def spread(addresses: Sequence[int], lengths: list[int], made: ExitStack) -> list[Any]:
    """Return the same for shares of any size; ``made`` frees the datatypes of large ones."""
    small = together(addresses, lengths)
    if small is not None:
        return small
    low, types = min(addresses), []
    for place, nbytes in zip(addresses, lengths, strict=True):
        count, piece = run(nbytes)
        types.append(MPI.Datatype.Create_struct([count], [place - low], [piece]).Commit())
        made.callback(types[-1].Free)
    whole = address(low, max(map(add, addresses, lengths)) - low)
    return [whole, [1] * len(types), [0] * len(types), types]
