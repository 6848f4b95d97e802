"""Bundler: copies many small tensors to one buffer and back by one MPI call.

A datatype of MPI describes where they all lie (MPI 5.1.3). Then MPI copies 100 tensors of 1 KiB in one call, in 4 µs
where ``memmove`` takes 40; to describe them takes another 4, unless they lie where the last ones did. The call is a
message of this rank to itself, on a private duplicate of MPI_COMM_SELF: MPI_Pack would do the same, but takes 34 µs in
MPICH.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.datatypes import BYTE, memory
from hpcdist.core.buffers import check_memory, new_memory


class Bundler:
    """Copies the small tensors of one group's calls; one thread at a time, as in collectives of one communicator."""

    def __init__(self) -> None:
        self._alone: MPI.Intracomm | None = None
        self._seen: tuple[Any, ...] = ()  # addresses, sizes and dtype of the tensors of the next two
        self._datatype = MPI.DATATYPE_NULL
        self._flat: torch.Tensor | None = None

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        sizes: Sequence[int],
        dtype: torch.dtype,
        change: Callable[[torch.Tensor], None],
    ) -> None:
        """Run a function that changes the elements of contiguous CPU tensors, on one tensor of a dtype that holds all.

        ``sizes`` are the bytes of each.
        """
        if self._alone is None:
            self._alone = MPI.COMM_SELF.Dup()
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        flat, seen = self._flat, (addresses, sizes, dtype)
        if flat is None or self._seen != seen:
            check_memory(*tensors)
            self._forget()
            nbytes = sum(sizes)
            if flat is None or flat.dtype is not dtype or flat.nbytes != nbytes:  # else both are used again
                self._flat = flat = new_memory(torch.Size([nbytes // dtype.itemsize]), dtype)
            self._datatype = BYTE.Create_hindexed(sizes, addresses).Commit()
            self._seen = seen
        many, one = [MPI.BOTTOM, 1, self._datatype], [memory(flat), BYTE]
        copy = self._alone.Sendrecv
        copy(many, 0, 0, one, 0, 0)
        change(flat)
        copy(one, 0, 0, many, 0, 0)

    def _forget(self) -> None:
        self._seen = ()
        if self._datatype != MPI.DATATYPE_NULL:
            self._datatype.Free()

    def close(self) -> None:
        self._forget()
        self._flat = None
        if self._alone is not None:
            self._alone.Free()
