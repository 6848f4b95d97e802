"""MPI's datatypes for torch's dtypes, and for a block of any number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from hpcdist.backends.mpi.process import runtime
from hpcdist.core.buffers import LOWEST_PLACE, PLACES_KEPT, TensorList, check_memory

runtime.load()  # its error names an mpi4py that is too old
BYTE = MPI.BYTE
address = MPI.buffer.fromaddress

DATATYPES: dict[torch.dtype, MPI.Datatype] = {
    torch.float64: MPI.DOUBLE,
    torch.float32: MPI.FLOAT,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.bool: MPI.C_BOOL,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}

# MPI counts are C ints before MPI 4.0 (and in Open MPI 5); a count above this is described by a derived type
COUNT_MAX = 2**31 - 1
PIECE = 2**30


def memory(tensor: torch.Tensor) -> MPI.buffer:
    """Return the memory of a contiguous CPU tensor as an mpi4py buffer."""
    return address(tensor.data_ptr(), tensor.nbytes)


def array_on(memory: Any, count: int, dtype: Any, start: int = 0) -> Any:
    """Return elements in memory as an array that keeps the memory; NumPy's ``frombuffer`` takes longer."""
    return np.ndarray(count, dtype, memory, start)


def send_buffer(tensor: torch.Tensor) -> list[Any]:
    """Return the bytes of a contiguous CPU tensor as the buffer of an MPI call, of any size."""
    nbytes = tensor.nbytes
    if nbytes <= COUNT_MAX and (place := tensor.data_ptr()) >= LOWEST_PLACE:
        return [address(place, nbytes), BYTE]
    check_memory(tensor)
    return buffer_of_runs(tensor, nbytes)


CUTS = MPI.get_vendor()[0] != "Open MPI"  # whether MPI cuts a message that is longer than its buffer
_nowhere = MPI.buffer.allocate(1)  # for the extra byte of a message that should be empty


def receive_buffer(tensor: torch.Tensor) -> list[Any]:
    """Return the memory of a contiguous CPU tensor as the buffer of a receive that writes nothing past it.

    Open MPI writes a too long message whole if the buffer is one contiguous run (``receives``). Here it is two runs
    that begin at the same place; a message that is too long then writes this memory twice, and nothing else. Its length
    must be read from the status: up to twice the tensor it is not an error to MPI.
    """
    nbytes = tensor.nbytes
    if CUTS:
        return send_buffer(tensor)
    if (place := tensor.data_ptr()) < LOWEST_PLACE:
        check_memory(tensor)
    return [address(place, nbytes), 2, folded_type(nbytes)] if nbytes else [_nowhere, 2, folded_type(1)]


class Descriptions(dict[tuple[int, int], list[Any]]):
    """Descriptions of memory for MPI, by place and bytes: loops use the same memory again, or some in turn.

    To make a description takes 0.4 µs, to find one 0.1.
    """

    def __init__(self, describe: Callable[[torch.Tensor], list[Any]]) -> None:
        super().__init__()
        self._describe = describe

    def add(self, place: tuple[int, int], tensor: torch.Tensor) -> list[Any]:
        """Add and return the description of a tensor at a place."""
        if len(self) >= PLACES_KEPT:
            self.clear()
        self[place] = made = self._describe(tensor)
        return made


@cache
def folded_type(nbytes: int) -> MPI.Datatype:
    """Return a datatype whose second repetition begins where the first does (MPI 5.1.7); kept."""
    count, piece = run(nbytes)
    whole = piece.Create_contiguous(count)
    made = whole.Create_resized(0, 0).Commit()
    whole.Free()
    return made


def buffer_of_runs(tensor: torch.Tensor, nbytes: int) -> list[Any]:
    """Return the memory of a tensor as the buffer of an MPI call that moves ``nbytes`` to or from each rank."""
    return [memory(tensor), *run(nbytes)]


def run(nbytes: int) -> tuple[int, MPI.Datatype]:
    """Return a run of bytes as a count and a datatype that fit MPI's int."""
    return (nbytes, BYTE) if nbytes <= COUNT_MAX else (1, block(nbytes))


@cache
def block(nbytes: int) -> MPI.Datatype:
    """Return a datatype for a run of more bytes than MPI's int counts (MPI 5.1.2); kept, since such sizes are few."""
    whole, rest = divmod(nbytes, PIECE)
    piece = MPI.BYTE.Create_contiguous(PIECE)
    made = MPI.Datatype.Create_struct([whole, rest], [0, whole * PIECE], [piece, MPI.BYTE]).Commit()
    piece.Free()
    return made


def starts_of(tensor: torch.Tensor | TensorList, sizes: Sequence[int]) -> list[int]:
    """Return the address of each share of these bytes: one after another in a tensor, or the tensors of a list."""
    return tensor.addresses if isinstance(tensor, TensorList) else addresses_from(tensor.data_ptr(), sizes)


def addresses_from(place: int, sizes: Sequence[int]) -> list[int]:
    """Return the address of each share of these bytes, one after another from a place on."""
    return list(accumulate(sizes[:-1], initial=place))
