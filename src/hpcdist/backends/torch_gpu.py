"""Backend of torch's own C++ library for GPUs: NCCL in builds for CUDA, RCCL for ROCm, XCCL for Intel's GPUs.

It needs only a store, which is opened over MPI: no address, no port. Calls have c10d's stream semantics by the side
streams of ``nccl.streams``; torch's watchdog, flight recorder and options are available.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as c10d
from torch.distributed.distributed_c10d import PrefixStore

from hpcdist.backends.nccl import bootstrap as finding
from hpcdist.backends.nccl.backend import ALONE, check_device, named
from hpcdist.backends.nccl.streams import (
    GRAPH_SECONDS,
    Batch,
    Held,
    PendingCall,
    Streams,
    StreamWork,
    end_apart,
    oldest,
)
from hpcdist.backends.torch_c10d import C10dBackend
from hpcdist.core import reduction, registry
from hpcdist.core.backend import Backend, Bootstrap
from hpcdist.core.backend_parts import Faults
from hpcdist.core.buffers import as_bytes, overlap
from hpcdist.core.call import Call
from hpcdist.core.call_log import CallLog
from hpcdist.core.errors import DistBackendError, end_all
from hpcdist.core.objects import TensorObjects
from hpcdist.core.printing import add_hint
from hpcdist.core.table import ALL_GATHER_SINGLE, ALL_REDUCE, BARRIER, EXCHANGES, REDUCE, REDUCE_SCATTER_SINGLE
from hpcdist.core.work import Work
from hpcdist.launch import environment, rendezvous
from hpcdist.torch_bridge import private_names

# torch's own watchdog would end the process, and dump first, for which the end of a group would wait
OWN_WATCHDOG_LATER = timedelta(minutes=1)
KIND = "xpu" if getattr(torch.version, "xpu", None) else "cuda"  # torch's name for ROCm's GPUs is cuda too
GPUS: Any = getattr(torch, KIND)


def process_group(bootstrap: Bootstrap) -> Any:
    """Make torch's C++ backend over the bootstrap's store, with the caller's options if they are of its class.

    DistBackendError if this torch lacks it, or the process sees no GPU.
    """
    made = private_names.named("ProcessGroupXCCL" if KIND == "xpu" else "ProcessGroupNCCL")
    if made is None or not GPUS.is_available():
        lacks = "this process sees no GPU" if made is not None else "it is built without"
        raise DistBackendError(
            add_hint(
                f"backend 'torch' takes the library for GPUs of this torch ({torch.__version__}): {lacks}",
                "no-torch-gpu",
            )
        )
    options = bootstrap.options if isinstance(bootstrap.options, made.Options) else made.Options()
    options._timeout = bootstrap.timeout + OWN_WATCHDOG_LATER
    return made(bootstrap.store, bootstrap.rank, bootstrap.size, options)


def choose_device(comm: Any) -> None:
    """Make this rank's GPU the current one if there is a choice; all ranks of ``comm`` call."""
    if KIND == "cuda":
        finding.choose_device(comm)
        return
    local_rank, count = environment.node_local_rank(), GPUS.device_count()
    if count > 1 and local_rank is not None and not GPUS.is_initialized():
        GPUS.set_device(local_rank % count)


class TorchBackend(C10dBackend, Faults):
    """The communicators of torch's own C++ backend for GPUs, of one process group, and its ``Faults``."""

    name: ClassVar[str] = "torch"
    has_groups: ClassVar[bool] = True
    ends_waits: ClassVar[bool] = False
    compares_calls: ClassVar[bool] = True
    compares_subgroups: ClassVar[bool] = False  # a collective would connect the GPUs
    native_dtypes = C10dBackend.native_dtypes | {torch.float16, torch.bfloat16}
    creator = staticmethod(process_group)

    def __init__(self, bootstrap: Bootstrap) -> None:
        super().__init__(bootstrap)
        self.objects = TensorObjects(self, self.run)
        self.faults = self
        self.peer = bootstrap.peer
        self._owned_peer: Backend | None = None
        self._streams: dict[tuple[int, int | None], Streams] = {}  # of a GPU, for collectives, and for messages by peer
        self._failure: DistBackendError | None = None
        self._is_untold = False  # as of ``Communicators``
        self.batch = Batch(self._launch)

    @classmethod
    def connect(cls, bootstrap: Bootstrap) -> TorchBackend:
        """Open a store over MPI if there is none, choose the GPU, and make the backend; every rank calls."""
        owned = None
        if bootstrap.store is None:
            carrier = bootstrap.peer
            if carrier is None:
                carrier = owned = registry.connect("mpi", bootstrap)
            bootstrap = bootstrap._replace(store=rendezvous.serve_store(carrier, bootstrap.timeout))
        choose_device(bootstrap.comm)
        backend = cls(bootstrap._replace(store=PrefixStore("torch", bootstrap.store)))  # type: ignore[arg-type]
        backend._owned_peer = owned
        if bootstrap.device_id is not None and bootstrap.device_id.type == KIND:
            backend.connect_device(bootstrap.device_id)
        return backend

    def connect_device(self, device: torch.device) -> None:
        """Make the communicator on a GPU now."""
        if hasattr(self.inner, "eager_connect_single_device"):
            self.inner.eager_connect_single_device(device)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of later calls, for torch's own watchdog."""
        if hasattr(self.inner, "_set_default_timeout"):
            self.inner._set_default_timeout(timeout + OWN_WATCHDOG_LATER)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The GPU that is current."""
        return torch.device(KIND, GPUS.current_device())

    # -- collectives -----------------------------------------------------------------------------------

    def run(self, call: Call) -> None:
        """Queue one collective; the current stream waits for it, and for a barrier the host too."""
        if self.batch.is_open or call.row is BARRIER:
            work = self.start(call._replace(finish=None, result=None))
            if not self.batch.is_open:
                work.wait()
            return
        self._check_live()
        streams = self._side(self._device_of(call))
        self.record(call)
        with streams.on_device():
            self.carry_out(apart(call))
            streams.mark(streams.current())

    def start(self, call: Call) -> Work:
        """Queue one collective behind the work on the current stream."""
        made, is_barrier = call, call.row is BARRIER
        if is_barrier:
            token = torch.zeros(1, device=self.device)
            call = Call(ALL_REDUCE, token, token, reduction.SUM, finish=call.finish, result=call.shown())
        call = apart(call)
        streams = self._side(self._device_of(call))
        self.record(made)
        work = StreamWork(PendingCall(streams, streams.current(), (call,), call.nbytes), call.shown(), None, is_barrier)

        def queue(_: int) -> None:
            self.carry_out(call)

        return self._begin(Held(call.row.name, queue, call.finish, work, is_direct(call)))

    def _device_of(self, call: Call) -> torch.device:
        device = self.device if call.tensor is None else call.tensor.device
        check_device(self, call.row.name, device, call.send, call.recv)
        return device

    def _side(self, device: torch.device, peer: int | None = None) -> Streams:
        """Return the side stream of collectives, or of messages with one rank, which do not wait for other ranks'."""
        key = (device.index, peer)
        streams = self._streams.get(key)
        if streams is None:
            streams = self._streams[key] = Streams(device, self.interrupt, GPUS)
        return streams

    def _begin(self, call: Held) -> Work:
        self._check_live()
        return self.batch.begin(call)

    def _reduce(self, call: Call) -> None:
        row, send, recv, op, root, *_ = call
        if row in (REDUCE, REDUCE_SCATTER_SINGLE) and self._is_native(send.dtype, op) and send.numel():
            if row is REDUCE:
                target = send.clone() if recv is not send else send  # torch's writes on all ranks
                options = self._options(c10d.ReduceOptions, reduceOp=op, rootRank=root, rootTensor=0)
                self.inner.reduce([target], options).wait()
                if recv is not None and recv is not target:
                    recv.copy_(target)
                return
            options = self._options(c10d.ReduceScatterOptions, reduceOp=op)
            self.inner._reduce_scatter_base(recv.view(-1), send.view(-1), options).wait()
            return
        super()._reduce(call)

    def _move(self, call: Call) -> None:
        row, send, recv, *_ = call
        if row is ALL_GATHER_SINGLE and send.numel():
            options = self._options(private_names.all_gather_options)
            self.inner._allgather_base(as_bytes(recv), as_bytes(send), options).wait()
        elif call.nbytes or row in EXCHANGES:  # of those one rank's part may be empty, and another's not
            super()._move(call)

    # -- messages --------------------------------------------------------------------------------------

    def isend(self, tensor: torch.Tensor, dst: int, tag: int, finish: Callable[[], None] | None = None) -> Work:
        """Queue a send; on CUDA and ROCm messages match in order, whatever their tags."""
        data = [as_bytes(tensor)]
        return self._message(lambda: self.inner.send(data, dst, tag), tensor, dst, None, finish, [])

    def irecv(self, tensor: torch.Tensor, src: int | None, tag: int, finish: Callable[[], None] | None) -> Work:
        """Queue a receive."""
        source = named(src)
        data = [as_bytes(tensor)]
        return self._message(lambda: self.inner.recv(data, source, tag), tensor, source, source, finish, [tensor])

    def _message(
        self,
        begin: Callable[[], Any],
        tensor: torch.Tensor,
        peer: int,
        source: int | None,
        finish: Callable[[], None] | None,
        result: list[torch.Tensor],
    ) -> Work:
        if peer == self.rank and not self.batch.is_open:
            raise DistBackendError(ALONE)
        streams = self._side(tensor.device, None if self.batch.is_open else peer)
        work = StreamWork(PendingCall(streams, streams.current(), (tensor, finish), tensor.nbytes), result, source)

        def queue(_: int) -> None:
            if tensor.numel():
                begun = begin()
                if begun is not None:  # launched together, it has no Work of its own
                    begun.wait()

        return self._begin(Held("message", queue, finish, work))

    # -- launched together -----------------------------------------------------------------------------

    def _launch(self, streams: Streams, calls: list[Held], is_group: bool) -> None:
        """Launch the calls that are one call of torch's together, and the others behind them."""
        with streams.on_side():
            if is_group:
                self.inner._start_coalescing()
            try:
                for each in calls:
                    if each.is_single:
                        each.queue(0)
            finally:
                together = self.inner._end_coalescing() if is_group else None
            if together is not None:
                together.wait()
            for each in calls:
                if not each.is_single:
                    each.queue(0)

    # -- supervision and the end -----------------------------------------------------------------------

    def _check_live(self) -> None:
        if self._failure is not None:
            self._is_untold = False
            raise self._failure

    def pending(self) -> list[Work]:
        """Return the asynchronous calls that the device has not ended."""
        return [work for streams in list(self._streams.values()) for work in streams.pending()]

    def call_log(self) -> CallLog | None:
        """Return the log of this rank's calls, unless a graph has captured some, which it repeats unseen."""
        return None if any(each.is_in_graph for each in list(self._streams.values())) else self.calls

    def outstanding(self) -> Work | None:
        """Return the first asynchronous call that the device has not ended."""
        return oldest(list(self._streams.values()))

    def interrupt(self, reason: str, thread: int | None = None) -> bool:
        """Abort the communicators, and end the calls under way with an error."""
        if self.inner is None or not hasattr(self.inner, "abort"):
            return False
        if self._failure is None:  # a later reason is not another error
            self._is_untold, self._failure = thread is not None, DistBackendError(reason)
        for streams in list(self._streams.values()):  # a copy: another thread may add some meanwhile
            streams.failure = self._failure
        self.inner.abort()
        for streams in list(self._streams.values()):
            streams.fail_all(self._failure)
        return True

    def abort(self, reason: str) -> None:
        """Abort the communicators, without the other ranks."""
        self.interrupt(reason)
        self._is_untold = False
        with suppress(RuntimeError):
            super().abort(reason)

    def close(self) -> None:
        """Wait for this rank's calls, and end the communicators and the store; raise an error that nobody has got."""
        if self.inner is not None and self._failure is None:
            for streams in self._streams.values():
                streams.settle("destroy_process_group")
            in_graphs = [streams for streams in self._streams.values() if streams.is_in_graph]
            if in_graphs and hasattr(self.inner, "shutdown"):
                end_apart(in_graphs[0], self.inner.shutdown, GRAPH_SECONDS)
                self.inner = None
        is_told = any(streams.is_told for streams in self._streams.values())
        if self._failure is not None or self.call_log() is None:
            self.calls = None  # not compared any more
        self._streams.clear()
        owned, self._owned_peer = self._owned_peer, None
        end_all((super().close, *([] if owned is None else [owned.close])))
        if self._is_untold and not is_told:
            self._check_live()


# the rows that are one call of torch's, and so may be launched together with others
DIRECT = (ALL_GATHER_SINGLE, REDUCE_SCATTER_SINGLE, ALL_REDUCE)


def apart(call: Call) -> Call:
    """Return a call whose input shares no memory with its output, unless they are one tensor."""
    send, recv = call.send, call.recv
    if send is recv or send is None or recv is None or not overlap(send, recv):
        return call
    return call._replace(send=send.clone())


def is_direct(call: Call) -> bool:
    """Tell whether a collective is one call of torch's, without a step behind it."""
    row, send, recv, op, *_ = call
    if row not in DIRECT or send is None or recv is None or not send.numel():
        return False
    if row is ALL_REDUCE:
        return recv is send and TorchBackend._is_native(send.dtype, op)
    return not row.reduces or TorchBackend._is_native(send.dtype, op)
