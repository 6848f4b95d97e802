"""Bridge to torch's dispatcher: lets dispatch modes and tensor subclasses see the calls of our groups.

c10d's own groups make each collective an operator (``torch.ops.c10d.allreduce_`` and so on). A mode such as
CommDebugMode counts these operators, FakeTensorMode takes them over, and a subclass that only wraps other tensors
unwraps itself in them. A group made in Python bypasses the dispatcher, and a wrapper has no memory that MPI could read.

So while a mode is active, or if a wrapper is given, a method of a group calls its namesake in torch's base class, which
calls the operator. Its kernel for our groups (``operators``) carries the call out, when everybody else has seen it, on
the tensors that it is then given.

What torch keeps private and is used here, and the versions where that was checked; in a torch without these names modes
do not see the calls:

====================================================  ==================================================  ==============
what                                                  why                                                 checked
====================================================  ==================================================  ==============
``_C._len_torch_dispatch_stack``                      whether a mode is active                            2.13.0, 2.14.1
``_C._distributed_c10d``                              c10d's options, and Work out of an operator         2.13.0, 2.14.1
====================================================  ==================================================  ==============
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial, wraps
from types import FunctionType
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch._C import _len_torch_dispatch_stack
from torch.distributed import ProcessGroup as TorchProcessGroup

from hpcdist.core import hooks, table
from hpcdist.core.buffers import PLAIN_TYPES, as_tensor, for_writing, put
from hpcdist.core.call import Call
from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.work import LONGEST_TIMEOUT, NO_TIMEOUT, DoneWork, Work
from hpcdist.torch_bridge import operators
from hpcdist.torch_bridge.features import has
from hpcdist.torch_bridge.mirror import forget_coalescing
from hpcdist.torch_bridge.operators import CARRY_OUT, EARLIER, UNDER_WAY

OPTION_TYPES = {getattr(c10d, name) for name in dir(c10d) if name.endswith("Options")}
PASSED = PLAIN_TYPES | OPTION_TYPES | {int, type(None)}  # that wrap nothing
DEFAULT: Any = torch.Tensor.__torch_dispatch__


TIMED = {each for each in OPTION_TYPES if hasattr(each, "timeout")}


def limit_of(values: Iterable[Any]) -> float | None:
    """Return the seconds that a method's arguments give the call; None for the group's limit."""
    for value in values:
        kind = value.__class__
        if kind in TIMED or kind is timedelta:
            given: timedelta = value if kind is timedelta else value.timeout
            if given > NO_TIMEOUT:
                return min(given, LONGEST_TIMEOUT).total_seconds()
    return None


def has_wrapper(values: Iterable[Any]) -> bool:
    """Tell whether a tensor among the values or their lists decides itself what an operator does to it."""
    for value in values:
        kind = value.__class__
        if kind in PASSED:
            continue
        if kind is list or kind is tuple:
            if has_wrapper(value):
                return True
        elif getattr(kind, "__torch_dispatch__", DEFAULT) is not DEFAULT:
            return True
    return False


def exchange_operator(
    pg: ProcessGroup, output: Any, input: Any, received: Any, sent: Any, opts: Any = None, timeout: Any = None
) -> Work:
    """Call the operator of all_to_all_single; the base class's method would call our two methods in turn, for ever."""
    boxed = torch.ops.c10d.alltoall_base_(
        output, input, pg.boxed(), received or [], sent or [], getattr(opts, "asyncOp", True)
    )
    work: Any = c10d.Work.unbox(boxed)
    return work


def name_in_cpp(name: str) -> str:
    """Return the name of the two under which this torch's C++ calls a method of a group."""
    later = EARLIER.get(name, name)
    return later if has("`all_gather_single` and the other names in `_single`") else table.METHODS.get(later) or later


def through_dispatcher(name: str, method: Callable[..., Work]) -> Callable[..., Work]:
    """Return a method that goes through the dispatcher if somebody there must see the call."""
    base = getattr(TorchProcessGroup, name, None) or getattr(TorchProcessGroup, name_in_cpp(name))
    later = EARLIER.get(name, name)
    CARRY_OUT[later] = method
    if later == "all_to_all_single":
        base = exchange_operator

    def call_base(self: ProcessGroup, *args: Any, **kwargs: Any) -> Work:
        return base(self, *args, **kwargs)

    # torch's binding calls the method made in Python, unless a function of its name calls it with the same group
    code = call_base.__code__.replace(co_name=name_in_cpp(name))
    call_base = FunctionType(code, globals(), name, None, call_base.__closure__)

    @wraps(method)
    def call(self: ProcessGroup, *args: Any, **kwargs: Any) -> Work:
        seconds = limit_of(args) if not kwargs else limit_of((*args, *kwargs.values()))
        if not _len_torch_dispatch_stack() and not has_wrapper(args):
            try:
                if seconds is None:
                    return method(self, *args, **kwargs)
                with self.journal.limited(seconds):
                    return method(self, *args, **kwargs)
            except Exception as error:
                leave_coalescing(self, error)
                raise

        operators.install()
        before, UNDER_WAY.call = UNDER_WAY.call, (later, args, kwargs)
        try:
            with nullcontext() if seconds is None else self.journal.limited(seconds):
                return call_base(self, *args, **kwargs)
        finally:
            UNDER_WAY.call = before

    return call


def leave_coalescing(pg: ProcessGroup, error: Exception) -> None:
    """End torch's coalescing manager on a group, if there is one: an error leaves it open."""
    if pg._begun is not None:
        pg._leave_coalescing(error)
        forget_coalescing(pg)


for _name in (*table.METHODS, *table.MESSAGE_METHODS, *EARLIER):  # all are operators of c10d's
    if hasattr(TorchProcessGroup, name_in_cpp(_name)):
        setattr(ProcessGroup, _name, through_dispatcher(_name, getattr(ProcessGroup, _name)))


# -- calls of the facade -----------------------------------------------------------------------------------


def options(call: Call, made: Any, async_op: bool) -> Any:
    """Return c10d's options with what a call says."""
    made.asyncOp = async_op
    if call.row.reduces:
        made.reduceOp = call.op
    if call.row.rooted:
        made.rootRank = call.root
    return made


def shares(tensor: Any, pg: Any, counts: Any = None, side: int = 0) -> list[list[torch.Tensor]]:
    """Return the ranks' shares of a tensor as the list of lists that c10d takes; an empty one without a tensor.

    They are of one size, or as one side of a call's counts says.
    """
    if tensor is None:
        return []
    return [list(tensor.reshape(-1).split(counts[side] if counts else [tensor.numel() // pg.size()] * pg.size()))]


def in_place(call: Call) -> list[torch.Tensor]:
    """Return the tensor of a call that c10d makes in place."""
    if call.recv is None or call.recv is call.send:
        return [call.send]
    return [call.recv.copy_(call.send)]


def exchange(pg: Any, call: Call, opts: Any) -> Work:
    """Begin an all_to_all of shares of one tensor."""
    sent, received = call.counts or ((), ())
    work: Work = pg.all_to_all_single(call.recv, call.send, list(received or ()), list(sent or ()), opts)
    return work


# c10d's options of each row, and its method, called with a group, a call and the options
DOORS: dict[table.Row, tuple[Callable[[], Any], Callable[[Any, Any, Any], Work]]] = {
    table.BARRIER: (c10d.BarrierOptions, lambda pg, call, opts: pg.barrier(opts)),
    table.BROADCAST: (c10d.BroadcastOptions, lambda pg, call, opts: pg.broadcast([call.recv], opts)),
    table.ALL_REDUCE: (c10d.AllreduceOptions, lambda pg, call, opts: pg.allreduce(in_place(call), opts)),
    table.REDUCE: (c10d.ReduceOptions, lambda pg, call, opts: pg.reduce(in_place(call), opts)),
    table.ALL_GATHER_SINGLE: (
        c10d.AllgatherOptions,
        lambda pg, call, opts: pg.all_gather_single(call.recv, call.send, opts),
    ),
    table.ALL_GATHER: (
        c10d.AllgatherOptions,
        lambda pg, call, opts: pg.allgather(shares(call.recv, pg, call.counts, 1), [call.send], opts),
    ),
    table.GATHER: (c10d.GatherOptions, lambda pg, call, opts: pg.gather(shares(call.recv, pg), [call.send], opts)),
    table.SCATTER: (c10d.ScatterOptions, lambda pg, call, opts: pg.scatter([call.recv], shares(call.send, pg), opts)),
    table.REDUCE_SCATTER_SINGLE: (
        c10d.ReduceScatterOptions,
        lambda pg, call, opts: pg.reduce_scatter_single(call.recv, call.send, opts),
    ),
    table.REDUCE_SCATTER: (
        c10d.ReduceScatterOptions,
        lambda pg, call, opts: pg.reduce_scatter([call.recv], shares(call.send, pg, call.counts), opts),
    ),
    table.ALL_TO_ALL_SINGLE: (c10d.AllToAllOptions, exchange),
    table.ALL_TO_ALL: (c10d.AllToAllOptions, exchange),
}


def dispatch(call: Call, pg: ProcessGroup, async_op: bool) -> Work | None:
    """Carry out a call of the facade by c10d's method, and so through the dispatcher; one on lists ends in here."""
    send = None if call.send is None else as_tensor(call.send, "tensor")  # it may be a NumPy array
    recv = send if call.recv is call.send else None if call.recv is None else as_tensor(call.recv, "tensor", True)
    if call.row is table.GATHER and recv is not None and (flat := for_writing(recv)) is not recv:  # it is divided
        call, recv = call._replace(finish=partial(put, flat, recv), result=[recv]), flat
    make_options, door = DOORS[call.row]
    work = door(pg, call._replace(send=send, recv=recv), options(call, make_options(), async_op))
    if async_op and call.finish is None:
        return work
    work.wait()
    if call.finish is not None:
        call.finish()
    return DoneWork(call.shown()) if async_op else None


hooks.has_modes, hooks.has_wrapper, hooks.dispatch = _len_torch_dispatch_stack, has_wrapper, dispatch
