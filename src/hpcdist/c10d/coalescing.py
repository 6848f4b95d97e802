"""How do many small calls become one?

Tensors of one dtype and device travel in one buffer as long as they are small: a call costs microseconds,
a copy of a few kilobytes less. A large tensor goes on its own, where a copy would cost more than the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from hpcdist.c10d.lists import all_gather
from hpcdist.core import world
from hpcdist.core.buffers import as_tensors, is_plain, joined, same_dtype, scattering
from hpcdist.core.group import ProcessGroup
from hpcdist.core.issue import canonical, issue, issue_any
from hpcdist.core.repetition import Likeness, Recognition
from hpcdist.core.table import ALL_REDUCE
from hpcdist.core.work import AllWork, Work

DTYPE, NBYTES, IS_CPU = map(attrgetter, ("dtype", "nbytes", "is_cpu"))
BUCKET_BYTES = 1 << 20  # the most that is copied together
ALONE_BYTES = 1 << 18  # a tensor of this size is not worth copying


def all_reduce_coalesced(
    tensors: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    """Combine each tensor of a list over all ranks, in place, in as few calls as their sizes allow.

    Args:
        tensors: a tensor or a list of them, all of one dtype; the same sizes on all ranks.
        op: a ReduceOp; half types accumulate in float32.
        group: the group; None for the default one.
        async_op: return a Work at once.

    Returns:
        The Work if ``async_op``; None otherwise and on ranks outside the group.

    Raises:
        TypeError: no list of tensors.
        ValueError: dtypes that differ; otherwise as for ``all_reduce``.
    """
    pg = world.joined(group, "all_reduce_coalesced")
    if pg is None:
        return None
    listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if not async_op and pg.coalescing is None and reduce_plain(pg, listed, op):
        return None
    given = as_tensors(listed, "tensors", writable=True)
    if given:
        same_dtype(*given)
    with pg.grouped():
        works = reduce_together(pg, given, op)
    return ended(works, given, async_op)


class Bundle(NamedTuple):
    """What a group's small tensors looked like when it saw them twice, and the bytes of each."""

    is_like: Likeness
    sizes: list[int]


def sizes_of_plain(pg: ProcessGroup, tensors: list[Any]) -> list[int] | None:
    """Return the bytes of each tensor; None where they are not small contiguous CPU tensors of one dtype."""
    known = pg.known.get("all_reduce_coalesced")
    if known.__class__ is Bundle and len(known.sizes) == len(tensors) and known.is_like(*tensors):
        sizes: list[int] = known.sizes
        return sizes
    if not tensors or not all(map(is_plain, tensors)) or not all(map(IS_CPU, tensors)):
        return None
    if len(set(map(DTYPE, tensors))) > 1:
        return None
    sizes = list(map(NBYTES, tensors))
    if sum(sizes) > BUCKET_BYTES:
        return None
    if known != sizes:
        pg.known["all_reduce_coalesced"] = sizes
    elif Recognition.of is not None:
        pg.known["all_reduce_coalesced"] = Bundle(Recognition.of(*tensors), sizes)
    return sizes


def reduce_plain(pg: ProcessGroup, tensors: list[Any], op: Any) -> bool:
    """Combine small contiguous CPU tensors of one dtype in one call, and tell whether they are such."""
    if pg.cpu is None or pg.cpu.has_groups:  # a library that makes many calls one needs no copies for it
        return False
    sizes = sizes_of_plain(pg, tensors)
    if sizes is None:
        return False
    pg.cpu.settle()  # an asynchronous call may still write what is read here
    flat, copy = pg.cpu.bundle(tensors, sizes)
    issue(ALL_REDUCE, pg, flat, flat, op)
    copy()
    return True


def all_gather_coalesced(
    output_tensor_lists: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
) -> Work | None:
    """Gather each tensor of a list from all ranks.

    Args:
        output_tensor_lists: for each rank a list of outputs, one for each of its inputs, written in place.
        input_tensor_list: this rank's inputs; the same sizes on all ranks.
        group: the group; None for the default one.
        async_op: return a Work at once.

    Returns:
        The Work if ``async_op``; None otherwise and on ranks outside the group.

    Raises:
        TypeError: no list of lists of tensors.
        ValueError: lengths, sizes or dtypes that do not fit.
    """
    pg = world.joined(group, "all_gather_coalesced")
    if pg is None:
        return None
    inputs = as_tensors(input_tensor_list, "input_tensor_list")
    if not isinstance(output_tensor_lists, list):
        raise TypeError("Invalid function argument: output_tensor_lists should be a list")
    outputs = [as_tensors(tensors, "output_tensor_lists", writable=True) for tensors in output_tensor_lists]
    for tensors in outputs:
        if len(tensors) != len(inputs):
            raise ValueError(
                f"all_gather_coalesced: a list of `output_tensor_lists` has {len(tensors)} tensors, "
                f"`input_tensor_list` {len(inputs)}"
            )
    with pg.grouped():
        works = [
            all_gather([tensors[index] for tensors in outputs], tensor, pg, True) for index, tensor in enumerate(inputs)
        ]
    return ended(works, [tensor for tensors in outputs for tensor in tensors], async_op)


class CoalescingManager:
    """The calls made inside ``_coalescing_manager`` and, with ``async_ops``, their Work (c10d's name)."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def append(self, work: Work | None = None) -> None:
        """Add a Work to wait for."""
        if work is not None:
            self.works.append(work)

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self.works:
            work.wait()
        self.works = []


@contextlib.contextmanager
def _coalescing_manager(
    group: ProcessGroup | None = None, device: torch.device | None = None, async_ops: bool = False
) -> Iterator[CoalescingManager]:
    """Hold back the collectives made inside and issue them together at the end (c10d's private name).

    Args:
        group: the group that all of them are on; None for the default one.
        device: taken as c10d takes it; the tensors say where they are.
        async_ops: do not wait at the end; call ``wait()`` of the manager.

    Raises:
        ValueError: inside another manager of the same group.
    """
    pg = world.resolve(group)
    if pg.coalescing is not None:
        raise ValueError("ProcessGroup has non-empty op list at the start of coalescing: managers do not nest")
    manager = CoalescingManager()
    held: list[Any] = []
    pg.coalescing = held
    try:
        yield manager
    finally:
        pg.coalescing = None
    with pg.grouped():
        works = together(pg, held, async_ops)
    for work in works:
        manager.append(work)
    if not async_ops:
        manager.wait()


def together(pg: ProcessGroup, held: list[partial[Work | None]], async_ops: bool) -> list[Work | None]:
    """Begin the calls held back; all_reduces of one op in a row become one, the others go in turn."""
    works: list[Work | None] = []
    alike: list[Any] = []
    op: Any = None

    def flush() -> None:
        if async_ops or not reduce_plain(pg, alike, op):
            works.extend(reduce_together(pg, as_tensors(alike, "tensor", writable=True), op))
        alike.clear()

    for call in held:
        row, _, send, recv, call_op = call.args[:5]
        if row is ALL_REDUCE and send is recv:
            if alike and canonical(call_op) is not canonical(op):
                flush()
            op = call_op
            alike.append(send)
            continue
        flush()
        works.append(call())
    flush()
    return works


def reduce_together(pg: ProcessGroup, tensors: list[torch.Tensor], op: Any) -> list[Work | None]:
    """Begin the all_reduce of many tensors, the small ones of a kind in one buffer."""
    works: list[Work | None] = []
    buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        if tensor.is_sparse or tensor.nbytes >= ALONE_BYTES or pg.backend(tensor.device).has_groups:
            works.append(issue_any(ALL_REDUCE, pg, tensor, tensor, op, None, True))
            continue
        if filled.get(kind, 0) + tensor.nbytes > BUCKET_BYTES:
            works.append(reduce_bucket(pg, buckets.pop(kind), op))
            filled[kind] = 0
        buckets.setdefault(kind, []).append(tensor)
        filled[kind] = filled.get(kind, 0) + tensor.nbytes
    works.extend(reduce_bucket(pg, bucket, op) for bucket in buckets.values())
    return works


def reduce_bucket(pg: ProcessGroup, tensors: list[torch.Tensor], op: Any) -> Work | None:
    """Begin the all_reduce of small tensors of one kind in one buffer."""
    flat = joined(tensors)
    return issue_any(ALL_REDUCE, pg, flat, flat, op, None, True, None, scattering(flat, tensors), tensors)


def ended(works: list[Work | None], result: list[torch.Tensor], async_op: bool) -> Work | None:
    """Return one Work for several, or wait for them."""
    work = AllWork([each for each in works if each is not None], result)
    if async_op:
        return work
    work.wait()
    return None
