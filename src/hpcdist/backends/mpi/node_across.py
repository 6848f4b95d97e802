"""How is a slice that one node has reduced combined with the same slice of the other nodes?

One `MPI_Allreduce` in place, on a communicator that holds one rank of each node. Where MPI's predefined op says the
same as torch's, it is used; MIN and MAX of floats and the half types go through an op of our own, because MPI leaves
NaN undefined and has no half types: it unpacks to torch and folds there.
"""

from __future__ import annotations

from typing import Any

import torch
from mpi4py import MPI

from .node_arithmetic import Fold

MPI_TYPES: dict[torch.dtype, MPI.Datatype] = {
    torch.float64: MPI.DOUBLE,
    torch.float32: MPI.FLOAT,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
    torch.int16: MPI.INT16_T,
    torch.int8: MPI.INT8_T,
    torch.uint64: MPI.UINT64_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint8: MPI.UINT8_T,
    torch.bool: MPI.UINT8_T,
}

MPI_OPS: dict[str, MPI.Op] = {
    "SUM": MPI.SUM,
    "AVG": MPI.SUM,
    "PREMUL_SUM": MPI.SUM,
    "PRODUCT": MPI.PROD,
    "MIN": MPI.MIN,
    "MAX": MPI.MAX,
    "BAND": MPI.BAND,
    "BOR": MPI.BOR,
    "BXOR": MPI.BXOR,
}

# bool lies in memory as one byte, 0 or 1, where logic and bits agree.
BOOL_OPS: dict[str, MPI.Op] = MPI_OPS | {"SUM": MPI.BOR, "MAX": MPI.BOR, "PRODUCT": MPI.BAND, "MIN": MPI.BAND}


class AcrossNodes:
    """Reduces one slice over the nodes, with the MPI type and op found once.

    Args:
        comm: one rank of each node; this object does not own it.
        fold: what the slice was reduced by inside the node.
    """

    def __init__(self, comm: MPI.Intracomm, fold: Fold) -> None:
        self.comm = comm
        self.dtype = fold.wide or fold.dtype
        self._combine = fold.combine
        self._owned: tuple[MPI.Op, MPI.Datatype] | None = None
        unordered = fold.op not in ("MIN", "MAX") or not self.dtype.is_floating_point
        if self.dtype in MPI_TYPES and unordered:
            ops = BOOL_OPS if self.dtype is torch.bool else MPI_OPS
            self.op, self.type = ops[fold.op], MPI_TYPES[self.dtype]
        else:
            self.type = MPI.BYTE.Create_contiguous(self.dtype.itemsize).Commit()
            self.op = MPI.Op.Create(self._fold_buffers, commute=True)
            self._owned = (self.op, self.type)

    def _fold_buffers(self, incoming: Any, inout: Any, _: MPI.Datatype) -> None:
        a = torch.frombuffer(incoming, dtype=self.dtype)
        b = torch.frombuffer(inout, dtype=self.dtype)
        self._combine(a, b, out=b)

    def reduce(self, values: torch.Tensor) -> None:
        """Reduce a contiguous slice in place; every rank of the communicator calls with the same length."""
        buffer = values.view(torch.uint8).numpy()
        self.comm.Allreduce(MPI.IN_PLACE, [buffer, values.numel(), self.type], self.op)

    def close(self) -> None:
        """Free the op and type that MPI did not bring along."""
        if self._owned is not None:
            op, datatype = self._owned
            self._owned = None
            op.Free()
            datatype.Free()
