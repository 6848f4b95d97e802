"""Messages of several buffers over MPI: first their lengths, then the bytes of each, without a copy.

Received data stays bytes: nothing is unpickled here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from mpi4py import MPI

from hpcdist.backends.mpi.datatypes import BYTE, run

Parts = Sequence[Any]  # buffers, each of any number of bytes
HEAD = 16  # numbers in the head of a broadcast: the number of parts, and the lengths of the first ones


def as_buffer(part: Any) -> list[Any]:
    """Return a part as a buffer for MPI."""
    view = memoryview(part)
    return [view, *run(view.nbytes)]


def lengths_of(parts: Parts) -> array[int]:
    """Return the lengths of the parts, in bytes, as an array to send."""
    return array("q", [memoryview(part).nbytes for part in parts])


def broadcast(comm: MPI.Intracomm, parts: Parts | None, root: int) -> Parts:
    """Send the root's parts, None elsewhere, to all ranks by MPI_Bcast (MPI 6.4)."""
    sent = lengths_of(parts or ())
    head = array("q", [len(sent), *sent[: HEAD - 1], *[0] * HEAD][:HEAD])
    comm.Bcast((head, BYTE), root)
    lengths = head[1 : 1 + head[0]]
    if head[0] >= HEAD:
        lengths = sent or array("q", [0] * head[0])
        comm.Bcast((lengths, BYTE), root)
    made = list(map(MPI.buffer.allocate, lengths)) if parts is None else parts
    for part in made:
        comm.Bcast(as_buffer(part), root)
    return made


def send(begin: Callable[..., Any], parts: Parts, dst: int, tag: int) -> list[Any]:
    """Send parts by a communicator's Send or Isend; return its results, and the table that must live as long."""
    table = lengths_of(parts)
    return [begin((table, BYTE), dst, tag), *(begin(as_buffer(part), dst, tag) for part in parts), table]


def probe(comm: MPI.Intracomm, src: int, tag: int) -> tuple[MPI.Message, MPI.Status]:
    status = MPI.Status()
    return comm.Mprobe(src, tag, status), status


def receive(match: Callable[..., tuple[MPI.Message, MPI.Status]], src: int | None, tag: int) -> tuple[Parts, int]:
    """Receive parts, matched by a function; return them and their sender. One thread at a time may receive."""
    message, status = match(src, tag)
    sender, table = status.Get_source(), array("q", bytes(status.Get_count(BYTE)))
    message.Recv((table, BYTE))
    parts = list(map(MPI.buffer.allocate, table))
    for part in parts:
        match(sender, tag)[0].Recv(as_buffer(part))
    return parts, sender


def deliver(comm: MPI.Intracomm, given: Mapping[int, Parts], sources: Iterable[int]) -> list[Parts]:
    """Send parts to some ranks by messages, and return the parts received from some ranks, in new memory."""
    rank, size, match = comm.rank, comm.size, partial(probe, comm)
    others = sorted(given.keys() - {rank}, key=lambda dst: (dst - rank) % size)  # not all to the same one at once
    sent = [send(comm.Isend, given[dst], dst, 0) for dst in others]
    received = [receive(match, src, 0)[0] if src != rank else list(map(bytearray, given[rank])) for src in sources]
    finish(sent)
    return received


def finish(sent: list[list[Any]]) -> None:
    """Wait until parts have been sent, request by request.

    On a revoked communicator Open MPI 5.0.11's Testsome, Testany and Waitall free a request whose message is still on
    its way, and when that ends with an error Open MPI aborts the job ("Send error after request freed").
    """
    for *requests, _ in sent:
        for request in requests:
            request.Wait()
