"""c10d's methods of a group: what torch's libraries call.

DDP's reducer, the functional collectives and ``torch.distributed``'s own functions call these methods with lists of
tensors and an options object. Each method is a few lines that call ``core.issue``. Methods that torch's C++ calls by a
Python name (``allreduce``, ``getGroupName`` …) must keep that name; checked against ``PyProcessGroup.hpp`` of torch
2.13.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed

from hpcdist.core import several, table
from hpcdist.core.buffers import as_tensor, as_tensor_lists, as_tensors
from hpcdist.core.call import Call
from hpcdist.core.device_backend import DeviceBackend
from hpcdist.core.errors import MismatchError
from hpcdist.core.group import Group
from hpcdist.core.issue import begin_all, issue
from hpcdist.core.lists import check_lengths, check_pairs, splits_of
from hpcdist.core.point_to_point import irecv, isend
from hpcdist.core.printing import format_value
from hpcdist.core.ranks import as_rank
from hpcdist.core.reduction import PRODUCT, SUM, canonical
from hpcdist.core.work import AllWork, DoneWork, Work

Tensors = list[torch.Tensor]


def parse_options(call: str, tensors: Iterable[Any], opts: Any, op: Any = None) -> tuple[Any, bool]:
    """Return the op and whether the call is asynchronous; ``opts`` may be an options object or the op itself.

    The product of complex numbers is an error: c10d's methods have never computed it.
    """
    given = op if opts is None else getattr(opts, "reduceOp", opts)
    how, is_async = canonical(SUM if given is None else given), getattr(opts, "asyncOp", True)
    if how is PRODUCT and any(isinstance(each, torch.Tensor) and each.is_complex() for each in tensors):
        raise MismatchError(
            f"{call} does not support PRODUCT on complex tensors as a method of a group, nor does torch.distributed; "
            "hpcdist.all_reduce, reduce and reduce_scatter do"
        )
    return how, is_async


def asks_async(call: str, opts: Any) -> bool:
    """Tell whether a call without op and root is asynchronous, which is the default of its options."""
    if opts is None or isinstance(opts, timedelta):  # an overload of c10d's has a limit there
        return True
    if not hasattr(opts, "asyncOp"):
        raise TypeError(
            f"{call}: opts is {format_value(opts)} of type {type(opts).__name__}; expected options of c10d's, such as "
            "torch.distributed.BarrierOptions()"
        )
    is_async: bool = opts.asyncOp
    return is_async


def is_one(value: Any) -> bool:
    """Tell whether a value is a tensor or an array, not a list."""
    return isinstance(value, (torch.Tensor, np.ndarray))


def as_list(tensors: Any) -> list[Any]:
    """Return a tensor or a list of tensors as a list; TypeError for anything else."""
    if tensors.__class__ is list:
        return tensors
    return [tensors] if is_one(tensors) else as_tensors(tensors, "tensors", writable=True)


def only_tensor(call: str, tensors: Any, what: str) -> Any:
    """Return a tensor, given by itself or as the only one of a list."""
    given = as_list(tensors)
    if len(given) != 1:
        raise MismatchError(f"{call}: requires a single-element {what}, got {len(given)}")
    return given[0]


class C10dMethods(Group):
    """The calls of torch's libraries on a group."""

    # between _start_coalescing and _end_coalescing: the calls made, those of them held back, and what launches these
    _begun: list[Work] | None
    _held: Sequence[Work] = ()
    _together: AbstractContextManager[Sequence[Work]] | None = None

    def _begin(self, issued: Work | None, result: list[Any]) -> Work:
        """Return a Work for C++, which does not accept None: the one that was issued, or one that has ended."""
        work = (DoneWork(result) if issued is None else issued)._whole()
        if self._begun is not None:
            self._begun.append(work)
        return work

    # -- reducing ------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None) -> Work:
        """Combine a tensor, or all tensors of a list, over all ranks; the result is written to each."""
        given = as_list(tensors)
        how, is_async = parse_options("allreduce", given, opts, op)
        if len(given) == 1:
            return self._begin(issue(table.ALL_REDUCE, self, given[0], given[0], how, None, is_async), given)
        given = as_tensors(given, "tensors", writable=True)
        return self._begin(several.all_reduce(self, given, how, is_async), given)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Combine each tensor of a list over all ranks, in place."""
        given = tensors if tensors.__class__ is list else as_tensors(tensors, "tensors", writable=True)
        if not given:
            raise MismatchError("allreduce_coalesced: requires non-empty tensor list")
        op, is_async = parse_options("allreduce_coalesced", given, opts)
        return self._begin(issue(table.ALL_REDUCE, self, given, given, op, None, is_async, table.EACH), given)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None, *, root: Any = None) -> Work:
        """Combine a tensor over all ranks on the root, in place."""
        tensor = only_tensor("reduce", tensors, "tensor list")
        target = self._root("reduce", opts, root)
        several.check_root_tensor("reduce", getattr(opts, "rootTensor", 0), 1)
        how, is_async = parse_options("reduce", [tensor], opts if hasattr(opts, "reduceOp") else None, op)
        recv = tensor if self.rank() == target else None
        return self._begin(issue(table.REDUCE, self, tensor, recv, how, target, is_async), [tensor])

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Work:
        """Combine lists over all ranks; each rank gets its entry."""
        if is_one(output_tensors):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        check_pairs("reduce_scatter", output_tensors, input_tensors)
        check_lengths("reduce_scatter", "input", input_tensors, self.size() * len(output_tensors))
        how, is_async = parse_options("reduce_scatter", output_tensors, opts, op)
        if len(output_tensors) == 1:
            output = output_tensors[0]
            return self._begin(
                issue(table.REDUCE_SCATTER, self, list(input_tensors[0]), output, how, None, is_async), [output]
            )
        outputs = as_tensors(output_tensors, "output_tensors", writable=True)
        inputs = as_tensor_lists(input_tensors, "input_tensors")
        return self._begin(several.reduce_scatter(self, outputs, inputs, how, is_async), outputs)

    def reduce_scatter_single(self, outputTensor: torch.Tensor, inputTensor: torch.Tensor, opts: Any = None) -> Work:
        """Combine a tensor over all ranks; each rank gets its share."""
        op, is_async = parse_options("reduce_scatter_single", [inputTensor], opts)
        return self._begin(
            issue(table.REDUCE_SCATTER_SINGLE, self, inputTensor, outputTensor, op, None, is_async), [outputTensor]
        )

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Combine and scatter each tensor of a list."""
        return self._each(table.REDUCE_SCATTER_SINGLE, "reduce_scatter", outputs, inputs, opts)

    # -- moving --------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None) -> Work:
        """Write the root's tensor to every rank's; of lists, the one with index ``rootTensor`` to all tensors."""
        given = as_list(tensors)
        source, is_async = self._root("broadcast", opts, root), getattr(opts, "asyncOp", True)
        chosen = several.check_root_tensor("broadcast", getattr(opts, "rootTensor", 0), len(given))
        if len(given) == 1:
            return self._begin(issue(table.BROADCAST, self, given[0], given[0], None, source, is_async), given)
        given = as_tensors(given, "tensors", writable=True)
        return self._begin(several.broadcast(self, given, source, chosen, is_async), given)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Gather each rank's tensors into lists on every rank: one tensor each into a list, or k into k lists."""
        if is_one(input_tensors):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        check_pairs("allgather", output_tensors, input_tensors)
        check_lengths("allgather", "output", output_tensors, self.size() * len(input_tensors))
        is_async = asks_async("allgather", opts)
        if len(input_tensors) == 1:
            outputs = list(output_tensors[0])
            return self._begin(issue(table.ALL_GATHER, self, input_tensors[0], outputs, None, None, is_async), outputs)
        lists = as_tensor_lists(output_tensors, "output_tensors", writable=True)
        issued = several.all_gather(self, lists, as_tensors(input_tensors, "input_tensors"), is_async)
        return self._begin(issued, several.as_result(lists))

    def allgather_coalesced(self, output_lists: list[Tensors], input_list: Tensors, opts: Any = None) -> Work:
        """Gather each tensor of a list; ``output_lists`` has a list for each rank."""
        is_async, inputs = asks_async("allgather_coalesced", opts), as_tensors(input_list, "input_list")
        lists = as_tensor_lists(output_lists, "output_lists", writable=True)
        return self._begin(several.gather_together(self, lists, inputs, is_async), [])

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Gather each rank's tensor into one."""
        is_async = asks_async("all_gather_single", opts)
        return self._begin(issue(table.ALL_GATHER_SINGLE, self, input, output, None, None, is_async), [output])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Gather each tensor of a list into one."""
        return self._each(table.ALL_GATHER_SINGLE, "all_gather", outputs, inputs, opts)

    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> Work:
        """Gather each rank's tensor into a list on the root."""
        target, is_async = self._root("gather", opts, root), getattr(opts, "asyncOp", True)
        given = only_tensor("gather", input_tensors, "input tensor list")
        outputs = self._only_list("gather", output_tensors, "output", target)
        recv = outputs if self.rank() == target else None
        return self._begin(issue(table.GATHER, self, given, recv, None, target, is_async), outputs)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Gather each rank's tensor into one on the root; ``output`` is not used elsewhere."""
        target, is_async = self._root("gather_single", opts, None), getattr(opts, "asyncOp", True)
        recv = output if self.rank() == target else None
        for each in (input, recv):
            if isinstance(each, (list, tuple)):  # that is ``gather``
                as_tensor(each, "tensor")
        return self._begin(issue(table.GATHER, self, input, recv, None, target, is_async), [output])

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> Work:
        """Send each rank its tensor of the root's list."""
        target, is_async = self._root("scatter", opts, root), getattr(opts, "asyncOp", True)
        output = only_tensor("scatter", output_tensors, "output tensor list")
        inputs = self._only_list("scatter", input_tensors, "input", target)
        send = inputs if self.rank() == target else None
        return self._begin(issue(table.SCATTER, self, send, output, None, target, is_async), [output])

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> Work:
        """Send one tensor to every rank and receive one from each."""
        is_async, inputs, outputs = asks_async("alltoall", opts), as_list(input_tensors), as_list(output_tensors)
        return self._begin(issue(table.ALL_TO_ALL, self, inputs, outputs, None, None, is_async), outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any,
        input_split_sizes: Any,
        opts: Any = None,
        timeout: Any = None,
    ) -> Work:
        """Send a share to every rank and receive one from each; empty splits mean equal shares."""
        is_async = asks_async("all_to_all_single", opts)
        splits = splits_of(output_split_sizes, input_split_sizes)
        return self._begin(issue(table.ALL_TO_ALL_SINGLE, self, input, output, None, None, is_async, splits), [output])

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Wait until every rank has called this."""
        return self._begin(issue(table.BARRIER, self, None, None, None, None, asks_async("barrier", opts)), [])

    def _each(self, row: table.Row, event: str, outputs: Any, inputs: Any, opts: Any) -> Work:
        """Make a call on each input and its output, after all are checked, with one Work."""
        call = f"{row.name}_coalesced"
        check_pairs(call, outputs, inputs)
        inputs, outputs = as_tensors(inputs, "inputs"), as_tensors(outputs, "outputs", writable=True)
        if row.reduces:
            op, is_async = parse_options(call, inputs, opts)
        else:
            op, is_async = None, asks_async(call, opts)
        if len(inputs) == 1:  # as the functional collectives make of one tensor
            return self._begin(issue(row, self, inputs[0], outputs[0], op, None, is_async), outputs)
        calls = [Call(row, given, output, op) for given, output in zip(inputs, outputs, strict=True)]
        return self._begin(begin_all(self, event, inputs, several.begin_each(self, calls, is_async), outputs), outputs)

    def _root(self, call: str, opts: Any, root: Any) -> int:
        """Return the root from an options object or a number, a rank of the group."""
        given = as_rank(root if root is not None else 0 if opts is None else getattr(opts, "rootRank", opts))
        if not 0 <= given < self.size():
            raise MismatchError(f"{call}: invalid root rank: {given} (ranks of the group: 0 to {self.size() - 1})")
        return given

    def _only_list(self, call: str, lists: Any, side: str, root: int) -> Tensors:
        """Return the root's list with one tensor for each rank, given by itself or as the only entry of a list."""
        lists = [] if lists is None else lists
        if not isinstance(lists, (list, tuple)):
            raise TypeError(f"{call}: `{side}s` is of type {type(lists).__name__}; expected a list")
        if self.rank() != root:
            if lists:
                raise MismatchError(
                    f"{call}: requires empty {side} on non-root: this is rank {self.rank()}, root {root}"
                )
            return []
        if lists and is_one(lists[0]):
            lists = [lists]
        if len(lists) != 1 or not isinstance(lists[0], (list, tuple)):
            raise MismatchError(
                f"{call}: requires a single-element {side} list containing a list with {self.size()} tensors"
            )
        if len(lists[0]) != self.size():
            raise MismatchError(
                f"{call}: Incorrect {side} list size {len(lists[0])}. {side.capitalize()} list size should be "
                f"{self.size()}, same as size of the process group: expected one tensor a rank"
            )
        return list(lists[0])

    # -- point to point ------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dstRank: int, tag: int) -> Work:
        """Begin to send a tensor to a rank of the group."""
        return self._begin(isend(only_tensor("send", tensors, "tensor list"), None, self, tag, as_rank(dstRank)), [])

    def recv(self, tensors: Tensors, srcRank: int, tag: int) -> Work:
        """Begin to receive a tensor from a rank of the group."""
        tensor = only_tensor("recv", tensors, "tensor list")
        return self._begin(irecv(tensor, None, self, tag, as_rank(srcRank)), [tensor])

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """Begin to receive a tensor from any rank of the group."""
        tensor = only_tensor("recv_anysource", tensors, "tensor list")
        return self._begin(irecv(tensor, None, self, tag), [tensor])

    # -- several at once -----------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        """Launch a device's calls until ``_end_coalescing`` together, if its library can."""
        self._leave_coalescing(Exception())  # left over by a manager that ended by an exception
        self._together = self.backend(device).grouped()
        self._held = self._together.__enter__()
        self._begun = []

    def _end_coalescing(self, device: torch.device) -> Work:
        """Launch them, and return the Work of all."""
        begun = list(dict.fromkeys([*(self._begun or ()), *self._held]))
        self._leave_coalescing(None)
        return AllWork(begun, [])._whole()

    def _leave_coalescing(self, error: BaseException | None) -> None:
        """Launch the calls held back, or drop them if an error has left torch's manager, which then does not end."""
        together, self._together = self._together, None
        self._begun, self._held = None, ()
        if together is not None:
            together.__exit__(type(error) if error is not None else None, error, None)

    # -- what the group is ---------------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self.backends]

    def get_backend(self, device: torch.device) -> DeviceBackend:
        """Return the backend of a device for torch, which calls this name since 2.14."""
        return DeviceBackend(self, self.backend(device))

    _get_backend = get_backend

    def getBackendName(self) -> str:
        """Return a name for DDP's logger, which would access C++ classes for "gloo" and "nccl"."""
        return "hpcdist" if self.asked_name in (None, "gloo") else self.asked_name

    def name(self) -> str:
        """Return the name that a script asked for; the backend string if the group has several backends."""
        return self.asked_name if self.asked_name is not None and len(self.backends) == 1 else self.config

    _get_backend_name = name

    def getGroupName(self) -> str:
        """Return the name; C++ asks by this name."""
        return self.group_name

    def getGroupDesc(self) -> str:
        """Return the description; C++ calls this name."""
        return self.group_desc

    def _get_sequence_number_for_group(self) -> int:
        return self.journal.sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the collectives are counted from the group's beginning, the same on all ranks."""

    def _has_hooks(self) -> bool:
        return False


for _name, _earlier in table.METHODS.items():
    if _earlier is not None:
        setattr(C10dMethods, _earlier, getattr(C10dMethods, _name))
