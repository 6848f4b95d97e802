"""Path of every collective from its public function to the backend: group, checks, buffers, Work.

The functions of ``hpcdist``, torch's methods of a group and the list forms all take it, blocking or not. A call that is
like one of the last of its row runs at once (``core.call_cache``); any other is checked here, and nowhere else, and
becomes one record that the backend carries out.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import torch

from hpcdist.core import buckets, hooks, lists, profiling
from hpcdist.core.backend import Backend
from hpcdist.core.buffers import (
    LOWEST_PLACE,
    PLAIN_TYPES,
    QUANTIZED_TYPES,
    TensorList,
    allocate_flat,
    as_real,
    as_tensor,
    as_tensors,
    check_dense,
    check_memory,
    check_parts,
    copy_into,
    for_reading,
    for_writing,
    has_arrays,
    is_direct,
    make_unpack,
    on_memory,
    same_dtype,
)
from hpcdist.core.call import Call, chain
from hpcdist.core.call_cache import LOOKS, tensors_of
from hpcdist.core.errors import DistError, MismatchError
from hpcdist.core.group import Group
from hpcdist.core.reduction import (
    PREMUL_SUM,
    SUM,
    RedOpType,
    canonical,
    factor_of,
    is_complex,
    is_done_by_parts,
    name_of,
    premul_sum,
    terms,
)
from hpcdist.core.reproducible import Reproducible, carrier
from hpcdist.core.table import (
    ALL_GATHER,
    ALL_GATHER_SINGLE,
    ALL_REDUCE,
    ALL_TO_ALL_SINGLE,
    EACH,
    SCATTER,
    Counts,
    Row,
    scale,
)
from hpcdist.core.work import AllWork, DoneWork, HeldWork, Work
from hpcdist.core.world import WORLD, member_group

NUMEL = torch.Tensor.numel
ARRAY = np.ndarray


def issue(
    row: Row,
    group: Any,
    send: Any,
    recv: Any,
    op: Any = None,
    root: int | None = None,
    async_op: bool = False,
    counts: Counts | None = None,
) -> Work | None:
    """Run or begin one collective.

    Args:
        row: which one.
        group: a Group, None for the default one, or NON_GROUP_MEMBER.
        send: what to read, a tensor or a list of one a rank; the same object as ``recv`` for a call in place, None if
            this rank does not send.
        recv: what to write, likewise; None if this rank does not receive.
        op: how values are combined, for rows that reduce; None for others.
        root: a rank of the group, for rooted rows; None for others.
        async_op: begin only, and return a Work.
        counts: elements to and from each rank, of all_to_all_single rows of dimension 0; ``EACH`` for an
            all_reduce of each tensor of a list.

    Returns:
        The Work if ``async_op``, else None, or with ``EACH`` that of what has only begun; None too if this
        rank is not in the group.

    Raises:
        TypeError, ValueError, RuntimeError: as c10d's, before anything is sent.
    """
    if send.__class__ is ARRAY or recv.__class__ is ARRAY:
        read = send if send.__class__ is not ARRAY else on_memory(send)
        recv = read if recv is send else recv if recv.__class__ is not ARRAY else on_memory(recv)
        send = read
    pg = WORLD.default if group is None else group
    if (
        isinstance(pg, Group)
        and pg.coalescing is None
        and hooks.compare is None
        and not hooks.reproducible
        and not hooks.is_profiled()
        and not (journal := pg.journal).asked
    ):
        kind = row if root is None and counts is None else (row, root)
        kept = pg.known.get(kind, ())
        for known in kept:
            if (  # the same as ``CallCache.has``, without the call, for latency
                known.op is op
                and known.in_place is (recv is send)
                and known.counts == counts
                and (known.is_like(send) if recv is send else known.is_like(send, recv))
            ):
                backend = known.backend
                if async_op:
                    if not backend.has_threads:
                        break
                elif backend.queue is not None:
                    backend.queue.drain()
                tensor = recv if send is None else send
                shape = known.shape
                if shape is None and tensor is not None:
                    shape = (sum(map(NUMEL, tensor)),) if tensor.__class__ is list else tensor.shape
                journal.sequence = number = journal.sequence + 1
                if known is not kept[0] and number % LOOKS == 0:
                    pg.known.advance(kind, known)
                record = (journal, number, known.row, shape, known.dtype, root)
                journal.push(record)
                if async_op:
                    if known.start is not None:
                        return begin(partial(known.start, send, recv), record)
                    queue = backend.queue if backend.queue is not None else backend.open_queue()
                    result = [] if recv is None else [recv]
                    if recv.__class__ is list:  # the caller may change it before the call is carried out
                        recv = result = recv.copy()
                    if send.__class__ is list:
                        send = recv if known.in_place else send.copy()
                    first = tensor[0] if tensor.__class__ is list else tensor
                    is_large = first is not None and first.nbytes >= known.large_from
                    return queue.put(known.run_queued, result, is_large, record, (send, recv))
                mark = record, None, get_ident(), None  # ``Journal.blocking`` without the call, for latency
                is_first = journal.current is None and not journal.further
                if is_first:
                    journal.current = mark
                try:
                    if is_first:
                        known.run(send, recv)
                    else:
                        with journal.blocking(record):
                            known.run(send, recv)
                except DistError:
                    raise
                except Exception:  # refused before anything was sent
                    journal.retract(record)
                    raise
                finally:
                    if is_first:
                        journal.current = None
                return None
    sides = send.__class__, recv.__class__
    if list in sides:
        read = on_memory(send) if has_arrays(send) else send
        written = read if recv is send else on_memory(recv) if has_arrays(recv) else recv
        if read is not send or written is not recv:
            return issue(row, pg, read, written, op, root, async_op, counts)
    elif ARRAY in sides:  # arrays that need a copy
        target = None if recv is None else as_tensor(recv, "tensor", writable=True)
        source = target if send is recv else None if send is None else as_tensor(send, "tensor")
        return issue(row, pg, source, target, op, root, async_op, counts)
    return issue_any(Call(row, send, recv, op, root, counts), pg if group is None else group, async_op)


def issue_any(call: Call, group: Any, async_op: bool) -> Work | None:
    """Run or begin a collective on any input that a caller may give: the general way of ``issue``."""
    row, send, recv, *_ = made = call
    pg: Any = group if isinstance(group, Group) and group.backends else member_group(group, row.name)
    if pg is None:
        return None
    if pg.coalescing is not None:
        return hold(pg, call, async_op)
    if hooks.must_be_seen(send, recv):
        return hooks.dispatch(call, pg, async_op)
    if call.counts is EACH:
        if hooks.is_profiled() or (whole := buckets.whole(pg, call)) is None:
            return all_reduce_each(pg, call, async_op)
        made = whole
    elif (send.__class__ is list or recv.__class__ is list) and row in lists.ARRANGED:
        made = lists.arrange(pg, call, async_op)
    if made.send.__class__ is TensorList or made.recv.__class__ is TensorList:
        backend = pg.backend("cpu")
    elif row.buffers == 0:
        backend = pg.any_backend()
    elif row is ALL_REDUCE and isinstance(send, torch.Tensor) and send.layout is torch.sparse_coo:
        return all_reduce_sparse(pg, call, async_op)
    else:
        backend, made = stage(pg, made, async_op)
    work = dispatch(pg, backend, made, async_op)
    if call.finish is None and (pg.journal.sequence % LOOKS == 0 or row.buffers == 0):
        pg.known.look(call, made, backend)
    return work


def all_reduce_each(pg: Group, call: Call, async_op: bool) -> Work:
    """Run or begin the all_reduce of each tensor of a list, in as few calls as their sizes allow, as one Work."""
    tensors = as_tensors(call.send, "tensors", writable=True)
    calls = buckets.in_buckets(pg, call, tensors, check, async_op)
    return begin_all(pg, "all_reduce", tensors, (make_one(pg, each, async_op) for each in calls), tensors)


def hold(pg: Group, call: Call, async_op: bool) -> HeldWork | None:
    """Check a call and leave it to a coalescing manager; the caller may change its lists meanwhile."""
    check(pg, call)
    send, recv, held = call.send, call.recv, HeldWork() if async_op else None
    if list in (send.__class__, recv.__class__):
        send, recv = (each.copy() if each.__class__ is list else each for each in (send, recv))
        call = call._replace(send=send, recv=send if call.recv is call.send else recv)
    assert pg.coalescing is not None
    pg.coalescing.append((call, held))
    return held


def make_one(pg: Group, call: Call, async_op: bool) -> Work | None:
    """Make one of several calls that were checked; if the library launches all at once, a blocking one only begins."""
    row, send, recv, op, root, counts, finish, result, _ = call
    if not async_op and counts is not EACH:  # then each tensor has its own backend
        tensor = recv if send is None else send
        if tensor.__class__ is list:
            tensor = tensor[0]
        backend = pg.any_backend() if tensor is None else pg.backend(getattr(tensor, "device", "cpu"))
        async_op = backend.has_groups
    if finish is None and result is None:
        return issue(row, pg, send, recv, op, root, async_op, counts)
    return issue_any(call, pg, async_op)


def begin_all(
    pg: Group, name: str, inputs: Sequence[torch.Tensor], calls: Iterable[Work | None], result: list[Any]
) -> Work:
    """Make several calls as one of the caller's: one Work, and one event of a profiler with the shape of each input."""
    event = None
    if inputs and hooks.is_profiled():
        event = profiling.begin(pg, pg.backend(inputs[0].device), name, inputs)
    if event is None:
        return AllWork([work for work in calls if work is not None], result)
    with profiling.as_one(event):
        work = AllWork([work for work in calls if work is not None], result)
    work._ends(event)
    if not work.is_completed():
        work._pursue()  # the event ends even if no thread waits
    return work


def check(pg: Group, call: Call) -> None:
    """Check one of several calls that are made only if all are right: raise its error before anything is sent."""
    row, send, recv, op, root, counts, *_ = call
    if pg.known.has(row if root is None and counts is None else (row, root), op, counts, send, recv):
        check_memory(*tensors_of(send, recv))
        return
    if hooks.must_be_seen(send, recv):
        return
    if counts is EACH:
        buckets.buckets(pg, as_tensors(send, "tensors", writable=True), op, check)
        return
    if list in (send.__class__, recv.__class__) and row in lists.ARRANGED:
        _, send, recv, *_ = call = lists.arrange(pg, call, True)
    if row is ALL_REDUCE and isinstance(send, torch.Tensor) and send.layout is torch.sparse_coo:
        check_sparse(pg, call)
    elif row.buffers and TensorList not in (send.__class__, recv.__class__):
        stage(pg, call, True, only_checks=True)


def stage(pg: Group, call: Call, async_op: bool, only_checks: bool = False) -> tuple[Backend, Call]:
    """Check a call on tensors, and return its backend and the call on contiguous memory."""
    row, send, recv, op, root, counts, then, result, _ = call
    in_place = send is recv
    # a rank that is not the root may leave one side out: the input of a scatter, the output of others
    output, is_scatter = recv, row is SCATTER
    if not (recv.__class__ in PLAIN_TYPES and not recv.requires_grad) and (
        recv is not None or not row.rooted or is_scatter or pg.rank() == root
    ):
        output = as_tensor(recv, "tensor", writable=True)
    given = output if in_place else send
    if not in_place and not (send.__class__ in PLAIN_TYPES and not send.requires_grad):
        given = None if send is None and is_scatter and pg.rank() != root else as_tensor(send, "tensor")
    either = given if given is not None else output
    if either is None:  # no rank may leave both sides out
        as_tensor(None, "tensor")
    dtype = either.dtype
    if given is not None and output is not None and not in_place:
        if output.dtype is not dtype:
            dtype = same_dtype(given, output)
        if not (given.is_cpu and output.is_cpu) and given.device.type != output.device.type:
            raise MismatchError(
                f"{row.name}: tensors must be on one device type, found {given.device} and {output.device}"
            )
    backend = pg.cpu if either.is_cpu and pg.cpu is not None else pg.backend(either.device)
    if row.reduces:
        if op.__class__ is not RedOpType:
            op = canonical(op)
        backend.check_reduction(row, either.dtype, op)
    for each in (given, output):
        if each is not None:
            if each.layout is not torch.strided or each.dtype in QUANTIZED_TYPES or each.is_nested:
                check_dense(row.name, each)
            if each.data_ptr() < LOWEST_PLACE:
                check_memory(each)
    if row is ALL_TO_ALL_SINGLE:
        assert given is not None
        assert output is not None
        counts = lists.counts_of_splits(pg, given, output, dtype, counts)
    if given is not None and output is not None:
        if given.dtype is not output.dtype:  # one is complex, the other holds real and imaginary parts
            check_parts(row, op, given, output)
            flat = allocate_flat([output], dtype)
            result = [output] if result is None else result
            given, output, then = as_real(given), flat, chain(make_unpack(flat, [output]), then)
        if not (in_place and row.is_in_place) and not is_shaped(row, pg, given, output, counts):
            raise size_error(row, pg, given, output, counts)
    if only_checks:
        return backend, call

    finish, sendbuf, recvbuf = then, given, output
    if given is not None and not is_direct(given):
        if not async_op:
            backend.settle()  # a queued call may still write to what is copied here
        sendbuf = for_reading(given)
    if output is not None:
        recvbuf = sendbuf if in_place else for_writing(output)
        if recvbuf is not output:
            assert recvbuf is not None
            result = [output] if result is None else result
            finish = chain(partial(copy_into, recvbuf, output), then)
    if row.reduces and dtype.is_complex and is_done_by_parts(op):
        assert sendbuf is not None
        if result is None:
            result = [] if output is None else [output]
        recvbuf = None if recvbuf is None else torch.view_as_real(recvbuf)
        if op == PREMUL_SUM and is_complex(factor_of(op)):
            sendbuf, op = torch.view_as_real(terms(sendbuf, op).to(dtype)), premul_sum(1.0)
        else:
            sendbuf = recvbuf if in_place and recvbuf is not None else torch.view_as_real(sendbuf)
        counts = counts and scale(counts, 2)
    if sendbuf is send and recvbuf is recv and op is call.op and counts is call.counts:
        return backend, call
    return backend, Call(row, sendbuf, recvbuf, op, root, counts, finish, result)


def dispatch(pg: Group, backend: Backend, call: Call, async_op: bool) -> Work | None:
    """Hand a checked call to its backend; if the backend has no threads, an asynchronous call ends before return."""
    journal = pg.journal
    carries: Backend | Reproducible = backend
    if hooks.reproducible:
        carries = carrier(backend, call)
    if hooks.compare is not None:
        hooks.compare(pg, backend, call)
    is_async = (async_op and backend.has_threads) or (backend.has_groups and backend.batch.is_open)
    if not is_async and backend.queue is not None:
        backend.queue.drain()
    tensor = call.recv if call.send is None else call.send
    limit = journal.asked.get(get_ident()) if journal.asked else None
    record = journal.collective(call.row, tensor, call.root, limit)
    if limit is not None:
        call = call._replace(limit=limit)
    event = None
    if hooks.is_profiled():
        inputs = [] if tensor is None else tensor.tensors if tensor.__class__ is TensorList else [tensor]
        event = profiling.begin(pg, backend, call.row.name, inputs, record, is_async)
    if is_async:
        work = begin(partial(carries.start, call), record)
        if event is not None:
            work._ends(event)
        return work if async_op else None
    try:
        with journal.blocking(record):
            carries.run(call)
    finally:
        if event is not None:
            event.__exit__(None, None, None)
    if call.finish is not None:
        call.finish()
    return DoneWork(call.shown()) if async_op else None


def begin(start: Callable[[], Work], record: tuple[Any, ...]) -> Work:
    """Begin a call, which may block if the library has to connect the ranks first, and return its Work."""
    with record[0].blocking(record):
        work = start()
    work._call = record
    return work


def is_shaped(row: Row, pg: Group, send: torch.Tensor, recv: torch.Tensor, counts: Counts | None) -> bool:
    """Tell whether the sizes fit the row, given both tensors, of one dtype."""
    if counts is None:
        return row.fits(send.numel(), recv.numel(), len(pg.ranks))
    return send.numel() == sum(counts[0]) and recv.numel() == sum(counts[1])


def size_error(row: Row, pg: Group, send: torch.Tensor, recv: torch.Tensor, counts: Counts | None) -> MismatchError:
    """Return the error of buffers whose sizes do not fit the row."""
    expected = f"sum of the counts given, {counts}" if counts else row.shape.value
    return MismatchError(
        f"{row.name} on {len(pg.ranks)} ranks: input of {send.numel()} elements {tuple(send.shape)} and output of "
        f"{recv.numel()} elements {tuple(recv.shape)} do not fit (expected: {expected})"
    )


def check_sparse(pg: Group, call: Call) -> None:
    """Raise unless the op on a sparse COO tensor is a sum, and the group can do that."""
    op = canonical(call.op)
    pg.backend(call.send.device).check_reduction(call.row, call.send.dtype, op)
    if op != SUM:
        raise RuntimeError(
            f"unsupported reduction operation: ReduceOp.{name_of(op)} with sparse tensors; all_reduce of a sparse COO "
            "tensor takes SUM only"
        )


def all_reduce_sparse(pg: Group, call: Call, async_op: bool) -> Work | None:
    """Sum a sparse COO tensor over all ranks, in place; the tensors have one shape and as many sparse dimensions.

    The ranks gather each other's nonzeros, which may lie in different places, and every rank adds them up in rank
    order, so that all have bitwise the same result. The call has ended when it returns, with ``async_op`` too, because
    the places of the nonzeros must be known first.
    """
    check_sparse(pg, call)
    tensor = call.send
    mine = tensor.detach().coalesce()
    indices, values = mine.indices().contiguous(), mine.values().contiguous()
    size = pg.size()
    compare(pg, pg.backend(tensor.device), "sparse all_reduce")  # shapes below, dtypes by the parts' calls
    form = (tuple(tensor.shape), mine.sparse_dim())
    facts = torch.tensor([indices.size(1), crc32(repr(form).encode())], device=tensor.device)
    all_facts = torch.empty(size * facts.numel(), dtype=torch.int64, device=tensor.device)
    issue(ALL_GATHER_SINGLE, pg, facts, all_facts)
    table = all_facts.view(size, -1)
    if len(set(table[:, 1].tolist())) > 1:
        forms = pg.any_backend().objects.all_gather(form)
        raise ValueError(
            "all_reduce of sparse tensors that differ in shape or number of sparse dimensions: "
            + "; ".join(f"rank {rank}: {shape}, {dims} sparse" for rank, (shape, dims) in enumerate(forms))
        )
    counts: list[int] = table[:, 0].tolist()
    all_indices = gather_rows(pg, indices.t().contiguous(), counts).t()
    all_values = gather_rows(pg, values, counts)
    total = torch.sparse_coo_tensor(
        all_indices, all_values, tensor.shape, device=tensor.device, check_invariants=False
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)
    if call.finish is not None:
        call.finish()
    return DoneWork(call.shown()) if async_op else None


def compare(pg: Group, backend: Backend, *call: Any) -> None:
    """Compare a call that consists of others, by ``Backend.compare``; its number is that of the first of them."""
    backend.settle()
    journal = pg.journal
    with journal.blocking((journal, journal.sequence + 1, call[0], None, None, None)):
        backend.compare(*call)


def gather_rows(pg: Group, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Return the rows of all ranks, concatenated; rank r has ``counts[r]`` of them."""
    width = rows.shape[1:].numel()
    everything = torch.empty((sum(counts), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    issue(ALL_GATHER, pg, rows, everything, counts=([rows.numel()], [count * width for count in counts]))
    return everything
