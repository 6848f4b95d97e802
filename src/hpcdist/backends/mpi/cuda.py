"""Tensors of GPUs over MPI, for groups without NCCL: CUDA's, ROCm's and Intel's.

A GPU-aware MPI takes device memory directly, after the kernels that write it have ended. The library is asked at run
time, and then tested, because it may be built for CUDA and run without its transport. Any other MPI would read a device
address as a host's and crash, so there the tensor is copied through pinned host memory, with one warning. This is a
fact of one process, so it decides only about copies: a call that goes through node-shared memory on other ranks uses
host memory here too.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.datatypes import memory
from hpcdist.backends.mpi.process.libraries import loaded_libraries
from hpcdist.backends.mpi.process.runtime import short_name
from hpcdist.core.backend import Backend
from hpcdist.core.buffers import copy_into, overlap
from hpcdist.core.call import Call
from hpcdist.core.queue import Queue, in_modes_of_caller
from hpcdist.core.table import Row
from hpcdist.core.work import Work

WARNING = (
    "{memory} tensors of this group travel through host memory: the MPI library is not {memory}-aware ({library}). "
    "{advice}"
)
PROBE_BYTES = (64, 1 << 20)  # bytes below and above every library's limit of eager messages


class Memory(NamedTuple):
    """The memory of a vendor's GPUs, and the ways to ask an MPI library whether it is aware of it."""

    title: str  # its name for users
    kind: str  # its name in MPI 4.1's ``mpi_memory_alloc_kinds`` (MPI 11.4.3)
    functions: tuple[str, ...]  # functions of Open MPI, MPICH and MVAPICH that tell
    number: int  # ``MPIX_GPU_SUPPORT_...`` of MPICH and Intel MPI
    device: str  # torch's device type
    advice: str  # the backend that is faster than copies through the host


CUDA = Memory(
    "CUDA",
    "cuda",
    ("MPIX_Query_cuda_support",),
    0,
    "cuda",
    "NCCL is faster: pip install 'hpcdist[nccl-cu12]' or 'hpcdist[nccl-cu13]' and use backend='cpu:mpi,cuda:nccl'",
)
ROCM = Memory(
    "ROCm",
    "rocm",
    ("MPIX_Query_rocm_support", "MPIX_Query_hip_support"),
    2,
    "cuda",
    "RCCL is faster: use backend='cpu:mpi,cuda:nccl'",
)
LEVEL_ZERO = Memory(
    "XPU", "level_zero", ("MPIX_Query_ze_support",), 1, "xpu", "XCCL is faster: use backend='cpu:mpi,xpu:xccl'"
)
OWN = LEVEL_ZERO if getattr(torch.version, "xpu", None) else ROCM if torch.version.hip else CUDA  # this torch's
CRAYS = "MPICH_GPU_SUPPORT_ENABLED"  # 1: Cray MPICH is aware of the GPUs for which it is linked


def answers(library: ctypes.CDLL, memory: Memory) -> list[bool]:
    """Return a library's answers about a memory, by extension."""
    found = [bool(getattr(library, name)()) for name in memory.functions if hasattr(library, name)]
    if hasattr(library, "MPIX_GPU_query_support"):
        supported = ctypes.c_int(0)
        library.MPIX_GPU_query_support(memory.number, ctypes.byref(supported))
        found.append(bool(supported.value))
    return found


def kinds_of_memory() -> list[str]:
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    return [each.partition(":")[0] for each in kinds.split(",")]


def says_aware(memory: Memory = OWN) -> bool:
    """Tell whether the MPI library claims to be aware of a memory."""
    if memory.kind in kinds_of_memory():
        return True
    if os.environ.get(CRAYS) == "1" and "CRAY MPICH" in MPI.Get_library_version().upper():
        return True
    return any(True in answers(ctypes.CDLL(path), memory) for path in loaded_libraries())


def passes_probe() -> bool:
    """Tell whether a GPU's tensor that this rank sends to itself arrives."""
    for nbytes in PROBE_BYTES:
        sent = torch.arange(nbytes, device=OWN.device).to(torch.uint8)
        received = torch.zeros_like(sent)
        getattr(torch, OWN.device).current_stream().synchronize()
        try:
            MPI.COMM_SELF.Sendrecv([memory(sent), MPI.BYTE], 0, 0, [memory(received), MPI.BYTE], 0, 0)
        except MPI.Exception:
            return False
        if not bool((sent == received).all()):
            return False
    return True


@cache
def is_aware() -> bool:
    """Tell whether this MPI is aware of device memory; if not, warn once."""
    aware = says_aware() and passes_probe()
    if not aware:
        text = WARNING.format(memory=OWN.title, library=short_name(MPI), advice=OWN.advice)
        warnings.warn(text, stacklevel=2)
    return aware


class StagedBackend(Backend):
    """The backend of GPU tensors over MPI.

    ``is_shared`` tells whether ``inner``, the group's MPI backend, runs a row, dtype and op of a size through
    node-shared memory. The streams are those of ``cuda``: ``torch.cuda`` or ``torch.xpu``.
    """

    name: ClassVar[str] = "mpi"
    has_lists: ClassVar[bool] = True
    connect: Any = None  # the MPI backend makes the groups, for all of a group's devices
    split: Any = None
    create_group: Any = None

    def __init__(self, inner: Backend, is_shared: Callable[[Row, torch.dtype, Any, int], bool], cuda: Any = torch.cuda):
        self.inner, self._is_shared, self._cuda = inner, is_shared, cuda
        self.rank, self.size, self.has_threads = inner.rank, inner.size, inner.has_threads
        self.objects, self.unfinished, self.faults = inner.objects, inner.unfinished, inner.faults
        self._sides: dict[torch.device, Any] = {}  # the worker thread's stream on each device

    @property
    def queue(self) -> Queue | None:  # type: ignore[override]
        """The queue of the communicator, with the calls on both devices in one order."""
        return self.inner.queue

    # -- copies ----------------------------------------------------------------------------------------

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return pinned memory like a tensor; this starts a context on the current device."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's values on the host, after the work on the current stream of its device."""
        with self._cuda.device(tensor.device):
            host = self._on_host(tensor)
            host.copy_(tensor, non_blocking=True)
            self._cuda.current_stream(tensor.device).synchronize()
        return host

    def _to_device(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy values to the device; then any stream may read them."""
        with self._cuda.device(tensor.device):
            copy_into(host, tensor)
            self._cuda.current_stream(tensor.device).synchronize()

    def _goes_directly(self, call: Call) -> bool:
        """Tell whether MPI may use the device memory.

        Not for reductions: the steps around them (``reductions``) would be kernels between MPI's calls. Nor for buffers
        that share memory, of which ``MPIBackend`` makes a copy without waiting for it.
        """
        row, send, recv, op, *_ = call
        if row.reduces or not is_aware() or (send is not None and self._is_shared(row, send.dtype, op, call.nbytes)):
            return False
        return send is None or recv is None or send is recv or not overlap(send, recv)

    # -- calls -----------------------------------------------------------------------------------------

    def check_reduction(self, row: Row, dtype: torch.dtype, op: Any) -> None:
        self.inner.check_reduction(row, dtype, op)

    def run(self, call: Call) -> None:
        """Run one collective on device memory or on copies of it; the result is complete when it returns."""
        _, send, recv, *_ = call
        given = call.tensor
        if given is None:
            self.inner.run(call)
            return
        if self._goes_directly(call):
            self._cuda.current_stream(given.device).synchronize()
            self.inner.run(call)
            return
        sent = self._to_host(send) if send is not None else None
        with self._cuda.device(given.device):
            received = sent if recv is send else self._on_host(recv) if recv is not None else None
        self.inner.run(call._replace(send=sent, recv=received))
        if recv is not None and received is not None:
            self._to_device(received, recv)

    def start(self, call: Call) -> Work:
        """Queue one collective on the communicator's worker; its Work waits on the host."""
        given = call.tensor
        if given is None:
            return self.inner.start(call)
        side = self._sides.get(given.device)
        if side is None:
            side = self._sides[given.device] = self._cuda.Stream(given.device)
        before = self._cuda.Event()
        before.record(self._cuda.current_stream(given.device))

        def carry_out() -> None:
            # the thread has chosen no device: the end of ``stream`` alone would switch to GPU 0 and start a context
            # there
            with self._cuda.device(given.device), self._cuda.stream(side):
                side.wait_event(before)
                self.run(call)
                if call.finish is not None:
                    call.finish()
                side.synchronize()

        return self.inner.open_queue().put(in_modes_of_caller(carry_out), call.shown(), is_large=True)

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        self.inner.send(self._readable(tensor), dst, tag)

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> int:
        target = self._readable(tensor)  # a shorter message does not write all values
        source = self.inner.recv(target, src, tag)
        if target is not tensor:
            self._to_device(target, tensor)
        return source

    def isend(self, tensor: torch.Tensor, dst: int, tag: int, finish: Callable[[], None] | None = None) -> Work:
        return self.inner.isend(self._readable(tensor), dst, tag, finish)

    def irecv(self, tensor: torch.Tensor, src: int | None, tag: int, finish: Callable[[], None] | None) -> Work:
        """Begin to receive; the Work copies to the device when the message has arrived."""
        target = self._readable(tensor)

        def arrived() -> None:
            if target is not tensor:
                self._to_device(target, tensor)
            if finish is not None:
                finish()
                # ``tensor``, dropped after this, may have been allocated on another stream
                self._cuda.current_stream(tensor.device).synchronize()

        return self.inner.irecv(target, src, tag, arrived)

    def _readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's values in memory that MPI can use: its own, or a copy on the host."""
        if not is_aware():
            return self._to_host(tensor)
        self._cuda.current_stream(tensor.device).synchronize()
        return tensor
