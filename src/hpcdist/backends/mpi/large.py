"""Reductions of more than 2^31 - 1 elements, piece by piece, because MPI counts in C ints."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from hpcdist.backends.mpi.datatypes import PIECE
from hpcdist.core.backend import Counts
from hpcdist.core.table import REDUCE, Row, Shape

if TYPE_CHECKING:
    from hpcdist.backends.mpi.backend import MPIBackend
    from hpcdist.backends.mpi.reductions import Reduction


def reduce(
    backend: MPIBackend,
    row: Row,
    send: torch.Tensor,
    recv: torch.Tensor | None,
    how: Reduction,
    root: int | None,
    counts: Counts | None,
) -> None:
    """Reduce piece by piece; a reduce_scatter is one reduce to each rank."""
    source = send.reshape(-1)
    target = recv.reshape(-1) if recv is not None else None
    if row.shape is Shape.SAME:
        for start in range(0, source.numel(), PIECE):
            part = source[start : start + PIECE]
            whole = part if send is recv else None if target is None else target[start : start + PIECE]
            backend._reduce_in_memory(row, part, whole, how, root, None)
        return
    assert target is not None
    shares = counts[0] if counts else [target.numel()] * backend.size
    for rank, (start, length) in enumerate(zip(accumulate(shares, initial=0), shares, strict=False)):
        part = source[start : start + length]
        backend._reduce_in_memory(REDUCE, part, target if rank == backend.rank else None, how, rank, None)
