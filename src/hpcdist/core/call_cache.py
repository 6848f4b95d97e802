"""Call cache: skips the checks of a call that is like an earlier one.

Loops make the same few calls over and over. That the tensors are plain, that their sizes fit, what they are recorded
as, by what plan the backend runs them: all of it follows from how the tensors look, and torch can compare those of a
call with earlier ones at once. ``hpcdist.torch_bridge.compiler`` knows that comparison and installs it here; without it
every call makes all checks.

To prepare for a repetition takes 4 µs and more, and to compare a call with another 0.2, which calls that hardly repeat
would never earn back. So a group looks at one call in 31, and prepares for what it sees twice: 31 shares no factor with
the number of calls that a loop usually has, so each of them is seen. Of each collective it keeps a few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from hpcdist.core import hooks
from hpcdist.core.buffers import PLAIN_TYPES, TensorList
from hpcdist.core.call import Call, Run, Start
from hpcdist.core.queue import LARGE_BYTES

if TYPE_CHECKING:
    from hpcdist.core.backend import Backend
    from hpcdist.core.table import Counts, Row

Likeness = Callable[..., bool]  # takes as many tensors as it was made from; False for all that is not a tensor

LOOKS = 31  # at one call in so many
KEPT = 8  # calls of a collective
SEEN = 32  # of those that are not prepared, how many are remembered
STAGED_MAX = 1 << 20  # bytes of a copy whose memory is kept for the next call
PLAIN_OPS = (ReduceOp.RedOpType, type(None))  # an op with a factor of its own is planned again by every call


@dataclass(frozen=True, eq=False, slots=True)
class CachedCall:
    """A call that came again, and what need not be asked of the next one.

    Attributes:
        op: how values are combined, for rows that reduce.
        root: a rank of the group, for rooted rows.
        counts: as the caller gave them.
        in_place: whether one tensor is input and output.
        is_like: tells whether what a call reads and writes looks like what this one did: class, dtype, device, shape,
            strides, and nothing lazy about it. It takes one tensor if the call is in place, else what both sides are.
        row, shape, dtype: for the record; of the input.
        is_large: whether the worker is woken at once if the call is asynchronous.
        backend: carries the call.
        run: runs the call on what looks the same.
        start: begins it and returns its Work, if the library queues calls on its device; else None.
    """

    op: Any
    root: int | None
    counts: Counts | None
    in_place: bool
    is_like: Likeness
    row: Row | str
    shape: torch.Size | None
    dtype: torch.dtype | None
    is_large: bool
    backend: Backend
    run: Run
    start: Start | None


class CachedMessage(NamedTuple):
    """A send or receive that came again: how its tensor looks, what carries it, and what it is recorded as."""

    is_like: Likeness
    backend: Backend
    shape: torch.Size
    dtype: torch.dtype


class CallCache(dict[Any, tuple[Any, ...]]):
    """The calls of one group that came again, by collective, the latest first.

    Attributes:
        seen: what it last saw of other calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Any, list[Any]] = {}

    def is_again(self, kind: Any, looks: Any) -> bool:
        """Tell whether a call with these looks was seen before; remember that it was."""
        seen = self.seen.setdefault(kind, [])
        if looks in seen:
            seen.remove(looks)
            return True
        seen.append(looks)
        del seen[:-SEEN]
        return False

    def keep(self, kind: Any, prepared: Any) -> None:
        """Keep what was prepared for a call, and forget the oldest of many."""
        self[kind] = (prepared, *self.get(kind, ()))[:KEPT]

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self.seen.clear()

    def look(self, given: Call, made: Call, backend: Backend) -> None:
        """Look at a call that a backend has been given, and prepare for it if it was seen before.

        Args:
            given: with what the caller gave.
            made: with what the backend got.
            backend: carries it.
        """
        row, send, recv, op, root, counts, *_ = given
        if hooks.likeness is None or op.__class__ not in PLAIN_OPS:
            return
        tensors = tensors_of(send, recv)
        if not all(each.__class__ in PLAIN_TYPES for each in tensors):
            return
        if counts is not None:
            counts = list(counts[0]), list(counts[1])
        looks = [(each.shape, each.stride(), each.dtype, each.device, each.requires_grad) for each in tensors]
        if tensors and not self.is_again(row, (op, root, counts, looks)):
            return
        sides = staging(send, recv, made)
        if sides is None or (sides and not all(each.is_cpu for each in tensors)):
            return
        run, start = backend.prepare(made)
        if sides:
            run, start = staged(run, *sides, recv is send), None
        if start is None and not all(each.is_cpu for each in tensors):
            return  # the asynchronous call is more than ``run`` on another thread, such as a place among streams
        tensor = made.tensor
        shape, dtype = (None, None) if tensor is None else (tensor.shape, tensor.dtype)
        is_large = max((each.nbytes for each in (made.send, made.recv) if each is not None), default=0) >= LARGE_BYTES
        is_like = likeness_of(send, recv, tensors)
        in_place = recv is send
        self.keep(
            row,
            CachedCall(
                op, root, counts, in_place, is_like, made.row, shape, dtype, is_large, backend, run, start
            ),
        )  # fmt: skip

    def look_at_message(self, what: str, tensor: torch.Tensor, backend: Backend) -> None:
        """Look at a message of a plain CPU tensor: ``isend`` or ``irecv``."""
        shape, dtype = tensor.shape, tensor.dtype
        if hooks.likeness is not None and self.is_again(what, (shape, dtype)):
            self.keep(what, CachedMessage(hooks.likeness(tensor), backend, shape, dtype))


def tensors_of(send: Any, recv: Any) -> list[torch.Tensor]:
    """Return the tensors that a call reads and writes, in order; those of a call in place once."""
    tensors: list[torch.Tensor] = []
    for side in (send,) if recv is send else (send, recv):
        if side.__class__ is TensorList:
            tensors += side.tensors
        elif side.__class__ is list:
            tensors += side
        elif side is not None:
            tensors.append(side)
    return tensors


def likeness_of(send: Any, recv: Any, tensors: list[torch.Tensor]) -> Likeness:
    """Return what tells whether what a call reads and writes looks like this."""
    if not tensors:
        return is_unobserved
    assert hooks.likeness is not None
    check = hooks.likeness(*tensors)
    if send is None:
        return lambda send, recv: send is None and check(recv)
    if recv is None:
        return lambda send, recv: recv is None and check(send)
    if send.__class__ is not list and recv.__class__ is not list:
        return check
    is_read, is_written = send.__class__ is list, recv.__class__ is list
    length = len(send if is_read else recv)

    def is_like(send: Any, recv: Any) -> bool:
        if is_read and is_written:
            return send.__class__ is recv.__class__ is list and len(send) == len(recv) == length and check(*send, *recv)
        one, many = (recv, send) if is_read else (send, recv)
        if many.__class__ is not list or len(many) != length:
            return False
        return check(*many, one) if is_read else check(one, *many)

    return is_like


def is_unobserved(_: None) -> bool:
    """Tell whether a call without tensors may skip what looks at calls: the modes of torch's dispatcher."""
    return not hooks.has_modes()


# what makes the backend's buffer of a caller's tensor; and a copy to be copied back, or None
Side = tuple[Callable[[Any], Any], Any]


def staging(send: Any, recv: Any, made: Call) -> tuple[Side, Side] | tuple[()] | None:
    """Return how the backend's buffers are made of a call's tensors; empty if they are these, None if that is not easy.

    Args:
        send, recv: what the caller gave.
        made: with what the backend got.
    """
    tensors, buffers = tensors_of(send, recv), tensors_of(made.send, made.recv)
    if len(tensors) != len(buffers):
        return None
    if all(one is other for one, other in zip(tensors, buffers, strict=True)):
        return ()
    if send.__class__ is list or recv.__class__ is list:
        return None
    first = side_of(send, made.send, True)
    second = side_of(recv, made.recv, False)
    return None if first is None or second is None else (first, second)


def side_of(given: Any, buffer: Any, is_read: bool) -> Side | None:
    """Return how a buffer is made of a tensor."""
    if buffer is given:
        return (lambda tensor: tensor), None
    is_real = given.is_complex() and not buffer.is_complex()  # two numbers for each complex one
    kept = torch.view_as_complex(buffer) if is_real else buffer
    if (kept.shape, kept.dtype) != (given.shape, given.dtype):
        return None
    if buffer.data_ptr() == given.data_ptr():
        return (lambda tensor: torch.view_as_real(tensor.detach())) if is_real else torch.Tensor.detach, None
    # values that share memory are written once; what autograd sees is not copied as it is
    if buffer.nbytes > STAGED_MAX or 0 in given.stride() or given.requires_grad or buffer.is_inference():
        return None

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        kept.copy_(tensor)
        return buffer

    return (copied if is_read else (lambda _: buffer)), kept


def staged(run: Run, first: Side, second: Side, in_place: bool) -> Run:
    """Return what runs a call on buffers that are made of its tensors."""
    (reads, _), (writes, copy) = first, second

    def run_staged(send: Any, recv: Any) -> None:
        buffer = reads(send)
        run(buffer, buffer if in_place else writes(recv))
        if copy is not None:
            recv.copy_(copy)

    return run_staged
