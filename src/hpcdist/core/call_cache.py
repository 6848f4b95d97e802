"""Call cache: skips the checks of a call whose tensors match those of the previous one.

Loops call a collective on tensors of one shape over and over. That the tensors are plain, that their sizes fit, what
they are recorded as, by what plan the backend runs them: all of it follows from how the tensors look, and torch can
compare two by one call in place of seven for each. ``hpcdist.torch_bridge.compiler`` knows that call and installs it
here; without it every call makes all checks.

To prepare for a repetition takes 4 µs, and to compare a call with the one before 0.2, which calls that hardly repeat
would never earn back. So a group looks at one call in 31, and prepares for what it sees twice: 31 shares no factor with
the number of calls that a loop usually has, so each of them is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from hpcdist.core import hooks
from hpcdist.core.call import Call
from hpcdist.core.queue import LARGE_BYTES
from hpcdist.core.work import Work

if TYPE_CHECKING:
    from hpcdist.core.backend import Backend
    from hpcdist.core.table import Row

Likeness = Callable[..., bool]  # takes as many tensors as it was made from; False for all that is not a tensor

LOOKS = 31  # at one call in so many
PLAIN_OPS = (ReduceOp.RedOpType, type(None))  # an op with a factor of its own is planned again by every call


@dataclass(frozen=True, eq=False, slots=True)
class CachedCall:
    """A call that came again and again, and what need not be asked of the next one.

    Attributes:
        op: how values are combined, for rows that reduce.
        root: a rank of the group, for rooted rows.
        in_place: whether one tensor is input and output.
        is_like: tells whether tensors look like those of this call: class, dtype, device, shape, strides, and nothing
            lazy about them. It takes one tensor if the call is in place, else two.
        shape: of the input, for the record; None for a barrier.
        dtype: of both.
        is_large: whether the worker is woken at once if the call is asynchronous.
        backend: carries the call.
        run: runs the call on tensors that look the same.
        start: begins it and returns its Work, if the library queues calls on its device; else None.
    """

    op: Any
    root: int | None
    in_place: bool
    is_like: Likeness
    shape: torch.Size | None
    dtype: torch.dtype | None
    is_large: bool
    backend: Backend
    run: Callable[..., Any]
    start: Callable[..., Work] | None


class CallCache(dict["Row | str", Any]):
    """Of each collective on one group, a CachedCall, or what the group last saw of it."""

    def look(
        self, row: Row, send: torch.Tensor, recv: torch.Tensor, op: Any, root: int | None, backend: Backend
    ) -> None:
        """Look at a call that a backend has carried out on plain tensors."""
        shape, dtype = send.shape, send.dtype
        seen = (shape, dtype, op, root)
        if self.get(row) != seen:
            self[row] = seen
        elif hooks.likeness is not None and op.__class__ in PLAIN_OPS:
            run, start = backend.prepare(Call(row, send, recv, op, root))
            if start is None and not send.is_cpu:
                return  # the asynchronous call is more than ``run`` on another thread, such as a place among streams
            is_like = hooks.likeness(send) if recv is send else hooks.likeness(send, recv)
            is_large = max(send.nbytes, recv.nbytes) >= LARGE_BYTES
            self[row] = CachedCall(op, root, recv is send, is_like, shape, dtype, is_large, backend, run, start)

    def look_at_message(self, what: str, tensor: torch.Tensor, backend: Backend) -> None:
        """Look at a message of a plain CPU tensor: ``isend`` or ``irecv``."""
        seen = (tensor.shape, tensor.dtype)
        if self.get(what) != seen:
            self[what] = seen
        elif hooks.likeness is not None:
            self[what] = CachedCall(None, None, True, hooks.likeness(tensor), *seen, False, backend, backend.run, None)

    def keep(self, row: Row, backend: Backend) -> None:
        """Remember a call without tensors, which is the same each time."""
        run, start = backend.prepare(Call(row))
        self[row] = CachedCall(None, None, True, is_unobserved, None, None, False, backend, run, start)


def is_unobserved(_: None) -> bool:
    """Tell whether a call without tensors may skip what looks at calls: the modes of torch's dispatcher."""
    return not hooks.has_modes()
