"""Bridge to torch's dispatcher: c10d's operators on our groups, which dispatch modes and tensor subclasses see.

c10d's own groups make each collective an operator (``torch.ops.c10d.allreduce_`` and so on). A mode such as
CommDebugMode counts these operators, FakeTensorMode takes them over, and a subclass that only wraps other tensors
unwraps itself in them. A group made in Python bypasses the dispatcher, and a wrapper has no memory that MPI could read.

So while a mode is active, or if a wrapper is given, a method of a group calls the same method of torch's base class,
which calls the operator. c10d's own kernels would then ask the group for its C++ Backend, which a group made in Python
does not have. Our kernels come before them: they carry out calls on our groups, after all modes and subclasses, and
pass all others on; so operators that C++, a traced graph or a compiled program calls work too. They are installed at
the first call of ours that goes through the dispatcher. Two operators of ``_c10d_functional`` ask for the Backend
themselves.

What torch keeps private and is used here, and the versions where that was checked; in a torch without these names modes
do not see the calls:

====================================================  ==================================================  ==============
what                                                  why                                                 checked
====================================================  ==================================================  ==============
``_C._len_torch_dispatch_stack``                      whether a mode is active                            2.13.0, 2.14.1
``_C._functorch.peek_interpreter_stack``,             whether a transform of ``torch.func`` is active,    2.13.0
``.get_unwrapped, .is_functorch_wrapped_tensor``      and a tensor outside of it
``_C._dispatch_get_all_op_names``                     the operators that this torch has                   2.8.0, 2.13.0
``_C._dispatch_keyset_full_after``                    goes on to the kernel of the tensors' device        2.8.0, 2.13.0
``_C._distributed_c10d``                              c10d's options, and Work out of an operator         2.13.0, 2.14.1
``_C._distributed_c10d._register_work``,              what ``wait_tensor`` waits for                      2.8.0, 2.13.0
``._resolve_process_group``
``OpOverload._op_dk, _schema``                        torch's own kernel of an operator, its arguments    2.8.0, 2.13.0
``_subclasses.fake_tensor.FakeTensor``                torch knows what an operator does to it             2.13.0, 2.14.1
====================================================  ==================================================  ==============
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import timedelta
from functools import cache, partial, wraps
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch._C import DispatchKey, _dispatch_get_all_op_names, _dispatch_keyset_full_after, _len_torch_dispatch_stack
from torch._C import _distributed_c10d as c10d
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed import ReduceOp

from hpcdist.core import hooks, table
from hpcdist.core.buffers import PLAIN_TYPES, as_tensor, as_tensors, copy_into, for_writing
from hpcdist.core.call import Call
from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.table import EACH
from hpcdist.core.work import LONGEST_TIMEOUT, NO_TIMEOUT, DoneWork, Work
from hpcdist.torch_bridge.features import has
from hpcdist.torch_bridge.mirror import GroupName

Function = Callable[..., Any]

# -- kernels -----------------------------------------------------------------------------------------------

BELOW_MODES = "BackendSelect"  # a key in every call, below modes, subclasses and autograd, above all devices
GROUP = "process_group"
# an operator has the name of the method, today's or an earlier one, with an underscore: the method by that name
EARLIER = {earlier: name for name, earlier in table.METHODS.items() if earlier is not None}
METHOD_OF = {**EARLIER, "recv_any_source": "recv_anysource"}
FIELDS = {"reduce_op": "reduceOp", "root_rank": "rootRank", "root_tensor": "rootTensor", "async_op": "asyncOp"}
NOT_ASKED = ("device_ids", "sparse_indices")

# the methods of our groups below the dispatcher
CARRY_OUT: dict[str, Function] = {}


class UnderWay(threading.local):
    """The call of a method on this thread that goes through the dispatcher: its name and its arguments."""

    call: tuple[str, tuple[Any, ...], dict[str, Any]] | None = None
    is_below = False  # whether a kernel of ours carries it out; modes that are active then take no part in it


UNDER_WAY = UnderWay()


def is_known_to_torch(value: Any) -> bool:
    """Tell whether a tensor, or one of a list, has no memory, so that torch itself computes the result."""
    if isinstance(value, (list, tuple)):
        return any(map(is_known_to_torch, value))
    return isinstance(value, FakeTensor) or (isinstance(value, torch.Tensor) and value.is_meta)


def unwrapped(value: Any) -> Any:
    """Return a tensor, or those of a list, without the wrappers of ``torch.func``, which stay in lists of lists."""
    if isinstance(value, (list, tuple)):
        return [unwrapped(each) for each in value]
    while isinstance(value, torch.Tensor) and is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    return value


def reduce_op(boxed: Any) -> Any:
    """Return the op of an operator's argument; RuntimeError if this torch, such as 2.8, cannot do so."""
    if "op" not in boxed._method_names():
        raise RuntimeError(
            f"torch {torch.__version__} does not say which op an operator of c10d reduces by, in a graph that was "
            "traced before: expected a call of torch.distributed, or a functional collective"
        )
    return ReduceOp(ReduceOp.RedOpType(boxed.op()))


def parsed(names: list[str], values: tuple[Any, ...]) -> tuple[list[Any], float]:
    """Return a method's arguments after the tensors, from an operator's arguments after the group, and the limit.

    The limit is in seconds, negative for none.
    """
    options, rest, seconds = SimpleNamespace(), [], -1.0
    for each, value in zip(names, values, strict=False):
        if each == "timeout":
            seconds = value / 1000
        elif each in FIELDS:
            setattr(options, FIELDS[each], reduce_op(value) if each == "reduce_op" else value)
        elif each not in NOT_ASKED:
            rest.append(value)
    if vars(options):
        rest.append(SimpleNamespace(**{"asyncOp": True} | vars(options)))
    return rest, seconds


def kernel(operator: Any, keyset: Any, *args: Any) -> Any:
    """Carry out an operator on a group of ours; pass on those on torch's own groups."""
    names = [each.name for each in operator._schema.arguments]
    place = names.index(GROUP)
    tensors, group = args[:place], TorchProcessGroup.unbox(args[place])
    if not isinstance(group, ProcessGroup) or is_known_to_torch(tensors):
        return operator.redispatch(keyset & _dispatch_keyset_full_after(DispatchKey.BackendSelect), *args)
    name = operator._opname.removesuffix("_")
    name = METHOD_OF.get(name, name)
    made, UNDER_WAY.call = UNDER_WAY.call, None
    was_below, UNDER_WAY.is_below = UNDER_WAY.is_below, True
    try:
        if name == "monitored_barrier":
            group.monitored_barrier()  # type: ignore[attr-defined]  # c10d.monitored adds it
            return None
        given = [] if name == "barrier" else unwrapped(tensors)  # its tensor only gives the device
        if made is not None and made[0] == name:
            work = CARRY_OUT[name](group, *given, *made[1][len(given) :], **made[2])
        else:
            rest, seconds = parsed(names[place + 1 :], args[place + 1 :])
            with nullcontext() if seconds < 0 else group.journal.limited(seconds):
                work = CARRY_OUT[name](group, *given, *rest)
    finally:
        UNDER_WAY.call, UNDER_WAY.is_below = made, was_below
    boxed = work.boxed()
    return (tensors[0], boxed) if len(operator._schema.returns) > 1 else boxed


@cache
def install() -> torch.library.Library:
    """Install the kernels of ``c10d::``, once in a process; they live as long as the returned object."""
    library = torch.library.Library("c10d", "IMPL")
    for full in sorted(_dispatch_get_all_op_names()):
        namespace, _, name = full.partition("::")
        operator = getattr(getattr(torch.ops.c10d, name), "default", None) if namespace == "c10d" else None
        if operator is not None and any(each.name == GROUP for each in operator._schema.arguments):
            library.impl(name, partial(kernel, operator), BELOW_MODES, with_keyset=True)
    return library


def boxed(group: ProcessGroup) -> Any:
    install()
    return TorchProcessGroup.boxed(group)


setattr(ProcessGroup, "boxed", boxed)  # noqa: B010  # mypy takes no assignment to a method


# -- functional operators that ask for a Backend themselves ----------------------------------------------------


def register_work(tensor: torch.Tensor, work: Work) -> torch.Tensor:
    """Let ``wait_tensor`` of a tensor wait for a call; return the tensor."""
    c10d._register_work(tensor, work)
    return tensor


def gather_into(
    group: ProcessGroup, input: torch.Tensor, group_size: int, name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    """Gather each rank's tensor into one, as ``all_gather_into_tensor_out`` does."""
    return register_work(out, group.all_gather_single(out, input))


def exchange_messages(
    group: ProcessGroup, kinds: list[str], peers: list[int], tags: list[int], tensors: list[torch.Tensor], name: Any
) -> list[torch.Tensor]:
    """Begin messages together, as ``batch_p2p_ops`` does; returns tensors to wait for, placeholders for sends."""
    with group.grouped():
        begin = {"isend": group.send, "irecv": group.recv}
        messages = list(zip(kinds, tensors, peers, tags, strict=True))
        works = [begin[kind]([tensor], peer, tag) for kind, tensor, peer, tag in messages]
    results = []
    for kind, tensor, work in zip(kinds, tensors, works, strict=True):
        register_work(tensor, work)
        results.append(tensor if kind == "irecv" else register_work(tensor.new_empty(0), work))
    return results


def of_ours(carry_out: Function, operator: Any, place: int, *args: Any, **kwargs: Any) -> Any:
    """Return a kernel that carries out a functional operator on our groups, given the place of the group's argument."""
    name = args[place]
    group: Any = c10d._resolve_process_group(GroupName(name)) if isinstance(name, str) else name
    if not isinstance(group, ProcessGroup):
        return operator._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
    return carry_out(group, *args, **kwargs)


FUNCTIONAL = torch.library.Library("_c10d_functional", "IMPL")
ASKING: dict[str, tuple[Function, int]] = {
    "all_gather_into_tensor_out": (gather_into, 2),
    "batch_p2p_ops": (exchange_messages, 4),
}
for _name, (_carry_out, _place) in ASKING.items():
    if _operator := getattr(getattr(torch.ops._c10d_functional, _name, None), "default", None):
        for _device in ("CPU", "CUDA", "XPU"):
            FUNCTIONAL.impl(_name, partial(of_ours, _carry_out, _operator, _place), _device)


# -- methods -----------------------------------------------------------------------------------------------

OPTION_TYPES = {getattr(c10d, name) for name in dir(c10d) if name.endswith("Options")}
PASSED = PLAIN_TYPES | OPTION_TYPES | {int, type(None)}  # that wrap nothing
DEFAULT: Any = torch.Tensor.__torch_dispatch__
TIMED = {timedelta, *(each for each in OPTION_TYPES if hasattr(each, "timeout"))}


def needs(values: Iterable[Any]) -> tuple[float | None, bool]:
    """Return the limit in a method's arguments, in seconds, and whether one of them wraps a tensor.

    None means the group's limit; a wrapper defines the effect of an operator itself.
    """
    seconds, is_wrapped = None, False
    for value in values:
        kind = value.__class__
        if kind is list or kind is tuple:
            for each in value:
                if each.__class__ not in PLAIN_TYPES:
                    is_wrapped = is_wrapped or needs(value)[1]
                    break
        elif kind in TIMED:
            given: timedelta = value if kind is timedelta else value.timeout
            if given > NO_TIMEOUT and seconds is None:
                seconds = min(given, LONGEST_TIMEOUT).total_seconds()
        elif kind not in PASSED:
            is_wrapped = is_wrapped or getattr(kind, "__torch_dispatch__", DEFAULT) is not DEFAULT
    return seconds, is_wrapped


def has_wrapper(values: Iterable[Any]) -> bool:
    """Tell whether a tensor among the values or their lists is a wrapper, which handles operators itself."""
    return needs(values)[1]


def exchange_operator(
    pg: ProcessGroup, output: Any, input: Any, received: Any, sent: Any, opts: Any = None, timeout: Any = None
) -> Work:
    """Call the operator of all_to_all_single; the base class's method would call our two methods in turn, forever."""
    boxed = torch.ops.c10d.alltoall_base_(
        output, input, pg.boxed(), received or [], sent or [], getattr(opts, "asyncOp", True)
    )
    work: Any = c10d.Work.unbox(boxed)
    return work


def name_in_cpp(name: str) -> str:
    """Return the one of two names by which this torch's C++ calls a method of a group."""
    later = EARLIER.get(name, name)
    return later if has("`all_gather_single` and the other names in `_single`") else table.METHODS.get(later) or later


def through_dispatcher(name: str, method: Callable[..., Work]) -> Callable[..., Work]:
    """Return a method that goes through the dispatcher if a mode or wrapper must see the call."""
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
        seconds, is_wrapped = needs((*args, *kwargs.values()) if kwargs else args)
        if (
            not is_wrapped and not _len_torch_dispatch_stack() and peek_interpreter_stack() is None
        ) or UNDER_WAY.is_below:
            if seconds is None:
                return method(self, *args, **kwargs)
            with self.journal.limited(seconds):
                return method(self, *args, **kwargs)

        install()
        before, UNDER_WAY.call = UNDER_WAY.call, (later, args, kwargs)
        try:
            with nullcontext() if seconds is None else self.journal.limited(seconds):
                return call_base(self, *args, **kwargs)
        finally:
            UNDER_WAY.call = before

    return call


for _name in (*table.METHODS, *table.MESSAGE_METHODS, *EARLIER):  # all are operators of c10d's
    if hasattr(TorchProcessGroup, name_in_cpp(_name)):
        setattr(ProcessGroup, _name, through_dispatcher(_name, getattr(ProcessGroup, _name)))


# -- calls of the facade -----------------------------------------------------------------------------------


def options(call: Call, made: Any, async_op: bool) -> Any:
    made.asyncOp = async_op
    if call.row.reduces:
        made.reduceOp = call.op
    if call.row.rooted:
        made.rootRank = call.root
    return made


def shares(tensor: Any, pg: Any, counts: Any = None, side: int = 0) -> list[list[torch.Tensor]]:
    """Return the ranks' shares of a tensor, or the list of them, as c10d's list of lists; empty without a tensor.

    Those of a tensor have one size, or the sizes of one side of a call's counts.
    """
    if tensor is None:
        return []
    if isinstance(tensor, list):
        return [tensor]
    return [list(tensor.reshape(-1).split(counts[side] if counts else [tensor.numel() // pg.size()] * pg.size()))]


def exchange(pg: Any, call: Call, opts: Any) -> Work:
    """Begin an all_to_all of lists, or of shares of one tensor."""
    if isinstance(call.send, list):
        of_lists: Work = pg.alltoall(call.recv, call.send, opts)
        return of_lists
    sent, received = call.counts or ((), ())
    work: Work = pg.all_to_all_single(call.recv, call.send, list(received or ()), list(sent or ()), opts)
    return work


def all_reduce(pg: Any, call: Call, opts: Any) -> Work:
    """Begin an all_reduce of a tensor, or of each tensor of a list."""
    if call.counts is EACH:
        work: Work = pg.allreduce_coalesced(call.send, options(call, c10d.AllreduceCoalescedOptions(), opts.asyncOp))
    else:
        work = pg.allreduce([call.send], opts)
    return work


# c10d's options of each row, and its method, called with a group, a call and the options
DOORS: dict[table.Row, tuple[Callable[[], Any], Callable[[Any, Any, Any], Work]]] = {
    table.BARRIER: (c10d.BarrierOptions, lambda pg, call, opts: pg.barrier(opts)),
    table.BROADCAST: (c10d.BroadcastOptions, lambda pg, call, opts: pg.broadcast([call.recv], opts)),
    table.ALL_REDUCE: (c10d.AllreduceOptions, all_reduce),
    table.REDUCE: (c10d.ReduceOptions, lambda pg, call, opts: pg.reduce([call.send], opts)),
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


def without_arrays(given: Any, is_written: bool) -> Any:
    """Return one side of a call as a tensor or a list of tensors, if it may hold NumPy arrays; None for None."""
    if isinstance(given, list):
        return as_tensors(given, "tensors", is_written)
    return None if given is None else as_tensor(given, "tensor", is_written)


def dispatch(call: Call, pg: ProcessGroup, async_op: bool) -> Work | None:
    """Carry out a call of the facade by c10d's method, and so through the dispatcher."""
    recv = without_arrays(call.recv, True)
    send = recv if call.send is call.recv else without_arrays(call.send, False)
    if call.row is table.GATHER and isinstance(recv, torch.Tensor) and (flat := for_writing(recv)) is not recv:
        call, recv = call._replace(finish=partial(copy_into, flat, recv), result=[recv]), flat
    make_options, door = DOORS[call.row]
    work = door(pg, call._replace(send=send, recv=recv), options(call, make_options(), async_op))
    if async_op and call.finish is None:
        return work
    work.wait()
    if call.finish is not None:
        call.finish()
    return DoneWork(call.shown()) if async_op else None


def must_be_seen(*sides: Any) -> bool:
    """Tell whether a mode or a transform of ``torch.func`` is active, or a tensor wraps others."""
    is_seen = (
        _len_torch_dispatch_stack() > 0
        or peek_interpreter_stack() is not None
        or (not PLAIN_TYPES.issuperset(map(type, sides)) and needs(sides)[1])
    )
    return is_seen and not UNDER_WAY.is_below


hooks.must_be_seen, hooks.has_wrapper, hooks.dispatch = must_be_seen, has_wrapper, dispatch
