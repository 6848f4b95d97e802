"""Way of a collective from its public function to the backend: group, checks, buffers, Work, once for all of them.

This is the path of every collective, and the only place where its arguments are checked. A synchronous
call on plain CPU tensors takes the short way: no Work, no options object, no list.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed import ReduceOp

from hpcdist.core import hooks, profiling
from hpcdist.core.backend import Backend
from hpcdist.core.buffers import (
    COMPLEX_TYPES,
    PLAIN_TYPES,
    TensorList,
    as_real,
    as_tensor,
    check_dense,
    for_reading,
    for_writing,
    is_copy,
    is_plain,
    joint,
    put,
    same_dtype,
    scattering,
)
from hpcdist.core.buffers import joined as concatenate
from hpcdist.core.call import Call
from hpcdist.core.call_cache import LOOKS, CachedCall
from hpcdist.core.errors import DistError, MismatchError
from hpcdist.core.group import Group
from hpcdist.core.reduction import (
    AVG,
    PREMUL_SUM,
    SUM,
    factor_of,
    is_complex,
    multiplied_by,
    name_of,
    terms,
)
from hpcdist.core.reproducible import Reproducible, carrier
from hpcdist.core.sparse import all_reduce_sparse
from hpcdist.core.table import ALL_REDUCE, Counts, Row
from hpcdist.core.work import DoneWork, HeldWork, Work
from hpcdist.core.world import WORLD, joined

RedOpType = ReduceOp.RedOpType


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
        send: the tensor to read; the same object as ``recv`` for a call in place, None if this rank does not send.
        recv: the tensor to write; None if this rank does not receive.
        op: how values are combined, for rows that reduce; None for others.
        root: a rank of the group, for rooted rows; None for others.
        async_op: begin only, and return a Work.
        counts: elements to and from each rank, for rows of shape COUNTED.

    Returns:
        The Work if ``async_op``, else None; None too if this rank is not in the group.

    Raises:
        TypeError, ValueError, RuntimeError: as c10d's, before anything is sent.
    """
    pg = WORLD.default if group is None else group
    if (
        isinstance(pg, Group)
        and pg.backends
        and pg.coalescing is None
        and hooks.compare is None
        and not hooks.reproducible
        and not hooks.is_profiled()
    ):
        journal = pg.journal
        known = pg.known.get(row)
        if (
            known.__class__ is CachedCall
            and known.op is op
            and known.root == root
            and counts is None
            and known.in_place is (recv is send)
            and (known.is_like(send) if recv is send else known.is_like(send, recv))
        ):
            is_known, shape, dtype, backend = True, known.shape, known.dtype, known.backend
            if async_op and backend.has_threads:
                journal.sequence = number = journal.sequence + 1
                call = (journal, number, row, shape, dtype, root)
                journal.push(call)
                if known.start is not None:
                    return begun(partial(known.start, send, recv), call)
                queue = backend.queue if backend.queue is not None else backend.open_queue()
                result = [recv] if row.buffers else []
                return queue.put(partial(known.run, send, recv), result, known.is_large, call)
        elif (
            (cpu := pg.cpu) is not None
            and send.__class__ in PLAIN_TYPES  # ``is_plain`` of this one, without a call
            and send.is_contiguous()
            and not send.requires_grad
            and not send.is_neg()
            and ((dtype := send.dtype) not in COMPLEX_TYPES or not (row.reduces or send.is_conj()))
            and (recv is send or (is_plain(recv) and recv.dtype is dtype and recv.is_cpu))
            and send.is_cpu
            and (
                (recv is send and row.is_in_place)
                or (
                    row.fits(send.numel(), recv.numel(), len(pg.ranks))  # ``is_shaped``, without a call
                    if counts is None
                    else is_shaped(row, pg, send, recv, counts)
                )
            )
            and not hooks.has_modes()
        ):
            is_known, shape, backend = False, send.shape, cpu
            if row.reduces and op.__class__ is not RedOpType:
                op = canonical(op)
        else:
            work = issue_any(Call(row, send, recv, op, root, counts), group, async_op)
            if journal.sequence % LOOKS == 0 and counts is None and is_on_one_device(send, recv):
                pg.known.look(row, send, recv, op, root, pg.backend(send.device))
            return work
        if async_op:
            work = issue_any(Call(row, send, recv, op, root, counts), group, True)
            if not is_known and journal.sequence % LOOKS == 0 and counts is None:
                pg.known.look(row, send, recv, op, root, backend)
            return work
        if backend.queue is not None:
            backend.queue.drain()
        journal.sequence = number = journal.sequence + 1
        record = (journal, number, row, shape, dtype, root)
        journal.push(record)
        try:
            with journal.blocking(record):
                if is_known:
                    known.run(send, recv)
                else:
                    backend.run(Call(row, send, recv, op, root, counts))
        except DistError:
            raise
        except Exception:  # refused before anything was sent; the long way refuses before it counts
            journal.retract(record)
            raise
        if not is_known and number % LOOKS == 0 and counts is None:
            pg.known.look(row, send, recv, op, root, backend)
        return None
    return issue_any(Call(row, send, recv, op, root, counts), group, async_op)


def is_shaped(row: Row, pg: Group, send: torch.Tensor, recv: torch.Tensor, counts: Counts | None) -> bool:
    """Tell whether the sizes fit the row, for two tensors of one dtype that are both there."""
    if counts is None:
        return row.fits(send.numel(), recv.numel(), len(pg.ranks))
    return send.numel() == sum(counts[0]) and recv.numel() == sum(counts[1])


def issue_any(call: Call, group: Any, async_op: bool) -> Work | None:
    """Run or begin a collective on anything that a caller may give: the long way of ``issue``.

    A call on lists works on one tensor of all: its ``finish`` copies the output to them, and ``result`` is the list.
    """
    row, send, recv, op, root, counts, then, result, _ = call
    pg = joined(group, row.name)
    if pg is None:
        return None
    if pg.coalescing is not None:
        held = HeldWork()
        pg.coalescing.append((call, held))
        return held if async_op else None
    if send.__class__ is TensorList or recv.__class__ is TensorList:
        return issue_list(call, pg, async_op)
    if hooks.has_modes() or (row.buffers and hooks.has_wrapper((send, recv))):
        return hooks.dispatch(call, pg, async_op)
    if row.buffers == 0:
        backend = pg.any_backend()
        work = dispatch(pg, backend, call, async_op)
        if backend is pg.cpu and not async_op:
            pg.known.keep(row, backend)
        return work
    in_place = send is recv
    # only a rooted call leaves one side out, on some ranks
    output = None if recv is None and row.rooted else as_tensor(recv, "tensor", writable=True)
    given = output if in_place else None if send is None and row.rooted else as_tensor(send, "tensor")
    either = given if given is not None else as_tensor(output, "tensor")
    dtype = either.dtype
    if given is not None and output is not None and not in_place:
        dtype = same_dtype(given, output)
        if given.device.type != output.device.type:
            raise MismatchError(
                f"{row.name}: tensors must be on one device type, found {given.device} and {output.device}"
            )
    backend = pg.backend(either.device)
    if row.reduces:
        op = canonical(op)
        backend.check_reduction(row, either.dtype, op)
    if either.layout is torch.sparse_coo and row is ALL_REDUCE:
        return all_reduce_sparse(issue, pg, either, op, async_op)
    check_dense(row.name, *(each for each in (given, output) if each is not None))
    if not async_op:
        backend.settle()  # a call that is queued may still write what is copied here
    if result is None:
        result = [output] if output is not None else []
    if given is not None and output is not None:
        if given.dtype is not output.dtype:  # one is complex, the other holds real and imaginary parts
            check_parts(row, op, given, output)
            flat = joint([output], dtype)
            given, output, then = as_real(given), flat, in_turn(scattering(flat, [output]), then)
        if not (in_place and row.is_in_place) and not is_shaped(row, pg, given, output, counts):
            raise size_error(row, pg, given, output, counts)

    finish = then
    sendbuf = for_reading(given) if given is not None else None
    recvbuf = output
    if output is not None:
        recvbuf = sendbuf if in_place else for_writing(output)
        if recvbuf is not output:
            assert recvbuf is not None
            finish = in_turn(partial(put, recvbuf, output), then)
    if row.reduces and dtype.is_complex and is_done_by_parts(op):
        assert sendbuf is not None
        recvbuf = None if recvbuf is None else torch.view_as_real(recvbuf)
        if op == PREMUL_SUM and is_complex(factor_of(op)):
            sendbuf, op = torch.view_as_real(terms(sendbuf, op).to(dtype)), multiplied_by(1.0)
        else:
            sendbuf = recvbuf if in_place and recvbuf is not None else torch.view_as_real(sendbuf)
        counts = None if counts is None else ([2 * each for each in counts[0]], [2 * each for each in counts[1]])
    return dispatch(pg, backend, Call(row, sendbuf, recvbuf, op, root, counts, finish, result), async_op)


def issue_list(call: Call, pg: Group, async_op: bool) -> Work | None:
    """Run or begin a collective of which one side is a list that the library takes; ``core.lists`` has checked it."""
    row, send, recv, op, _, counts, then, result, _ = call
    backend = pg.backend("cpu")
    if result is None:
        result = [recv]
    if row.reduces:
        op = canonical(op)
        dtype = send.dtype
        if dtype.is_complex and is_done_by_parts(op):
            if op == PREMUL_SUM and is_complex(factor_of(op)):
                return issue_any(call._replace(send=concatenate(send.tensors, dtype)), pg, async_op)
            send = TensorList(send.tensors, dtype.to_real())
            counts = None if counts is None else ([2 * each for each in counts[0]], [2 * each for each in counts[1]])
        target = for_writing(recv)
        if target is not recv:
            then = in_turn(partial(put, target, recv), then)
        recv = torch.view_as_real(target) if target.is_complex() and not send.dtype.is_complex else target
    elif send.__class__ is not TensorList and not is_plain(send):
        if not async_op:
            backend.settle()  # a call that is queued may still write what is copied here
        send = for_reading(send)
    elif recv.__class__ is not TensorList and (not is_plain(recv) or is_copy(recv)):
        target = for_writing(recv)
        if target is not recv:
            then = in_turn(partial(put, target, recv), then)
        recv = target
    if send.dtype is not recv.dtype:  # one is complex, the list holds real and imaginary parts
        send, recv = (
            each if each.__class__ is TensorList or not each.is_complex() else torch.view_as_real(each)
            for each in (send, recv)
        )
    return dispatch(pg, backend, Call(row, send, recv, op, call.root, counts, then, result), async_op)


def dispatch(pg: Group, backend: Backend, call: Call, async_op: bool) -> Work | None:
    """Hand a checked call to its backend; if that allows no other thread, an asynchronous call ends before return."""
    journal = pg.journal
    carries: Backend | Reproducible = backend
    if hooks.reproducible:
        carries = carrier(backend, call)
    if hooks.compare is not None:
        hooks.compare(pg, backend, call)
    record = journal.collective(call.row, call.tensor, call.root)
    if journal.asked and (limit := journal.asked.get(get_ident())) is not None:
        journal.set_limit(record, limit)
        call = call._replace(limit=limit)
    event, is_async = None, (async_op and backend.has_threads) or backend.is_grouped
    if hooks.is_profiled():
        given = call.tensor
        inputs = [] if given is None else given.tensors if given.__class__ is TensorList else [given]
        event = profiling.begin(pg, backend, call.row.name, inputs, record, is_async)
    if is_async:
        work = begun(partial(carries.start, call), record)
        if event is not None:
            work._ends(event)
        return work if async_op else None
    backend.settle()
    try:
        with journal.blocking(record):
            carries.run(call)
    finally:
        if event is not None:
            event.__exit__(None, None, None)
    if call.finish is not None:
        call.finish()
    return DoneWork(call.result or []) if async_op else None


def begun(start: Callable[[], Work], record: tuple[Any, ...]) -> Work:
    """Begin a call, which may block if the library first has to find the other ranks, and return its Work."""
    with record[0].blocking(record):
        work = start()
    work._call = record
    return work


def is_on_one_device(send: Any, recv: Any) -> bool:
    """Tell whether a call's tensors are plain and on one device that is not the CPU."""
    return is_plain(send) and not send.is_cpu and (recv is send or (is_plain(recv) and recv.device == send.device))


def is_done_by_parts(op: Any) -> bool:
    """Tell whether an op combines the real and the imaginary parts of complex numbers by themselves.

    It is then done on real numbers, as ``torch.distributed`` has it done: to a library that cuts a buffer by its number
    of elements, so many complex numbers and twice as many real ones are two different calls. A PREMUL_SUM is a sum of
    what each rank has multiplied by a factor of its own, real or complex.
    """
    return bool(op in (SUM, AVG, PREMUL_SUM))


def check_parts(row: Row, op: Any, given: torch.Tensor, output: torch.Tensor) -> None:
    """Raise if a call on a complex tensor and a real one of its parts combines complex numbers as a whole."""
    if row.reduces and not is_done_by_parts(canonical(op)):
        raise MismatchError(
            f"{row.name} by {name_of(op)} combines complex numbers as a whole; expected tensors of one dtype, "
            f"found {given.dtype} and {output.dtype}"
        )


def in_turn(first: Callable[[], None], then: Callable[[], None] | None) -> Callable[[], None]:
    """Return what runs one step and then another, if there is one."""
    if then is None:
        return first

    def run() -> None:
        first()
        then()

    return run


def canonical(op: Any) -> Any:
    """Return an op as backends know it: a plain member of ReduceOp, or the ReduceOp of a PREMUL_SUM.

    Raises:
        TypeError: not an op.
    """
    if isinstance(op, RedOpType):
        return op
    if isinstance(op, ReduceOp):
        kind: Any = op.op  # type: ignore[attr-defined]  # missing from torch's stub
        return op if kind == ReduceOp.PREMUL_SUM else getattr(RedOpType, kind.name)
    raise TypeError(
        f"op is {op!r} of type {type(op).__name__}; expected a torch.distributed.ReduceOp such as ReduceOp.SUM"
    )


def size_error(row: Row, pg: Group, send: torch.Tensor, recv: torch.Tensor, counts: Counts | None) -> MismatchError:
    """Return the error of buffers whose sizes do not fit the row."""
    expected = f"sum of the counts given, {counts}" if counts else row.shape.value
    return MismatchError(
        f"{row.name} on {len(pg.ranks)} ranks: input of {send.numel()} elements {tuple(send.shape)} and output of "
        f"{recv.numel()} elements {tuple(recv.shape)} do not fit (expected: {expected})"
    )
