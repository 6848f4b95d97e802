"""Plan cache: how the collectives of one row, dtype and op are carried out on one communicator.

A plan follows from what every rank of the group knows: the row, the dtype, the op, the number of ranks, the MPI library
and the thresholds that the ranks have agreed on. Nothing of one rank's tensors or process enters it, so ranks never
make different calls (``core.call_cache`` keeps what follows from this rank's tensors).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch.distributed import ReduceOp

from hpcdist.backends.mpi.node.thresholds import NEVER, Thresholds
from hpcdist.backends.mpi.reductions import Reduction, plan
from hpcdist.core.reduction import name_of
from hpcdist.core.table import Row

RedOpType = ReduceOp.RedOpType
ACROSS_NODES = ("all_reduce",)  # the rows that use the window on several nodes; the others then go to MPI


class Plan(NamedTuple):
    """How a row, dtype and op are carried out.

    Attributes:
        reduction: MPI's datatype and op, and what surrounds the call; None for rows that move.
        shared_from: from how many bytes of the larger buffer on the call goes through node-shared memory.
    """

    reduction: Reduction | None
    shared_from: int


class Plans:
    """The plans of one communicator.

    Args:
        size: its number of ranks.
        thresholds: the same on all of them.
    """

    def __init__(self, size: int, thresholds: Thresholds) -> None:
        self.size = size
        self.thresholds = thresholds
        self._is_one_node = True  # until the window says otherwise
        self._made: dict[tuple[Row, torch.dtype, int], Plan] = {}

    def of(self, row: Row, dtype: torch.dtype, op: Any) -> Plan:
        """Return a plan, which is made once.

        Raises:
            ValueError, RuntimeError: the op has no meaning for the dtype (``core.reduction.check``).
        """
        return self._made.get((row, dtype, id(op))) or self._make(row, dtype, op)

    def _make(self, row: Row, dtype: torch.dtype, op: Any) -> Plan:
        reduction = plan(row, dtype, op) if row.reduces else None
        # only the members of RedOpType live for ever; the address of any other object may be used again
        lasts = op is None or (op.__class__ is RedOpType and op is getattr(RedOpType, op.name))
        shared_from = NEVER
        if lasts and (self._is_one_node or row.name in ACROSS_NODES):
            name = None if op is None else name_of(op)
            shared_from = self.thresholds.of(row.name, dtype, name, self.size, MPI.get_vendor()[0])
        made = Plan(reduction, shared_from)
        if lasts:
            self._made[row, dtype, id(op)] = made
        return made

    def limit_window(self, nodes: int) -> None:
        """Take note of the window's number of nodes, the same on all ranks; 0 if there is no window."""
        if nodes in (0, self.size):  # a node with one rank has nobody to share with
            self.thresholds = Thresholds("off")
        self._is_one_node = nodes == 1
        self._made.clear()
