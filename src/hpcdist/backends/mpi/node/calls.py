"""Collectives of one group through the memory of its nodes.

The first calls that may go this way make what is needed: first the ranks exchange which of them share a node, then they
make the window and the communicator between nodes.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.node.collectives import NodeShared
from hpcdist.backends.mpi.node.places import Places, locate
from hpcdist.backends.mpi.plans import Plan, Plans
from hpcdist.core.buffers import TensorList, do_overlap, overlap
from hpcdist.core.table import ALL_GATHER_SINGLE, Row


class NodeCalls:
    """The calls of one communicator, whose plans depend on its nodes."""

    def __init__(self, communicator: Communicator, plans: Plans) -> None:
        self._communicator, self._plans = communicator, plans
        self._places: Places | None = None
        self.shared: NodeShared | None = None  # None until it is made

    def can_carry(self, plan: Plan, nbytes: int) -> bool:
        """Tell whether a call of this size goes this way; every rank calls, and connects for the first such call."""
        if nbytes < plan.shared_from:
            return False
        if self.shared is None:
            with self._communicator.in_step("a group's first call through shared memory"):
                if self._places is None:
                    self._places = places = locate(self._communicator.comm, self._communicator.derived)
                    self._plans.locate(places.nodes, places.ranks_per_node)
                else:
                    self._connect(self._places)
            return self.can_carry(plan, nbytes)
        return True

    def _connect(self, places: Places) -> None:
        """Make window and communicator, or leave all calls to MPI if a node cannot share memory; every rank calls."""
        try:
            self.shared = NodeShared(places, self._communicator)
        except MPI.Exception:  # it is a RuntimeError too: a rank has died
            raise
        except RuntimeError as error:
            warnings.warn(f"{error}; MPI's own collectives are used instead", stacklevel=2)
            self._plans.give_up_window()

    def takes_list(self, send: TensorList, recv: torch.Tensor) -> bool:
        """Tell whether ``run`` reads a list's tensors where they lie: on one node, if the list is not written."""
        written = [(recv.data_ptr(), recv.nbytes)]
        return self._plans.nodes == 1 and not do_overlap(send.places(), written)

    def run(self, row: Row, send: torch.Tensor | TensorList, recv: torch.Tensor, op: Any, root: int | None) -> None:
        """Run one collective; every rank calls.

        A tensor that overlaps its output on this rank is copied, because the other ranks have begun the call.
        """
        # so that memory that is kept between calls may be written in any mode of the caller's
        with self._communicator.in_step(row.name), torch.inference_mode():
            if send is not recv and isinstance(send, torch.Tensor) and overlap(send, recv):
                own = recv.data_ptr() + self._communicator.rank * send.nbytes
                if row is not ALL_GATHER_SINGLE or send.data_ptr() != own:
                    send = send.clone()
            arguments = (send, recv, op) if row.reduces else (send, root) if row.rooted else (send, recv)
            getattr(self.shared, row.name)(*arguments)

    def close(self, is_left: bool) -> None:
        """Free the window and communicator.

        After a revocation, or a call that was left midway, they stay until the end of the process: freeing would wait
        for dead ranks, and messages under way would meet the next communicator.
        """
        shared, self.shared, places, self._places = self.shared, None, self._places, None
        if is_left:
            return
        if shared is not None:
            shared.close()
        elif places is not None and places.node != MPI.COMM_NULL:
            places.node.Free()
