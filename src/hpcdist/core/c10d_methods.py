"""What do torch's libraries call on a group?

DDP's reducer, the functional collectives and ``torch.distributed``'s own functions speak to a group by c10d's
methods on lists of tensors and an options object. Each is a few lines that lead to the one path of a collective,
``core.issue``. What torch's C++ calls by a Python name (``allreduce``, ``getGroupName`` …) must keep that name;
checked against ``PyProcessGroup.hpp`` of torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch.distributed import ReduceOp

from hpcdist.core import table
from hpcdist.core.buffers import as_splits, check_length, check_sizes, joined, joint, rows_of, scattering
from hpcdist.core.device_backend import DeviceBackend
from hpcdist.core.work import AllWork, DoneWork, Work

if TYPE_CHECKING:
    from hpcdist.core.backend import Backend, Counts
    from hpcdist.core.journal import Journal
    from hpcdist.core.table import Row

Tensors = list[torch.Tensor]


def asked(opts: Any, op: Any = None) -> tuple[Any, bool]:
    """Return the op and whether the call is asynchronous; ``opts`` may be an options object or the op itself."""
    given = getattr(opts, "reduceOp", None)
    if given is None and opts is not None and not hasattr(opts, "asyncOp"):
        given = opts
    return given if given is not None else op if op is not None else ReduceOp.SUM, getattr(opts, "asyncOp", True)


def root_of(opts: Any, root: int | None) -> int:
    """Return the root that an options object names, or the one given as a number."""
    if root is not None:
        return root
    return opts if isinstance(opts, int) else 0 if opts is None else opts.rootRank


def as_torch(method: Any, name: str | None = None) -> Any:
    """Let ``help()`` and ``inspect`` show torch's own signature of a method, whose default is an options object.

    Args:
        method: ours, which takes the same arguments.
        name: another name that torch has for it; a copy is returned.
    """
    if name is not None:
        method = FunctionType(method.__code__, method.__globals__, name, method.__defaults__, method.__closure__)
    stock = getattr(torch.distributed.ProcessGroup, method.__name__)
    method.__doc__ = f"{stock.__doc__.strip().splitlines()[0]}\n\n{method.__doc__ or 'As the later name does.'}"
    method.__wrapped__ = stock
    return method


class C10dMethods:
    """The calls of torch's libraries; the rest of a group is ``core.group.ProcessGroup``."""

    if TYPE_CHECKING:
        backends: dict[str, Backend]
        timeout: timedelta
        config: str
        group_name: Any
        group_desc: Any
        ranks: tuple[int, ...]
        journal: Journal

        rank: Callable[[], int]
        size: Callable[[], int]
        backend: Callable[[torch.device | str], Backend]

    _begun: list[Work] | None = None  # the calls between _start_coalescing and _end_coalescing

    def _issue(
        self,
        row: Row,
        send: torch.Tensor | None,
        recv: torch.Tensor | None,
        result: Tensors,
        op: Any = None,
        root: int | None = None,
        is_async: bool = True,
        counts: Counts | None = None,
        then: Any = None,
    ) -> Work:
        """Lead a call to ``core.issue``, which imports this module's class; the result is never None for C++."""
        from hpcdist.core import issue

        if then is None:
            work = issue.issue(row, self, send, recv, op, root, is_async, counts)
        else:
            work = issue.issue_any(row, self, send, recv, op, root, is_async, counts, then, result)
        return self._note(work if work is not None else DoneWork(result))

    def _note(self, work: Work) -> Work:
        if self._begun is not None:
            self._begun.append(work)
        return work

    def _all(self, works: list[Work], result: Tensors) -> Work:
        return works[0] if len(works) == 1 else AllWork(works, result)

    # -- reducing ------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None) -> Work:
        """Combine one tensor, or each of a list, over all ranks, in place."""
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        how, is_async = asked(opts, op)
        works = [self._issue(table.ALL_REDUCE, tensor, tensor, [tensor], how, None, is_async) for tensor in given]
        return self._all(works, given)

    @as_torch
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Combine each tensor of a list over all ranks, in place, those of one dtype in one buffer."""
        op, is_async = asked(opts)
        kinds: dict[tuple[torch.dtype, str], Tensors] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device.type), []).append(tensor)
        works = []
        for alike in kinds.values():
            flat = joined(alike)
            copy = scattering(flat, alike)
            works.append(self._issue(table.ALL_REDUCE, flat, flat, alike, op, None, is_async, None, copy))
        return self._all(works, list(tensors)) if works else DoneWork([])

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None, *, root: Any = None) -> Work:
        """Combine a tensor over all ranks on the root, in place."""
        tensor = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
        target = root_of(opts, root)
        how, is_async = asked(None if isinstance(opts, int) else opts, op)
        recv = tensor if self.rank() == target else None
        return self._issue(table.REDUCE, tensor, recv, [tensor], how, target, is_async)

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Combine lists over all ranks and leave each rank its entry."""
        op, is_async = asked(opts)
        if isinstance(output_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        works = []
        for output, inputs in zip(output_tensors, input_tensors, strict=True):
            check_length("reduce_scatter", "input_list", inputs, self.size())
            check_sizes("reduce_scatter", "input_list", [inputs[self.rank()]], output)
            sent, flat = [each.numel() for each in inputs], joined(inputs)
            if len(set(sent)) == 1:
                work = self._issue(table.REDUCE_SCATTER_SINGLE, flat, output, [output], op, None, is_async)
            else:
                counts = (sent, [output.numel()])
                work = self._issue(table.REDUCE_SCATTER, flat, output, [output], op, None, is_async, counts)
            works.append(work)
        return self._all(works, list(output_tensors))

    @as_torch
    def reduce_scatter_single(self, outputTensor: torch.Tensor, inputTensor: torch.Tensor, opts: Any = None) -> Work:
        """Combine a tensor over all ranks and leave each rank its share."""
        op, is_async = asked(opts)
        return self._issue(table.REDUCE_SCATTER_SINGLE, inputTensor, outputTensor, [outputTensor], op, None, is_async)

    _reduce_scatter_base = as_torch(reduce_scatter_single, "_reduce_scatter_base")

    @as_torch
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Combine and scatter each tensor of a list."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self.reduce_scatter_single(output, given, opts) for output, given in pairs]
        return self._all(works, list(outputs)) if works else DoneWork([])

    reduce_scatter_tensor_coalesced = as_torch(reduce_scatter_single_coalesced, "reduce_scatter_tensor_coalesced")

    # -- moving --------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None) -> Work:
        """Write the root's tensor to every rank's."""
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        source, is_async = root_of(opts, root), getattr(opts, "asyncOp", True)
        works = [self._issue(table.BROADCAST, each, each, [each], None, source, is_async) for each in given]
        return self._all(works, given)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Gather each rank's tensor into a list on every rank."""
        if isinstance(input_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        pairs = list(zip(output_tensors, input_tensors, strict=True))
        works = [self._gather_list(list(outputs), given, getattr(opts, "asyncOp", True)) for outputs, given in pairs]
        return self._all(works, [each for outputs, _ in pairs for each in outputs])

    def _gather_list(self, outputs: Tensors, given: torch.Tensor, is_async: bool) -> Work:
        check_length("all_gather", "tensor_list", outputs, self.size())
        check_sizes("all_gather", "tensor_list", [outputs[self.rank()]], given)
        received, flat = [each.numel() for each in outputs], joint(outputs, given)
        then = scattering(flat, outputs)
        if len(set(received)) == 1:
            return self._issue(table.ALL_GATHER_SINGLE, given, flat, outputs, None, None, is_async, None, then)
        counts = ([given.numel()], received)
        return self._issue(table.ALL_GATHER, given, flat, outputs, None, None, is_async, counts, then)

    @as_torch
    def allgather_coalesced(self, output_lists: list[Tensors], input_list: Tensors, opts: Any = None) -> Work:
        """Gather each tensor of a list; ``output_lists`` has a list a rank."""
        is_async = getattr(opts, "asyncOp", True)
        works = [
            self._gather_list([outputs[index] for outputs in output_lists], given, is_async)
            for index, given in enumerate(input_list)
        ]
        return self._all(works, [each for outputs in output_lists for each in outputs]) if works else DoneWork([])

    @as_torch
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Gather each rank's tensor into one."""
        is_async = getattr(opts, "asyncOp", True)
        return self._issue(table.ALL_GATHER_SINGLE, input, output, [output], None, None, is_async)

    _allgather_base = as_torch(all_gather_single, "_allgather_base")

    @as_torch
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Gather each tensor of a list into one."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self.all_gather_single(output, given, opts) for output, given in pairs]
        return self._all(works, list(outputs)) if works else DoneWork([])

    allgather_into_tensor_coalesced = as_torch(all_gather_single_coalesced, "allgather_into_tensor_coalesced")

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Gather each rank's tensor into a list on the root."""
        root, is_async = root_of(opts, None), getattr(opts, "asyncOp", True)
        given = input_tensors if isinstance(input_tensors, torch.Tensor) else input_tensors[0]
        if self.rank() != root:
            return self._issue(table.GATHER, given, None, [], None, root, is_async)
        outputs = output_tensors if isinstance(output_tensors[0], torch.Tensor) else output_tensors[0]
        check_length("gather", "gather_list", outputs, self.size())
        check_sizes("gather", "gather_list", outputs, given)
        flat = joint(outputs, given)
        then = scattering(flat, outputs)
        return self._issue(table.GATHER, given, flat, list(outputs), None, root, is_async, None, then)

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Hand each rank its tensor of the root's list."""
        root, is_async = root_of(opts, None), getattr(opts, "asyncOp", True)
        output = output_tensors if isinstance(output_tensors, torch.Tensor) else output_tensors[0]
        send = None
        if self.rank() == root:
            inputs = input_tensors if isinstance(input_tensors[0], torch.Tensor) else input_tensors[0]
            check_length("scatter", "scatter_list", inputs, self.size())
            check_sizes("scatter", "scatter_list", inputs, output)
            send = joined(inputs)
        return self._issue(table.SCATTER, send, output, [output], None, root, is_async)

    @as_torch
    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> Work:
        """Send one tensor to every rank and receive one from each."""
        outputs = list(output_tensors)
        check_length("all_to_all", "output_tensor_list", outputs, self.size())
        check_length("all_to_all", "input_tensor_list", input_tensors, self.size())
        counts = ([each.numel() for each in input_tensors], [each.numel() for each in outputs])
        flat, is_async = joint(outputs, outputs[0]), getattr(opts, "asyncOp", True)
        then = scattering(flat, outputs)
        return self._issue(table.ALL_TO_ALL, joined(input_tensors), flat, outputs, None, None, is_async, counts, then)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any,
        input_split_sizes: Any,
        opts: Any = None,
    ) -> Work:
        """Send a share to every rank and receive one from each; empty splits stand for equal shares."""
        size, is_async = self.size(), getattr(opts, "asyncOp", True)
        splits = as_splits(output_split_sizes), as_splits(input_split_sizes)
        received = rows_of(output, splits[0], size, "output")
        sent = rows_of(input, splits[1], size, "input")
        if not any(splits):
            return self._issue(table.ALL_TO_ALL_SINGLE, input, output, [output], None, None, is_async)
        return self._issue(table.ALL_TO_ALL, input, output, [output], None, None, is_async, (sent, received))

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Wait until every rank has called this."""
        return self._issue(table.BARRIER, None, None, [], None, None, getattr(opts, "asyncOp", True))

    # -- point to point ------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dstRank: int, tag: int) -> Work:
        """Begin to send a tensor to a rank of the group."""
        from hpcdist.core.transfer import begin_send

        return self._note(begin_send(self, tensors[0], None, dstRank, tag) or DoneWork([]))

    def recv(self, tensors: Tensors, srcRank: int, tag: int) -> Work:
        """Begin to receive a tensor from a rank of the group."""
        from hpcdist.core.transfer import begin_receive

        return self._note(begin_receive(self, tensors[0], None, srcRank, tag) or DoneWork(tensors))

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """Begin to receive a tensor from any rank of the group."""
        from hpcdist.core.transfer import begin_receive

        return self._note(begin_receive(self, tensors[0], None, None, tag) or DoneWork(tensors))

    # -- several at once -----------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._begun = []

    def _end_coalescing(self, device: torch.device) -> Work:
        begun, self._begun = self._begun or [], None
        return AllWork(begun, [])

    # -- what the group is ---------------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self.backends]

    def _get_backend(self, device: torch.device) -> DeviceBackend:
        return DeviceBackend(self, self.backend(device))

    def get_backend(self, device: torch.device) -> DeviceBackend:
        """Return what torch asks about the backend of a device; it asks by this name since 2.14."""
        return self._get_backend(device)

    def _get_backend_name(self) -> str:
        return self.config

    def getBackendName(self) -> str:
        """Return a name that is no backend of torch: DDP's logger would look inside "gloo" and "nccl" in C++."""
        return "hpcdist"

    def name(self) -> str:
        """Return the backend string."""
        return self.config

    def getGroupName(self) -> str:
        """Return the name; C++ asks by this name."""
        return self.group_name

    def getGroupDesc(self) -> str:
        """Return what the group is for; C++ asks by this name."""
        return self.group_desc

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of each call."""
        self.timeout = timeout

    def _get_sequence_number_for_group(self) -> int:
        return self.journal.sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the collectives are counted from the group's beginning, alike on all ranks."""

    def _has_hooks(self) -> bool:
        return False
