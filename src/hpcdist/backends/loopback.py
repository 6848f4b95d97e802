"""Loopback backend: a group of one process, in which every collective is a copy and messages go to itself.

``init_process_group()`` without a launcher uses it, so that a script runs unchanged on a laptop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import ClassVar

import torch
from torch.distributed import ReduceOp

from hpcdist.core import reduction
from hpcdist.core.backend import Backend, Bootstrap
from hpcdist.core.buffers import copy_into, overlap
from hpcdist.core.call import Call
from hpcdist.core.objects import TensorObjects
from hpcdist.core.self_messages import SelfMessages
from hpcdist.core.work import Work


class LoopbackBackend(Backend):
    """A communicator of one rank."""

    name: ClassVar[str] = "loopback"
    rank = 0
    size = 1

    def __init__(self) -> None:
        self._mailbox = SelfMessages(0)
        self.objects = TensorObjects(self, self.run)

    @classmethod
    def connect(cls, bootstrap: Bootstrap) -> LoopbackBackend:
        """Make the group; ValueError if more than one rank is asked for."""
        if bootstrap.size != 1:
            raise ValueError(f"backend 'loopback' is one process; world_size is {bootstrap.size}")
        return cls()

    def run(self, call: Call) -> None:
        """Copy input to output."""
        row, send, recv, op, *_ = call
        if send is None or recv is None:
            return
        if row.reduces and op == ReduceOp.PREMUL_SUM:
            send = reduction.terms(send, op)
        elif send is not recv and overlap(send, recv):
            send = send.clone()
        if send is not recv:
            copy_into(send.view(recv.shape), recv)

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        """Send to oneself; the message is copied."""
        self._mailbox.send(tensor, tag)

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> int:
        """Receive a message that was sent before."""
        self.irecv(tensor, src, tag, None).wait()
        return 0

    def isend(self, tensor: torch.Tensor, dst: int, tag: int, finish: Callable[[], None] | None = None) -> Work:
        """Send to oneself."""
        return self._mailbox.send(tensor, tag, finish)

    def irecv(self, tensor: torch.Tensor, src: int | None, tag: int, finish: Callable[[], None] | None) -> Work:
        """Receive a message that was or will be sent."""
        return self._mailbox.receive(tensor, tag, finish)

    def split(
        self, subgroups: Sequence[Sequence[int]], names: Sequence[str], timeout: timedelta
    ) -> LoopbackBackend | None:
        """Return a group of one if the process is in one of the subgroups."""
        return type(self)() if any(0 in ranks for ranks in subgroups) else None

    def create_group(self, ranks: Sequence[int], name: str, timeout: timedelta) -> LoopbackBackend:
        """Return a group of one."""
        return type(self)()
