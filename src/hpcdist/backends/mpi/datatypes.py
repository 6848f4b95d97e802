"""How does MPI see a torch dtype, and a block of any number of bytes?"""

from __future__ import annotations

import torch
from mpi4py import MPI

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
    """Return the memory of a contiguous CPU tensor as mpi4py takes it."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


class Block:
    """A run of ``nbytes`` bytes as a count and a datatype that fit MPI's int (MPI 5.1.2, derived types)."""

    def __init__(self, nbytes: int) -> None:
        self._made: list[MPI.Datatype] = []
        if nbytes <= COUNT_MAX:
            self.count, self.datatype = nbytes, MPI.BYTE
            return
        whole, rest = divmod(nbytes, PIECE)
        piece = self._keep(MPI.BYTE.Create_contiguous(PIECE))
        self.count = 1
        self.datatype = self._keep(
            MPI.Datatype.Create_struct([whole, rest], [0, whole * PIECE], [piece, MPI.BYTE])
        ).Commit()

    def _keep(self, datatype: MPI.Datatype) -> MPI.Datatype:
        self._made.append(datatype)
        return datatype

    def __enter__(self) -> Block:
        return self

    def __exit__(self, *_: object) -> None:
        for datatype in reversed(self._made):
            datatype.Free()
