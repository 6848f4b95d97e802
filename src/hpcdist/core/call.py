"""Call: the record of one collective, from the checks of its arguments to the library that carries it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hpcdist.core.buffers import TensorList, check_memory
from hpcdist.core.table import Counts, Row
from hpcdist.core.work import Work

# run a call again, or begin it; the arguments are the input and the output: a tensor, a list of tensors or None
Run = Callable[[Any, Any], None]
Start = Callable[[Any, Any], Work]


class Call(NamedTuple):
    """One collective of one rank; before the checks its buffers are what the caller gave, such as a NumPy array."""

    row: Row
    send: Any = None  # the input: the same object as ``recv`` for a call in place, None if this rank does not send
    recv: Any = None  # the output; None if this rank does not receive
    op: Any = None  # how values are combined, for rows that reduce
    root: int | None = None  # a rank of the group, for rooted rows
    # elements to and from each rank, for rows of shape COUNTED; of each tensor if several are reduced as one
    counts: Counts | None = None
    finish: Callable[[], None] | None = None  # runs when ``recv`` holds the result, such as a copy to the caller
    result: list[Any] | None = None  # the result of the call's Work, tensors or lists of them; None for the output
    limit: float | None = None  # the seconds that it may take; None for the group's timeout

    @property
    def tensor(self) -> Any:
        """The input, or the output on a rank that does not send; None for a barrier."""
        return self.recv if self.send is None else self.send

    @property
    def nbytes(self) -> int:
        return max(0 if each is None else each.nbytes for each in (self.send, self.recv))

    def shown(self) -> list[Any]:
        return self.result if self.result is not None else [] if self.recv is None else [self.recv]

    def locate(self) -> None:
        """Find where its tensors lie now; raise if the caller has freed the memory of one since they were checked."""
        for each in (self.send, self.recv):
            if each.__class__ is TensorList:
                each.locate()
            elif each is not None:
                check_memory(each)

    def sizes(self) -> list[int]:
        """Return the bytes of each of its tensors, as they are now."""
        sides = [side for side in (self.send, self.recv) if side is not None]
        return [each.nbytes for side in sides for each in (side.tensors if side.__class__ is TensorList else [side])]

    def without_memory(self) -> Call:
        """Return the call without its tensors, to be kept and repeated ``on`` others."""
        send, recv = map(without_memory, (self.send, self.recv))
        return self._replace(send=send, recv=send if self.recv is self.send else recv, finish=None, result=None)

    def on(self, send: Any, recv: Any) -> Call:
        """Return the same call on similar tensors or lists, without ``finish`` and ``result``."""
        are_lists = send.__class__ is recv.__class__ is list
        if send.__class__ is list:
            send = TensorList(send, self.send.dtype)
        if self.recv is self.send:
            recv = send
        elif recv.__class__ is list:
            recv = TensorList(recv, self.recv.dtype)
        counts = self.counts
        if counts is not None and are_lists and len({*send.sizes, *recv.sizes}) == 1:
            counts = ([send.sizes[0] // send.itemsize] * len(counts[0]),) * 2  # of tensors that may have any size
        return Call(self.row, send, recv, self.op, self.root, counts, None, self.result, self.limit)


def without_memory(buffer: Any) -> Any:
    """Return a stand-in for a tensor or list, with its sizes and without its memory; None for None."""
    if buffer is None:
        return None
    if buffer.__class__ is TensorList:
        return buffer.without_memory()
    with torch.inference_mode(buffer.is_inference()):
        return torch.empty_like(buffer, device="meta")


def chain(first: Callable[[], None], then: Callable[[], None] | None) -> Callable[[], None]:
    """Return a function that calls both; the second may be None."""
    if then is None:
        return first

    def run() -> None:
        first()
        then()

    return run
