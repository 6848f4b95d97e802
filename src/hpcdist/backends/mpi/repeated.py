"""How does MPI run a collective again, on tensors that look like those of last time?

What follows from their looks is settled: which of MPI's functions, operations and datatypes, how many bytes, and
whether they go through shared memory. What is left is where the memory lies, and loops use the same memory again: to
describe it to mpi4py takes 0.15 µs a buffer, to see that it is the same 0.06.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.datatypes import BYTE, COUNT_MAX, address, apart, message
from hpcdist.backends.mpi.exchange import describe_equal
from hpcdist.backends.mpi.sharing import SHARED_CALLS
from hpcdist.core.table import ALL_REDUCE, BROADCAST, EXCHANGES, Row

if TYPE_CHECKING:
    from hpcdist.backends.mpi.backend import MPIBackend

Run = Callable[[torch.Tensor, torch.Tensor], None]


def in_place(backend: MPIBackend, row: Row, tensor: torch.Tensor, op: Any, root: int | None) -> Run | None:
    """Return what runs a call again whose input is its output; None where more than one call of MPI is to be done."""
    nbytes = tensor.nbytes
    if nbytes > COUNT_MAX:
        return None
    call: Callable[..., Any] = backend.comm.Bcast
    datatype = BYTE
    last: Any = root  # what MPI takes after the buffer
    if row is ALL_REDUCE:
        how = backend.planned(row, tensor.dtype, op)
        if not how.is_direct:
            return None
        call, datatype, last = partial(backend.comm.Allreduce, MPI.IN_PLACE), how.datatype, how.op
    elif row is not BROADCAST:
        return None
    known: tuple[int, Any] = (-1, None)

    def run(send: torch.Tensor, _: torch.Tensor) -> None:
        nonlocal known
        place, buffer = known
        here = send.data_ptr()
        if here != place:
            buffer = (address(here, nbytes), datatype)
            known = here, buffer
        try:
            call(buffer, last)
        except MPI.Exception as error:
            raise backend._failure(row.name, error) from error

    return run


def through_window(backend: MPIBackend, row: Row, op: Any, root: int | None) -> Run | None:
    """Return what runs a call again whose input is its output, and which goes through node-shared memory."""
    shared = backend.sharing.shared
    if shared is None:
        return None
    call, window = SHARED_CALLS[row], shared.window

    def run(send: torch.Tensor, recv: torch.Tensor) -> None:
        window.is_background = False
        try:
            call(shared, send, recv, op, root)
        except MPI.Exception as error:
            raise backend._failure(row.name, error) from error

    return run


def between_two(backend: MPIBackend, row: Row, dtype: torch.dtype, op: Any) -> Run | None:
    """Return what runs a call again that reads one tensor and writes another; None as for ``in_place``."""
    if row.rooted:
        return None
    datatype = BYTE
    last: tuple[Any, ...] = ()  # what MPI takes after the buffers
    if row.reduces:
        how = backend.planned(row, dtype, op)
        if not how.is_direct:
            return None
        datatype, last = how.datatype, (how.op,)
    call = getattr(backend.comm, row.mpi)
    describe = describe_equal(backend.size) if row in EXCHANGES else partial(apart, datatype=datatype)
    known: tuple[int, int, Any] = (-1, -1, None)

    def run(send: torch.Tensor, recv: torch.Tensor) -> None:
        nonlocal known
        first, second, buffers = known
        source, target = send.data_ptr(), recv.data_ptr()
        if source != first or target != second:
            buffers = describe(send, recv)
            known = source, target, buffers
        if buffers is None:
            backend.run(row, send, recv, op, None, None)
            return
        try:
            call(*buffers, *last)
        except MPI.Exception as error:
            raise backend._failure(row.name, error) from error

    return run


def message_of(call: Callable[[list[Any], Any, int], Any]) -> Callable[[torch.Tensor, Any, int], Any]:
    """Return what sends or receives again; threads may do so at once, so what is known changes in one step."""
    known: tuple[int, list[Any]] = (-1, [])

    def run(tensor: torch.Tensor, peer: Any, tag: int) -> Any:
        nonlocal known
        place, buffer = known
        here = tensor.data_ptr()
        if here != place:
            buffer = message(tensor)
            known = here, buffer
        return call(buffer, peer, tag)

    return run
