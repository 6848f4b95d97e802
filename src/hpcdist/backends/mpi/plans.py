"""Plan cache: how one communicator carries out the collectives of each row, dtype and op.

A plan follows from facts that every rank of the group knows: the row, the dtype, the op, the number of ranks, the MPI
library, the nodes' layout and the thresholds on which the ranks have agreed. No fact of one rank's tensors or process
enters it, so ranks never make different calls (``core.call_cache`` keeps what follows from this rank's tensors).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI
from torch.distributed import ReduceOp

from hpcdist.backends.mpi.node.threshold_file import NEVER
from hpcdist.backends.mpi.node.thresholds import Thresholds
from hpcdist.backends.mpi.reductions import Reduction, plan
from hpcdist.core.call_words import kind_word
from hpcdist.core.reduction import PREMUL_SUM, check_factor, name_of
from hpcdist.core.table import Row

RedOpType = ReduceOp.RedOpType


@dataclass(eq=False, slots=True)
class Plan:
    """How a row, dtype and op are carried out."""

    kind: tuple[Row, torch.dtype, Any]
    reduction: Reduction | None  # MPI's datatype and op, and the steps around the call; None for rows that move
    said: int  # its word on the call board (``core.call_words``), without root
    # bytes of the larger buffer from which the call goes through the memory of the nodes; may grow when these are known
    shared_from: int


class Plans:
    """The plans of one communicator; the thresholds are the same on all of its ranks."""

    def __init__(self, size: int, thresholds: Thresholds) -> None:
        self.size = size
        self.thresholds = thresholds
        self.nodes = self.ranks_per_node = 0  # not known yet
        self._has_window = True
        self._made: dict[tuple[Row, torch.dtype, int], Plan] = {}
        self._with_factors: dict[tuple[Row, torch.dtype], Plan] = {}  # whatever they are

    def of(self, row: Row, dtype: torch.dtype, op: Any) -> Plan:
        """Return a plan, made once; raise if the op has no meaning for the dtype (``reduction.check``)."""
        return self._made.get((row, dtype, id(op))) or self._make(row, dtype, op)

    def _make(self, row: Row, dtype: torch.dtype, op: Any) -> Plan:
        has_factor = op.__class__ is ReduceOp and name_of(op) == "PREMUL_SUM"
        if has_factor and (found := self._with_factors.get((row, dtype))) is not None:
            check_factor(row, dtype, op)
            return found
        reduction = plan(row, dtype, op) if row.reduces else None
        made = Plan((row, dtype, PREMUL_SUM if has_factor else op), reduction, kind_word(row.name, dtype, op), NEVER)
        # only the members of RedOpType live forever; the address of any other object may be used again
        if op is None or (op.__class__ is RedOpType and op is getattr(RedOpType, op.name)):
            made.shared_from = self._shared_from(*made.kind)
            self._made[row, dtype, id(op)] = made
        elif has_factor:
            self._with_factors[row, dtype] = made
        return made

    def _shared_from(self, row: Row, dtype: torch.dtype, op: Any) -> int:
        if not self._has_window:
            return NEVER
        name, library = None if op is None else name_of(op), MPI.get_vendor()[0]
        return self.thresholds.of(row.name, dtype, name, self.nodes, self.ranks_per_node, self.size, library)

    def _update(self) -> None:
        for each in self._made.values():
            each.shared_from = self._shared_from(*each.kind)

    def locate(self, nodes: int, ranks_per_node: int) -> None:
        """Set the number of nodes, and of ranks on each (0 if they differ), the same on all ranks."""
        self.nodes, self.ranks_per_node = nodes, ranks_per_node
        self._update()

    def give_up_window(self) -> None:
        """Leave all calls to MPI, because a node cannot share memory."""
        self._has_window = False
        self._update()
