"""Messages of a rank to itself, for libraries without them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import torch

from hpcdist.core.buffers import copy_into
from hpcdist.core.errors import DistBackendError
from hpcdist.core.work import DoneWork, Work


class Receive(Work):
    """A receive of a message from this process itself."""

    def __init__(self, tensor: torch.Tensor, rank: int, finish: Callable[[], None] | None) -> None:
        super().__init__([tensor])
        self._target = tensor
        self._rank = rank
        self._when_done = finish

    def arrive(self, data: torch.Tensor) -> None:
        target = self._target
        if data.numel() > target.numel() or data.dtype != target.dtype:
            self._finish(
                DistBackendError(f"message of {data.numel()} {data.dtype} does not fit {target.numel()} {target.dtype}")
            )
            return
        copy_into(data.reshape(-1), target.reshape(-1)[: data.numel()])
        if self._when_done is not None:
            self._when_done()
        self._finish()

    def _block(self, seconds: float | None) -> bool:
        raise DistBackendError(f"rank {self._rank} waits for a message from itself that it has not sent")

    def source_rank(self) -> int:
        return self._rank


class SelfMessages:
    """The messages of one rank to itself, by tag and in order."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sent: dict[int, deque[torch.Tensor]] = defaultdict(deque)
        self._awaited: dict[int, deque[Receive]] = defaultdict(deque)

    def send(self, tensor: torch.Tensor, tag: int, finish: Callable[[], None] | None = None) -> Work:
        """Send; the message is copied, and its Work has ended."""
        if self._awaited[tag]:
            self._awaited[tag].popleft().arrive(tensor)
        else:
            self._sent[tag].append(tensor.clone())
        if finish is not None:
            finish()
        return DoneWork([])

    def holds(self, tag: int) -> bool:
        return bool(self._sent[tag])

    def receive(self, tensor: torch.Tensor, tag: int, finish: Callable[[], None] | None) -> Work:
        work = Receive(tensor, self._rank, finish)
        if self._sent[tag]:
            work.arrive(self._sent[tag].popleft())
        else:
            self._awaited[tag].append(work)
        return work
