"""Call cache: skips the checks of a call that is like an earlier one.

Programs repeat calls of a few kinds. Whether the tensors are plain, which backend carries them and by which plan: all
of it follows from the tensors' metadata, and torch can compare that of a call with an earlier one's by one function of
C++. ``hpcdist.torch_bridge.compiler`` finds that function and installs it; without it every call makes all checks.

One entry serves CPU tensors of any sizes: one tensor, two contiguous ones whose sizes fit, or a list of tensors of one
size. If sizes decide more, as with splits, they are part of the comparison.

To prepare an entry takes 4 µs and more, and each comparison 0.2 µs, which is lost on calls that hardly repeat. So a
group looks at one call in 31: a number that shares no factor with the usual number of calls in a loop, so that each of
them is seen. It makes an entry for any sizes at once, one for certain sizes when it has seen them twice, and keeps a
few of each collective, the most frequent first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from hpcdist.core import hooks
from hpcdist.core.backend import Backend
from hpcdist.core.buffers import PLAIN_TYPES, Copies, LentCopies, TensorList, as_splits, resized
from hpcdist.core.call import Call, Run, Start
from hpcdist.core.queue import LARGE_BYTES
from hpcdist.core.table import ALL_TO_ALL_SINGLE, Counts, Row

Likeness = Callable[..., bool]  # takes as many arguments as tensors that it was made from; False if one is not a tensor

LIST: Any = list
NBYTES = attrgetter("nbytes")
LOOKS = 31  # the cache looks at one call in so many
KEPT = 8  # entries of a collective
SEEN = 32  # how many other calls of a collective are remembered
NEVER = 1 << 62  # bytes
PLAIN_OPS = (ReduceOp.RedOpType, type(None))  # a PREMUL_SUM has a factor, and is planned at every call


@dataclass(frozen=True, eq=False, slots=True)
class CachedCall:
    """An entry of the cache: a call that came again, and all that follows from its metadata."""

    op: Any
    counts: Counts | None  # as ``issue`` was given them
    in_place: bool  # whether one tensor is input and output
    is_like: Likeness  # compares metadata: takes one tensor if the call is in place, else input and output
    row: Row | str  # this and the next two are for the journal's record; of the input
    shape: torch.Size | None  # None if other calls may have another shape
    dtype: torch.dtype | None
    large_from: int  # tensors of so many bytes wake the worker at once if the call is asynchronous
    backend: Backend
    run: Run
    run_queued: Run  # for a thread that may be in other modes of autograd; the same as ``run`` for plain tensors
    start: Start | None  # begins it and returns its Work, if the library queues calls on its device


class CachedMessage(NamedTuple):
    """A send or receive that came again: the comparison of its tensor, its backend, and the dtype of its record."""

    is_like: Likeness
    backend: Backend
    dtype: torch.dtype
    # returns the memory to send or receive, and a function to run at the message's end; None for the tensor itself
    run_on_copies: Callable[[torch.Tensor], tuple[torch.Tensor, Callable[[], None] | None]] | None


class CallCache(dict[Any, tuple[Any, ...]]):
    """The repeated calls of one group, by collective; of rooted ones and those with counts by collective and root."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Any, list[Any]] = {}  # the last looks of other calls

    def is_again(self, kind: Any, looks: Any) -> bool:
        """Tell whether a call with these properties was seen before, and remember it."""
        seen = self.seen.setdefault(kind, [])
        if looks in seen:
            seen.remove(looks)
            return True
        seen.append(looks)
        del seen[:-SEEN]
        return False

    def has(self, kind: Any, op: Any, counts: Counts | None, send: Any, recv: Any) -> bool:
        """Tell whether a call is like a repeated one, so that only its tensors' memory needs a check."""
        in_place = recv is send
        for known in self.get(kind, ()):
            if (
                known.op is op
                and known.in_place is in_place
                and known.counts == counts
                and (known.is_like(send) if in_place else known.is_like(send, recv))
            ):
                return True
        return False

    def keep(self, kind: Any, prepared: Any) -> None:
        """Add an entry, and drop the oldest of many."""
        self[kind] = (prepared, *self.get(kind, ()))[:KEPT]

    def advance(self, kind: Any, prepared: Any) -> None:
        """Move an entry to the front: each comparison before it takes 0.2 µs."""
        self[kind] = (prepared, *(each for each in self[kind] if each is not prepared))

    def clear(self) -> None:
        """Drop all entries."""
        super().clear()
        self.seen.clear()

    def look(self, given: Call, made: Call, backend: Backend) -> None:
        """Look at a call as the caller gave it and as the backend got it; add an entry if it may come again."""
        row, send, recv, op, root, counts, *_ = given
        if hooks.likeness is None or op.__class__ not in PLAIN_OPS:
            return
        tensors = tensors_of(send, recv)
        if not all(each.__class__ in PLAIN_TYPES for each in tensors):
            return
        sides = find_staging(send, recv, made)
        is_on_cpu = all(each.is_cpu for each in tensors)
        if sides is None or (sides and not is_on_cpu):
            return
        buffers = tensors_of(made.send, made.recv)
        is_easy = not sides or (
            all(one.shape == other.shape for one, other in zip(tensors, buffers, strict=True))
            and (len(tensors) == 1 or not any(is_copy for _, is_copy in sides))
        )
        any_size = bool(tensors) and is_easy and is_on_cpu and has_any_size(given, made)
        if counts is not None:
            sent: Any
            received: Any
            sent, received = map(as_splits, counts)  # their entries may be tensors, which change; either may be None
            counts = sent, received
        looks = [(each.shape, each.stride(), each.dtype, each.device, each.requires_grad) for each in tensors]
        kind = row if root is None and counts is None else (row, root)
        if tensors and not any_size and not self.is_again(kind, (op, counts, looks)):
            return
        run, start = backend.prepare(made.without_memory() if is_on_cpu else made)
        if sides:
            run, start = run_on_copies(run, *sides, recv is send), None
        if start is None and not is_on_cpu:
            return  # the asynchronous call is more than ``run`` on another thread, such as a place among streams
        tensor = made.tensor
        shape, dtype = (None, None) if tensor is None else (None if any_size else tensor.shape, tensor.dtype)
        large_from = 0 if made.nbytes >= LARGE_BYTES else NEVER
        if any_size:
            large_from = LARGE_BYTES // max(1, made.nbytes // max(1, tensors[0].nbytes))
        is_like = likeness_of(given, tensors, backend.size if any_size else 0)
        run_queued = torch.inference_mode()(run) if any(each.is_inference() for each in tensors) else run
        if len(tensors) > 1:
            run_queued = run_on_unchanged(run_queued, row, send, recv, backend.size if any_size else 0)
        self.keep(
            kind,
            CachedCall(
                op, counts, recv is send, is_like, made.row, shape, dtype, large_from, backend, run, run_queued, start
            ),
        )  # fmt: skip

    def look_at_message(self, what: str, tensor: Any, memory: torch.Tensor, backend: Backend) -> None:
        """Look at an ``isend`` or ``irecv``: its tensor, and the memory that was sent or received for it."""
        if hooks.likeness is None or tensor.__class__ not in PLAIN_TYPES:
            return
        is_own, is_same = memory is tensor, memory.data_ptr() == tensor.data_ptr()
        if not is_own and not (tensor.is_cpu and (is_same or is_strided(tensor))):
            return
        if self.is_again(what, (tensor.dim(), tensor.dtype, is_own, is_same)):
            copies = LentCopies(tensor.dtype)
            staged = None if is_own else detach if is_same else copies.to_read if what == "isend" else copies.to_write
            self.keep(what, CachedMessage(one_like(tensor), backend, tensor.dtype, staged))


def tensors_of(send: Any, recv: Any) -> list[torch.Tensor]:
    """Return the tensors of a call's input and output, in order; of a call in place once."""
    tensors: list[torch.Tensor] = []
    for side in (send,) if recv is send else (send, recv):
        if side.__class__ is TensorList:
            tensors += side.tensors
        elif side.__class__ is list:
            tensors += side
        elif side is not None:
            tensors.append(side)
    return tensors


def has_any_size(given: Call, made: Call) -> bool:
    """Tell whether a call of contiguous tensors can be repeated with other sizes, as long as these fit."""
    if given.counts is not None:
        return False
    if given.row is ALL_TO_ALL_SINGLE:  # rows are divided among the ranks, and with one dimension they are elements
        return made.send.dim() == made.recv.dim() == 1
    return made.counts is None or len({*made.counts[0], *made.counts[1]}) == 1


def are_flat(tensors: Iterable[torch.Tensor]) -> bool:
    """Tell whether the comparison of ``hooks.likeness`` with these tensors implies that others are contiguous as well.

    With one dimension it compares the stride, and a tensor of one element is contiguous whatever its stride.
    """
    return all(
        each.dim() == 0 or (each.dim() == 1 and (each.stride(0) == 1 or not each.is_contiguous())) for each in tensors
    )


def one_like(tensor: torch.Tensor) -> Likeness:
    """Return a predicate: whether a tensor of any size is like this one."""
    assert hooks.likeness is not None
    check, contiguous = hooks.likeness(tensor, any_size=True), torch.Tensor.is_contiguous
    if are_flat([tensor]):
        return check
    if contiguous(tensor):
        return lambda each: check(each) and contiguous(each)
    return lambda each: check(each) and not contiguous(each) and 0 not in each.stride()


def likeness_of(call: Call, tensors: list[torch.Tensor], ranks: int) -> Likeness:
    """Return a predicate: whether another call's input and output are like this one's.

    ``ranks`` is the number of ranks of the group if other sizes that fit are allowed, else 0.
    """
    row, send, recv, *_ = call
    if not tensors:
        return lambda _: not hooks.must_be_seen()  # modes see calls without tensors too
    assert hooks.likeness is not None
    check = one_like(tensors[0]) if ranks and len(tensors) == 1 else hooks.likeness(*tensors, any_size=bool(ranks))
    if send is None:
        return lambda send, recv: send is None and check(recv)
    if recv is None and len(tensors) == 1:
        return lambda send, recv: recv is None and check(send)
    if recv is send or not ranks:
        return check if LIST not in (send.__class__, recv.__class__) else on_lists(check, send, recv)
    is_flat, contiguous, fits = are_flat(tensors), torch.Tensor.is_contiguous, row.fits

    def fit(send: Any, recv: Any) -> bool:
        return (
            check(send, recv)
            and fits(send.numel(), recv.numel(), ranks)
            and (is_flat or (contiguous(send) and contiguous(recv)))
        )

    def are_equal(*tensors: torch.Tensor) -> bool:
        return (
            check(*tensors)
            and len(set(map(NBYTES, tensors))) == 1
            and (is_flat or all(map(contiguous, tensors)))
        )  # fmt: skip

    return fit if LIST not in (send.__class__, recv.__class__) else on_lists(are_equal, send, recv)


def run_on_unchanged(run: Run, row: Row, send: Any, recv: Any, ranks: int) -> Run:
    """Return a function that runs a call unless its tensors' sizes do not fit any more, since it was made.

    Input and output are like these; ``ranks`` as for ``likeness_of``. Of one tensor the library gets its present size.
    """
    sizes, fits = list(map(NBYTES, tensors_of(send, recv))), row.fits
    is_pair = ranks > 0 and LIST not in (send.__class__, recv.__class__)

    def run_queued(send: Any, recv: Any) -> None:
        if is_pair:
            is_right = fits(send.nbytes, recv.nbytes, ranks)
        else:
            found = list(map(NBYTES, tensors_of(send, recv)))
            is_right = len(set(found)) == 1 if ranks else found == sizes
        if not is_right:
            raise resized(row.name)
        run(send, recv)

    return run_queued


def on_lists(check: Likeness, send: Any, recv: Any) -> Likeness:
    """Return a predicate on a call with lists like these: ``check`` of all of its tensors, in order."""
    is_read, is_written = send.__class__ is LIST, recv.__class__ is LIST
    length = len(send if is_read else recv)

    if send is recv:
        return lambda each: each.__class__ is LIST and len(each) == length and check(*each)

    def is_like(send: Any, recv: Any) -> bool:
        if is_read and is_written:
            return send.__class__ is recv.__class__ is LIST and len(send) == len(recv) == length and check(*send, *recv)
        one, many = (recv, send) if is_read else (send, recv)
        if many.__class__ is not LIST or len(many) != length:
            return False
        return check(*many, one) if is_read else check(one, *many)

    return is_like


def is_strided(tensor: torch.Tensor) -> bool:
    """Tell whether ``copy_`` can move a tensor's values to and from other memory.

    It cannot if elements share memory, which are written once, or if autograd would record the copy.
    """
    return not (0 in tensor.stride() or tensor.requires_grad or tensor.is_inference())


def detach(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Return a tensor outside autograd, and nothing to run when its message has ended."""
    return tensor.detach(), None


# a function from a caller's tensor or list to (a function that copies the buffer back, or None; the backend's buffer);
# whether some of it is a copy
Side = tuple[Callable[[Any], tuple[Any, Any]], bool]


def find_staging(send: Any, recv: Any, made: Call) -> tuple[Side, Side] | tuple[()] | None:
    """Return how to make a backend's buffers of a caller's tensors: () if they are these, None if that is not easy."""
    tensors, buffers = tensors_of(send, recv), tensors_of(made.send, made.recv)
    if len(tensors) != len(buffers):
        return None
    if all(one is other for one, other in zip(tensors, buffers, strict=True)):
        return ()
    first, second = side_of(send, made.send, True), side_of(recv, made.recv, False)
    return None if first is None or second is None else (first, second)


def side_of(given: Any, buffer: Any, is_read: bool) -> Side | None:
    """Return how a buffer is made of a tensor, or a list of them of a list."""
    if given.__class__ is LIST and buffer.__class__ is not TensorList:
        return None
    if buffer is given or (given.__class__ is LIST and all(map(is_, given, buffer.tensors))):
        return (lambda tensor: (None, tensor)), False
    if given.__class__ is LIST:
        sides = [side_of(one, other, is_read) for one, other in zip(given, buffer.tensors, strict=True)]
        makers = [side[0] for side in sides if side is not None]
        if len(makers) < len(sides):
            return None

        def make(tensors: list[torch.Tensor]) -> tuple[Callable[[], None], list[torch.Tensor]]:
            ends, made = zip(*[maker(each) for maker, each in zip(makers, tensors, strict=True)], strict=True)

            def copy_back() -> None:
                for end in ends:
                    if end is not None:
                        end()

            return copy_back, list(made)

        return make, any(side[1] for side in sides if side is not None)
    is_real = given.is_complex() and not buffer.is_complex()
    if buffer.nbytes != given.nbytes:
        return None
    describe: Any = torch.view_as_real if is_real else lambda tensor: tensor
    if buffer.data_ptr() == given.data_ptr() and not given.is_conj():  # all empty tensors have the same address
        return (lambda tensor: (None, describe(tensor.detach()))), False
    if not is_strided(given) or buffer.is_inference():
        return None
    copies = Copies(given.dtype, describe)
    return (copies.of if is_read else copies.like), True


def run_on_copies(run: Run, first: Side, second: Side, in_place: bool) -> Run:
    """Return a function that runs a call on buffers that are made of its tensors."""
    (reads, _), (writes, _) = first, second

    def run_staged(send: Any, recv: Any) -> None:
        copy_back, buffer = reads(send)
        if in_place:
            run(buffer, buffer)
        else:
            copy_back, target = writes(recv)
            run(buffer, target)
        if copy_back is not None:
            copy_back()

    return run_staged
