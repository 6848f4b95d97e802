"""Kernels of c10d's operators for groups of ours: what C++, a traced graph or a compiled program calls by an operator.

c10d's own kernels ask a group for its Backend in C++, which a group made in Python does not have. Those of ``c10d::``
take the call of one of our groups from there, on the way to the kernel of the tensors' device, and hand all others on;
they are installed with the first call of ours that goes through the dispatcher, so that programs without one pay
nothing. Two operators of ``_c10d_functional`` ask for the Backend themselves.

====================================================  ==================================================  ==============
what                                                  why                                                 checked
====================================================  ==================================================  ==============
``_C._dispatch_get_all_op_names``                     the operators that this torch has                   2.8.0, 2.13.0
``_C._dispatch_keyset_full_after``                    goes on to the kernel of the tensors' device        2.8.0, 2.13.0
``_C._distributed_c10d._register_work``,              what ``wait_tensor`` waits for                      2.8.0, 2.13.0
``._resolve_process_group``
``OpOverload._op_dk, _schema``                        torch's own kernel of an operator, its arguments    2.8.0, 2.13.0
``_subclasses.fake_tensor.FakeTensor``                torch knows what an operator does to it             2.13.0, 2.14.1
====================================================  ==================================================  ==============
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch._C import DispatchKey, _dispatch_get_all_op_names, _dispatch_keyset_full_after
from torch._C import _distributed_c10d as bindings
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed import ReduceOp

from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.table import METHODS
from hpcdist.core.work import Work
from hpcdist.torch_bridge.mirror import GroupName

Function = Callable[..., Any]

BELOW_MODES = "BackendSelect"  # a key of every call, below modes, subclasses and autograd, above all devices
GROUP = "process_group"
# an operator's name is, with an underscore, that of the method or its earlier one: the name of today by that
EARLIER = {earlier: name for name, earlier in METHODS.items() if earlier is not None}
METHOD_OF = {**EARLIER, "recv_any_source": "recv_anysource", "gather_into_tensor": "gather_single"}
FIELDS = {"reduce_op": "reduceOp", "root_rank": "rootRank", "root_tensor": "rootTensor", "async_op": "asyncOp"}
NOT_ASKED = ("device_ids", "sparse_indices")

# the methods of our groups below the dispatcher
CARRY_OUT: dict[str, Function] = {}


class UnderWay(threading.local):
    """The call of a method on this thread that goes through the dispatcher: its name and its arguments."""

    call: tuple[str, tuple[Any, ...], dict[str, Any]] | None = None


UNDER_WAY = UnderWay()


def is_known_to_torch(value: Any) -> bool:
    """Tell whether a tensor, or the first of a list, has no memory: torch itself says what becomes of it."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, FakeTensor) or (isinstance(value, torch.Tensor) and value.is_meta)


def reduce_op(boxed: Any) -> Any:
    """Return the op of an operator's argument, for which a torch such as 2.8 has no way: RuntimeError."""
    if "op" not in boxed._method_names():
        raise RuntimeError(
            f"torch {torch.__version__} does not say which op an operator of c10d reduces by, in a graph that was "
            "traced before: expected a call of torch.distributed, or a functional collective"
        )
    return ReduceOp(ReduceOp.RedOpType(boxed.op()))


def parsed(names: list[str], values: tuple[Any, ...]) -> tuple[list[Any], float]:
    """Return what a method takes after its tensors, of an operator's arguments after the group, and the call's seconds.

    Those are negative without a limit.
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
    """Carry out an operator on a group of ours; hand one on a group of torch's on."""
    names = [each.name for each in operator._schema.arguments]
    place = names.index(GROUP)
    tensors, group = args[:place], TorchProcessGroup.unbox(args[place])
    if not isinstance(group, ProcessGroup) or is_known_to_torch(tensors):
        return operator.redispatch(keyset & _dispatch_keyset_full_after(DispatchKey.BackendSelect), *args)
    name = operator._opname.removesuffix("_")
    name = METHOD_OF.get(name, name)
    made, UNDER_WAY.call = UNDER_WAY.call, None
    try:
        if name == "monitored_barrier":
            group.monitored_barrier()  # type: ignore[attr-defined]  # c10d.monitored adds it
            return None
        given = () if name == "barrier" else tensors  # its tensor only says on which device
        if made is not None and made[0] == name:
            work = CARRY_OUT[name](group, *given, *made[1][len(given) :], **made[2])
        else:
            rest, seconds = parsed(names[place + 1 :], args[place + 1 :])
            with nullcontext() if seconds < 0 else group.journal.limited(seconds):
                work = CARRY_OUT[name](group, *given, *rest)
    finally:
        UNDER_WAY.call = made
    boxed = work.boxed()
    return (tensors[0], boxed) if len(operator._schema.returns) > 1 else boxed


@cache
def install() -> torch.library.Library:
    """Install the kernels of ``c10d::``, once a process; they live as long as what is returned."""
    library = torch.library.Library("c10d", "IMPL")
    for full in sorted(_dispatch_get_all_op_names()):
        namespace, _, name = full.partition("::")
        operator = getattr(getattr(torch.ops.c10d, name), "default", None) if namespace == "c10d" else None
        if operator is not None and any(each.name == GROUP for each in operator._schema.arguments):
            library.impl(name, partial(kernel, operator), BELOW_MODES, with_keyset=True)
    return library


def boxed(group: ProcessGroup) -> Any:
    """Return a group as operators take it."""
    install()
    return TorchProcessGroup.boxed(group)


setattr(ProcessGroup, "boxed", boxed)  # noqa: B010  # mypy takes no assignment to a method


# -- functional operators that ask for a Backend themselves ----------------------------------------------------


def register_work(tensor: torch.Tensor, work: Work) -> torch.Tensor:
    """Let ``wait_tensor`` of a tensor wait for a call; return the tensor."""
    bindings._register_work(tensor, work)
    return tensor


def gather_into(
    group: ProcessGroup, input: torch.Tensor, group_size: int, name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    """Gather each rank's tensor into one, as ``all_gather_into_tensor_out`` does."""
    return register_work(out, group.all_gather_single(out, input))


def exchange_messages(
    group: ProcessGroup, kinds: list[str], peers: list[int], tags: list[int], tensors: list[torch.Tensor], name: Any
) -> list[torch.Tensor]:
    """Begin messages together, as ``batch_p2p_ops`` does; wait for what it returns: a sent tensor has a placeholder."""
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
    """Carry out a functional operator on a group of ours, which itself or its name is at a place; leave torch's."""
    name = args[place]
    group: Any = bindings._resolve_process_group(GroupName(name)) if isinstance(name, str) else name
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
