"""Reduction across nodes: a slice that one node has reduced is combined with the same slice of the other nodes.

One `MPI_Allreduce` in place, on a communicator that holds one rank of each node. Where MPI's predefined op says the
same as torch's, it is used; MIN and MAX of floats and the half types go through an op of our own, because MPI leaves
NaN undefined and has no half types: it unpacks to torch and folds there.

Under ULFM it is `MPI_Iallreduce` and a loop of `MPI_Test`, which a poll can leave: Open MPI 5.0.11 does not end a
blocking one by revocation if a rank of it is stopped (4 MiB on 2 nodes of 2 ranks).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.node.arithmetic import Fold
from hpcdist.core.buffers import as_bytes

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


POLL_SECONDS = 0.004
ABANDONED: list[tuple[MPI.Request, Any]] = []  # calls that were left, and their memory, which MPI may still write to


class AcrossNodes:
    """Reduces one slice over the nodes, with the MPI type and op found once.

    Args:
        comm: one rank of each node; this object does not own it.
        fold: what the slice was reduced by inside the node.
        poll: called every few milliseconds of waiting; what it raises ends the wait. None waits in MPI.
    """

    def __init__(self, comm: MPI.Intracomm, fold: Fold, poll: Callable[[], None] | None = None) -> None:
        self.comm = comm
        self._poll = poll
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
        buffer = as_bytes(values).numpy()
        described = [buffer, values.numel(), self.type]
        if self._poll is None:
            self.comm.Allreduce(MPI.IN_PLACE, described, self.op)
        else:
            self._wait(self.comm.Iallreduce(MPI.IN_PLACE, described, self.op), buffer, self._poll)

    def _wait(self, request: MPI.Request, buffer: Any, poll: Callable[[], None]) -> None:
        polled = time.monotonic()
        try:
            while not request.Test():
                os.sched_yield()
                if (now := time.monotonic()) - polled > POLL_SECONDS:
                    polled = now
                    poll()
        except BaseException:
            ABANDONED.append((request, buffer))
            raise

    def close(self) -> None:
        """Free the op and type that MPI did not bring along."""
        if self._owned is not None:
            op, datatype = self._owned
            self._owned = None
            op.Free()
            datatype.Free()
