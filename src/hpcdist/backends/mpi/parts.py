"""Messages of several buffers over MPI: their lengths first, then the bytes of each, from where they are.

What arrives are bytes and nothing else: nothing is unpickled here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from mpi4py import MPI

from hpcdist.backends.mpi.datatypes import BYTE, run

Parts = Sequence[Any]  # buffers, each of any number of bytes
HEAD = struct.Struct("16q")  # how many parts a broadcast has, and the lengths of so many as fit in here
IN_HEAD = HEAD.size // 8 - 1


def packed(lengths: Sequence[int]) -> bytes:
    """Return lengths as bytes."""
    return struct.pack(f"{len(lengths)}q", *lengths)


def of(part: Any) -> list[Any]:
    """Return a part as the buffer of an MPI call."""
    view = memoryview(part)
    return [view, *run(view.nbytes)]


def lengths_of(parts: Parts) -> list[int]:
    """Return how many bytes each part has."""
    return [memoryview(part).nbytes for part in parts]


def broadcast(comm: MPI.Intracomm, parts: Parts | None, root: int) -> Parts:
    """Hand the root's parts to all ranks by MPI_Bcast (MPI 6.4); ``parts`` is not looked at elsewhere."""
    sent = lengths_of(parts) if parts is not None and comm.rank == root else []
    shown = sent[:IN_HEAD]
    head = bytearray(HEAD.pack(len(sent), *shown, *[0] * (IN_HEAD - len(shown))))
    comm.Bcast((head, BYTE), root)
    count, *lengths = HEAD.unpack(head)
    if count > IN_HEAD:
        table = bytearray(packed(sent)) if sent else bytearray(8 * count)
        comm.Bcast((table, BYTE), root)
        lengths = list(struct.unpack(f"{count}q", table))
    made = parts if parts is not None and comm.rank == root else list(map(MPI.buffer.allocate, lengths[:count]))
    for part in made:
        comm.Bcast(of(part), root)
    return made


def send(begin: Callable[..., Any], parts: Parts, dst: int, tag: int) -> list[Any]:
    """Send parts by a communicator's Send or Isend; return what it returned, and the table that must live as long."""
    table = packed(lengths_of(parts))
    return [begin((table, BYTE), dst, tag), *(begin(of(part), dst, tag) for part in parts), table]


def probe(comm: MPI.Intracomm, src: int, tag: int) -> tuple[MPI.Message, MPI.Status]:
    """Wait for a message and match it."""
    status = MPI.Status()
    return comm.Mprobe(src, tag, status), status


def receive(match: Callable[..., tuple[MPI.Message, MPI.Status]], src: int | None, tag: int) -> tuple[Parts, int]:
    """Receive parts, each matched by a function; return them and their sender. One thread at a time may receive."""
    message, status = match(src, tag)
    sender, table = status.Get_source(), bytearray(status.Get_count(BYTE))
    message.Recv((table, BYTE))
    parts = list(map(MPI.buffer.allocate, struct.unpack(f"{len(table) // 8}q", table)))
    for part in parts:
        match(sender, tag)[0].Recv(of(part))
    return parts, sender


def deliver(comm: MPI.Intracomm, given: Mapping[int, Parts], sources: Iterable[int]) -> list[Parts]:
    """Send parts to some ranks by messages, and return what some ranks have sent to this one, in other memory."""
    rank, size, match = comm.rank, comm.size, partial(probe, comm)
    others = sorted(given.keys() - {rank}, key=lambda dst: (dst - rank) % size)  # not all to the same one at once
    sent = [send(comm.Isend, given[dst], dst, 0) for dst in others]
    received = [receive(match, src, 0)[0] if src != rank else list(map(bytearray, given[rank])) for src in sources]
    finish(sent)
    return received


def finish(sent: list[list[Any]]) -> None:
    """Wait until parts were sent, request by request.

    On a revoked communicator Open MPI 5.0.11's Testsome, Testany and Waitall free a request whose message is still on
    its way, and when that ends with an error Open MPI aborts the job ("Send error after request freed").
    """
    for *requests, _ in sent:
        for request in requests:
            request.Wait()
