"""Reproducible reductions: the same bits for any size of message, bucket, library, threshold and number of nodes.

A library chooses the order of additions by the size of the message and the placement of the ranks, and floating-point
sums depend on the order. Here the ranks exchange their values, and each adds its share in rank order, element by
element. Reductions that do not depend on the order (integers, MIN, MAX, bitwise ones) stay the library's.
"""

from __future__ import annotations

from typing import Any

import torch

from hpcdist.core import reduction
from hpcdist.core.backend import Backend
from hpcdist.core.buffers import copy_into
from hpcdist.core.call import Call
from hpcdist.core.table import ALL_GATHER_SINGLE, ALL_REDUCE, ALL_TO_ALL, ALL_TO_ALL_SINGLE, GATHER, Shape
from hpcdist.core.work import Work

SMALL_BYTES = 1 << 14  # bytes of all ranks' values: up to here every rank gathers all and adds them, in one call
ORDERED = ("SUM", "AVG", "PREMUL_SUM", "PRODUCT")  # the ops whose result depends on the order
SUMS = ("SUM", "AVG", "PREMUL_SUM")


class Reproducible:
    """Carries out reductions of CPU tensors so that they repeat bit for bit; a backend moves the values."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def start(self, call: Call) -> Work:
        return self._backend.enqueue(call, self.run)

    def run(self, call: Call) -> None:
        op, row, size = call.op, call.row, self._backend.size
        count = call.send.numel() if row.shape is Shape.SAME else call.send.numel() // size
        self._backend.compare(f"reproducible {row.name}", call.send.dtype, op, call.root, count)
        name, values = reduction.name_of(op), reduction.terms(call.send.reshape(-1), op)
        total = self._fold(call, values, reduction.SUM if name in SUMS else op)
        if call.recv is not None:
            assert total is not None
            if name == "AVG":
                reduction.average(total, self._backend.size)
            copy_into(total.view(call.recv.shape), call.recv)

    def _fold(self, call: Call, values: torch.Tensor, op: Any) -> torch.Tensor | None:
        """Return this rank's part of the result, None if it gets none."""
        row, size = call.row, self._backend.size
        count = values.numel()
        if row.shape is Shape.COUNTED:
            assert call.counts is not None
            lengths = call.counts[0]
            own = lengths[self._backend.rank]
            received = values.new_empty(size * own)
            self._backend.run(Call(ALL_TO_ALL, values, received, counts=(lengths, [own] * size)))
            return fold_shares(received, size, op)
        if row.shape is Shape.SCATTER:
            return self._exchanged(values, op)
        if count * size * values.itemsize <= SMALL_BYTES:
            gathered = values.new_empty(size * count)
            self._backend.run(Call(ALL_GATHER_SINGLE, values, gathered))
            return fold_shares(gathered, size, op)
        share = -(-count // size)
        padded = torch.cat([values, values.new_zeros(share * size - count)])
        mine = self._exchanged(padded, op)
        if row is ALL_REDUCE:
            self._backend.run(Call(ALL_GATHER_SINGLE, mine, padded))
            return padded[:count]
        is_root = self._backend.rank == call.root
        self._backend.run(Call(GATHER, mine, padded if is_root else None, root=call.root))
        return padded[:count] if is_root else None

    def _exchanged(self, values: torch.Tensor, op: Any) -> torch.Tensor:
        """Return this rank's share of the result, for values that divide among the ranks."""
        received = torch.empty_like(values)
        self._backend.run(Call(ALL_TO_ALL_SINGLE, values, received))
        return fold_shares(received, self._backend.size, op)


def fold_shares(values: torch.Tensor, size: int, op: Any) -> torch.Tensor:
    """Return shares of equal length, combined one after another."""
    return reduction.fold(list(values.view(size, -1)), op)


def carrier(backend: Backend, call: Call) -> Backend | Reproducible:
    """Return the backend of a call that must repeat bit for bit, or ``Reproducible`` for a reduction of floats."""
    if not call.row.reduces or reduction.name_of(call.op) not in ORDERED:
        return backend
    dtype = call.tensor.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return backend
    if dtype.is_complex or not call.tensor.is_cpu:
        raise RuntimeError(
            f"hpcdist.reproducible: {call.row.name} ({reduction.name_of(call.op)}) of {dtype} on {call.tensor.device} "
            "has no reproducible form; it takes real floating-point tensors on the CPU, and sums of complex ones"
        )
    return Reproducible(backend)
