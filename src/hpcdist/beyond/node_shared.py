"""Node-shared tensors: one copy for each node, in memory that all ranks of the node read and write.

The memory is a file of /dev/shm (``core.memory_file``) and not a window of MPI's: all ranks of the node must call
MPI_Win_free, so that neither one rank that drops its tensor nor Python's garbage collector could free a window, and a
tensor used after it would crash. Each rank unmaps a file's memory by itself, and it works without MPI.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, overload

import torch

from hpcdist.core import memory_file, world
from hpcdist.core.agreement import attempt
from hpcdist.core.backend import Backend
from hpcdist.core.buffers import as_tensor, check_dtype, check_memory
from hpcdist.core.errors import DistBackendError, MismatchError
from hpcdist.core.group import Group
from hpcdist.core.ranks import as_int
from hpcdist.launch import environment
from hpcdist.torch_bridge import private_names


class Request(NamedTuple):
    """The arguments of one rank."""

    node: tuple[str, int]  # the same for ranks that can open each other's files
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the file; an empty file could not be mapped."""
        return max(1, math.prod(self.shape) * self.dtype.itemsize)


@overload
def node_shared(
    shape: int | Sequence[int], dtype: torch.dtype = ..., group: None = None, fill: Any = None
) -> torch.Tensor: ...
@overload
def node_shared(
    shape: int | Sequence[int], dtype: torch.dtype = ..., group: Group | None = None, fill: Any = None
) -> torch.Tensor | None: ...
def node_shared(
    shape: int | Sequence[int], dtype: torch.dtype = torch.float32, group: Group | None = None, fill: Any = None
) -> torch.Tensor | None:
    """Make a tensor with one copy on each node, which all ranks of the group there read and write.

    Every rank of the group calls this, with the same shape and dtype. When it returns, one rank of each node has filled
    the node's copy. Later writes are visible to the node's ranks after a ``barrier`` that they all call between the
    write and the read. There is no other synchronization, and the copies of different nodes are independent.

    It is an ordinary CPU tensor: each rank unmaps its memory when the rank's last tensor or view on it ends, and it may
    be used after ``destroy_process_group``. Forked processes have it, and ``torch.multiprocessing`` (a DataLoader's
    workers) passes it to spawned ones without a copy.

    Args:
        shape: of the tensor, the same on all ranks; a number for one dimension.
        dtype: any of torch's, the same on all ranks.
        group: the group; None for the default one.
        fill: the values, which the lowest rank of each node writes: a number; a tensor or array of this shape; or a
            function that is called there with the tensor and writes it. Other ranks' values are not used. None for
            zeros.

    Returns:
        The tensor; None on ranks outside the group.

    Raises:
        DistBackendError: a node has no /dev/shm or too little room there, or ``fill`` failed; on all ranks the same.
        TypeError, ValueError: an invalid shape, dtype or ``fill``; on all ranks the same.
        MismatchError: ranks ask for different shapes or dtypes; it is a ValueError.
    """
    if (pg := world.member_group(group, "node_shared")) is None:
        return None
    with pg.during("node_shared"):
        backend = pg.any_backend()
        requests = attempt(backend, "node_shared", lambda: request(shape, dtype))
        mine = requests[pg.rank()]
        for rank, other in enumerate(requests):
            if other[1:] != requests[0][1:]:
                raise MismatchError(
                    f"node_shared: ranks ask for different tensors: rank 0 of the group for {requests[0].dtype} of "
                    f"shape {requests[0].shape}, rank {rank} for {other.dtype} of shape {other.shape}"
                )
        first = next(rank for rank, other in enumerate(requests) if other.node == mine.node)
        return share(backend, mine, first, fill)


def request(shape: Any, dtype: Any) -> Request:
    """Check one rank's arguments, and that its node has room."""
    check_dtype(dtype)
    is_listed = isinstance(shape, Iterable) and not isinstance(shape, str | bytes) and getattr(shape, "ndim", 1) > 0
    sizes = tuple(as_int(each, "`shape`") for each in (shape if is_listed else [shape]))
    if min(sizes, default=0) < 0:
        raise ValueError(f"`shape` is {sizes}; expected no negative size")
    if (there := memory_file.free_bytes()) is None:
        raise DistBackendError(f"host {os.uname().nodename} has no {memory_file.FOLDER}")
    mine = Request((environment.node_key(), memory_file.device_id()), sizes, dtype)
    if there < mine.nbytes:
        raise DistBackendError(memory_file.no_room(os.uname().nodename, there, mine.nbytes))
    return mine


def share(backend: Backend, asked: Request, first: int, fill: Any) -> torch.Tensor:
    """Open one file on all ranks of each node; every rank of the group calls.

    The file has a name only while it is empty, so that a killed job leaves no memory behind. The ``first`` rank of the
    node makes the file and fills it.
    """
    is_first = backend.rank == first
    descriptor, name = -1, ""
    tensor = torch.empty(0, dtype=asked.dtype, device="cpu")

    def create() -> str:
        nonlocal descriptor, name
        if is_first:
            descriptor, name = memory_file.create(asked.nbytes)
        return name

    def open_and_map() -> None:
        nonlocal descriptor
        if not is_first:
            try:
                descriptor = memory_file.open_by_name(names[first])
            except FileNotFoundError as error:
                raise DistBackendError(
                    f"ranks {first} and {backend.rank} of the group are both on host {asked.node[0]!r} by name, but do "
                    f"not see the same {memory_file.FOLDER}; give {environment.NODE_KEY} another value on each"
                ) from error
        tensor.set_(private_names.storage_of(descriptor, asked.nbytes), 0, asked.shape)  # type: ignore[call-overload]

    def reserve_and_fill() -> None:
        if is_first:
            try:
                memory_file.reserve(descriptor, asked.nbytes)
            except OSError as error:
                text = memory_file.no_room(os.uname().nodename, memory_file.free_bytes(), asked.nbytes)
                raise DistBackendError(f"{text} ({error})") from error
            fill_copy(fill, tensor)

    try:
        names = attempt(backend, "node_shared", create)
        attempt(backend, "node_shared", open_and_map)
        memory_file.remove(name)
        attempt(backend, "node_shared", reserve_and_fill)
    finally:
        memory_file.remove(name)
        if descriptor >= 0:
            os.close(descriptor)  # the tensor has a mapping of its own
    return tensor


def fill_copy(fill: Any, tensor: torch.Tensor) -> None:
    """Write the user's ``fill`` to a node's copy, which holds zeros."""
    if fill is None:
        return
    if isinstance(fill, (int, float, complex)):
        tensor.fill_(fill)
    elif callable(fill):
        fill(tensor)
    else:
        values = as_tensor(fill, "fill")
        if values.shape != tensor.shape:
            raise MismatchError(f"`fill` has shape {tuple(values.shape)}; expected the tensor's, {tuple(tensor.shape)}")
        if values.layout is torch.strided and values.is_cpu:
            check_memory(values)
        tensor.copy_(values)
