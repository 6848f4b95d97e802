"""Collectives of one group through the memory of its nodes.

What they need is made by the first calls that may use them: first the ranks find out who shares a node, then the window
and the communicator between nodes are made.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.node.between_nodes import BetweenNodes
from hpcdist.backends.mpi.node.collectives import NodeShared
from hpcdist.backends.mpi.node.places import Places, locate
from hpcdist.core.buffers import TensorList, do_overlap, overlap
from hpcdist.core.table import ALL_GATHER_SINGLE, Row


class NodeCalls:
    """The calls of one communicator."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._places: Places | None = None
        self.shared: NodeShared | BetweenNodes | None = None  # carries the calls out, once it is made

    def locate(self) -> tuple[int, int]:
        """Find out which ranks share a node; every rank calls. Return the number of nodes, and of ranks on each."""
        self._places = locate(self._communicator.comm, self._communicator.derived)
        return self._places.nodes, self._places.ranks_per_node

    def connect(self) -> bool:
        """Make what the calls need; every rank calls, and all return False if a node cannot share memory."""
        places = self._places
        assert places is not None
        try:
            if places.nodes == 1:
                self.shared = NodeShared(places, self._communicator)
            else:
                self.shared = BetweenNodes(places, self._communicator)
        except MPI.Exception:  # which is a RuntimeError: a rank has died
            raise
        except RuntimeError as error:
            warnings.warn(f"{error}; MPI's own collectives are used instead", stacklevel=2)
            return False
        return True

    def takes_list(self, send: TensorList, recv: torch.Tensor) -> bool:
        """Tell whether ``run`` reads the tensors of a list where they lie: on one node, if none is written."""
        written = [(recv.data_ptr(), recv.nbytes)]
        return isinstance(self.shared, NodeShared) and not do_overlap(send.places(), written)

    def run(self, row: Row, send: torch.Tensor | TensorList, recv: torch.Tensor, op: Any, root: int | None) -> None:
        """Run one collective; every rank calls.

        A tensor that overlaps its output on this rank is copied: the others are on their way.
        """
        shared = self.shared
        assert shared is not None
        if send is not recv and isinstance(send, torch.Tensor) and overlap(send, recv):
            own = recv.data_ptr() + self._communicator.rank * send.nbytes
            if row is not ALL_GATHER_SINGLE or send.data_ptr() != own:
                send = send.clone()
        arguments = (send, recv, op) if row.reduces else (send, root) if row.rooted else (send, recv)
        getattr(shared, row.name)(*arguments)

    def close(self, is_left: bool) -> None:
        """Free what was made.

        After a revocation, or after a call that was left midway, it is left to the end of the process: to free it would
        wait for the dead, and messages on the way would meet the next communicator.
        """
        shared, self.shared, places, self._places = self.shared, None, self._places, None
        if is_left:
            return
        if shared is not None:
            shared.close()
        elif places is not None and places.node != MPI.COMM_NULL:
            places.node.Free()
