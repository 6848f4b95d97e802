"""Messages to neighbours: exchange with some ranks, and ghost cells of arrays that are divided among ranks.

Only ranks that have messages for each other call together, so that they cannot make a communicator for it: messages
have a tag that users cannot give. Strided tensors are copied before they are sent and after they are received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from operator import index, lt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.beyond.gradients import WithGradient
from hpcdist.c10d.device_mesh import DeviceMesh
from hpcdist.core import world
from hpcdist.core.backend import Message
from hpcdist.core.buffers import (
    COPY_KEPT,
    LOWEST_PLACE,
    PLAIN_TYPES,
    as_tensor,
    check_memory,
    copy_into,
    for_writing,
    is_plain,
    on_memory,
)
from hpcdist.core.errors import MismatchError
from hpcdist.core.group import Group
from hpcdist.core.point_to_point import begin, between, check_message, check_one_dense
from hpcdist.core.ranks import as_int
from hpcdist.core.work import AllWork, Work

# a dimension and its layers: ghost and outermost cells of the lower end, outermost and ghost cells of the upper end
Ends = tuple[int, Tensor, Tensor, Tensor, Tensor]
Step = Callable[[], object]  # a part of the exchange of one dimension: the messages, or a copy before or after them
Write = Callable[[Tensor, Tensor], Step]  # returns a function that writes the second tensor's values to the first one
ARRAYS_KEPT = 2
contiguous_like = partial(torch.empty_like, memory_format=torch.contiguous_format)


def make_copy(target: Tensor, source: Tensor) -> Step:
    """Return a function that copies a tensor to another of its shape and dtype: NumPy takes a third of torch's time."""
    if target.is_cpu and not (source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg()):
        with suppress(TypeError):  # a dtype that NumPy lacks
            return partial(np.copyto, target.numpy(), source.numpy())
    return partial(copy_into, source, target)


def make_add(target: Tensor, source: Tensor) -> Step:
    """Return a function that adds a tensor to another one."""
    return partial(target.add_, source)


def exchange(
    sends: Mapping[int, Any], recvs: Mapping[int, Any], group: Any = None, async_op: bool = False
) -> Work | None:
    """Send a tensor to some ranks and receive one from some; the order cannot cause a deadlock.

    Args:
        sends: the tensor for each receiver, by global rank; this rank is allowed. Two ranks must give each other as
            many ``sends`` as ``recvs``. Tensors may be strided, empty, of different dtypes, or NumPy arrays.
        recvs: the output for each sender, by global rank; at least as large as the message.
        group, async_op: as for ``all_reduce``, and so is the return value.

    Raises:
        TypeError: not a mapping from ranks to dense tensors; before anything is sent.
        ValueError: a rank outside the group; before anything is sent.
        RuntimeError: a message does not fit.
    """
    if (pg := world.member_group(group, "exchange")) is None:
        return None
    outgoing, are_plain = messages(pg, sends, "sends")
    incoming, are_plain_too = messages(pg, recvs, "recvs", writable=True)
    if async_op:
        return AllWork(begin(pg, outgoing, incoming), [tensor for tensor, _ in incoming])
    between(pg, outgoing, incoming, are_plain and are_plain_too)()
    return None


def messages(pg: Group, given: Any, name: str, writable: bool = False) -> tuple[list[Message], bool]:
    """Return a caller's messages, checked, and whether all are plain tensors on the CPU."""
    if given.__class__ is not dict and not isinstance(given, Mapping):
        raise TypeError(f"`{name}` is of type {type(given).__name__}; expected a mapping from ranks to tensors")
    found: list[Message] = []
    are_plain = True
    for rank, tensor in given.items():
        if rank.__class__ is not int or (peer := pg.group_ranks.get(rank)) is None:
            peer = world.group_rank(pg, rank, None)
        if tensor.__class__ is np.ndarray:
            tensor = on_memory(tensor)
        if not (is_plain(tensor) and tensor.is_cpu):
            tensor, are_plain = check_message(pg, tensor, f"{name}[{rank}]", writable, writable), False
        elif tensor.data_ptr() < LOWEST_PLACE:
            check_memory(tensor)
        found.append((tensor, peer))
    return found, are_plain


def integers(name: str, given: Any) -> tuple[int, ...]:
    """Return a parameter of a ``HaloExchange`` as a tuple of ints, or raise TypeError."""
    values = tuple(given) if isinstance(given, Iterable) else (None,)
    if not all(hasattr(each, "__index__") for each in values):
        raise TypeError(f"HaloExchange: {name} is {given!r}; expected integers")
    return tuple(map(index, values))


class HaloExchange:
    """Ghost cells of arrays that are divided among a mesh of ranks, filled with the neighbours' outermost cells.

    The last dimensions of an array are divided by the dimensions of the mesh; others before them, such as batch and
    channels, are whole on every rank. One dimension is exchanged after the other, with the ghost cells of the previous
    ones, so that corners are filled too, with two messages for each dimension. A dimension of one rank is not divided;
    if it is periodic the rank is its own neighbour.

    Args:
        dims: the number of ranks in each dimension, in row-major order, as for MPI_Cart_create (MPI 8.5.1) and
            ``init_device_mesh``; or a DeviceMesh.
        width: the number of layers of ghost cells at each end, one number or one for each dimension; 0 for none.
        periodic: whether the last rank of a dimension and the first are neighbours, one bool or one for each dimension.
        group: the group of the mesh; None for the default one, or for the ranks of a DeviceMesh.

    Attributes:
        dims, width, periodic: as given, for each dimension.
        coordinates: this rank's position in the mesh.

    Raises:
        TypeError: values that are not integers.
        ValueError: numbers that contradict each other or the group, or a rank that is not in the mesh.
    """

    def __init__(
        self,
        dims: Sequence[int] | DeviceMesh,
        width: int | Sequence[int] = 1,
        periodic: bool | Sequence[bool] = False,
        group: Any = None,
    ) -> None:
        pg = self._group = world.resolve(group)
        if isinstance(dims, DeviceMesh):
            self._grid = dims.mesh.cpu().clone().apply_(lambda rank: world.group_rank(pg, rank, None))
        else:
            sizes = integers("dims", dims)
            if min(sizes, default=0) < 1 or prod(sizes) != pg.size():
                raise MismatchError(
                    f"HaloExchange: dims {list(sizes)} are {prod(sizes)} ranks; expected dimensions of 1 or more whose "
                    f"product is the group's {pg.size()} ranks"
                )
            self._grid = torch.arange(pg.size(), device="cpu").view(sizes)
        self.dims: tuple[int, ...] = tuple(self._grid.shape)
        self.width = integers("width", self._each("width", width))
        self.periodic = tuple(map(bool, integers("periodic", self._each("periodic", periodic))))
        if min(self.width) < 0:
            raise MismatchError(f"HaloExchange: width is {self.width}; expected 0 or more")
        place = (self._grid == pg.rank()).nonzero().tolist()
        if not place:
            raise MismatchError(f"HaloExchange: rank {pg.rank()} of the group is not in the mesh {self._grid.tolist()}")
        self.coordinates: tuple[int, ...] = tuple(place[0])
        self._neighbours = [self._beside(dim) for dim in range(len(self.dims))]
        self._known: dict[tuple[Any, ...], list[Step]] = {}  # the last arrays, and the functions that fill them
        # a small padded array, its inner cells and the function that fills it: the next ones are like these
        self._kept: tuple[Any, ...] = (None, None)

    def _each(self, name: str, given: Any) -> tuple[Any, ...]:
        values = tuple(given) if isinstance(given, Sequence) else (given,) * len(self.dims)
        if len(values) != len(self.dims):
            raise MismatchError(
                f"HaloExchange: {name} is {given}; expected one value or {len(self.dims)}, one a dimension"
            )
        return values

    def _beside(self, dim: int) -> tuple[int | None, int | None]:
        """Return the neighbours in one dimension, as ranks of the group."""
        found: list[int | None] = []
        for step in (-1, 1):
            place = list(self.coordinates)
            place[dim] += step
            if self.periodic[dim]:
                place[dim] %= self.dims[dim]
            found.append(int(self._grid[tuple(place)]) if 0 <= place[dim] < self.dims[dim] else None)
        return found[0], found[1]

    def neighbours(self, dim: int) -> tuple[int | None, int | None]:
        """Return the global ranks before and after this one in a dimension of the mesh, None beyond an end."""
        if not -len(self.dims) <= (dim := as_int(dim, "dim")) < len(self.dims):
            raise MismatchError(f"HaloExchange: the mesh of {self.dims} ranks has no dimension {dim}")
        before, after = (None if rank is None else self._group.ranks[rank] for rank in self._neighbours[dim])
        return before, after

    def __call__(self, tensor: Any) -> Any:
        """Fill the ghost cells of an array in place; its neighbours in the mesh call too.

        Args:
            tensor: this rank's cells with ghost cells around them, of any dtype and layout, or a NumPy array.
                Neighbours have the same size in all dimensions except the one in which they are neighbours. Ghost cells
                at an end of the mesh that is not periodic do not change.

        Returns:
            ``tensor``. The object keeps its memory alive until two others were given, which saves 10 µs in a loop with
            one array, or two in turn.

        Raises:
            TypeError: not a dense tensor.
            ValueError: fewer dimensions than the mesh, or fewer cells than a neighbour needs.
            RuntimeError: a neighbour's size differs; on at least one of the two.
        """
        whole = check_one_dense(as_tensor(tensor, "tensor", writable=True, is_viewed=True))
        seen = whole.data_ptr(), whole.shape, whole.stride(), whole.dtype, whole.is_conj(), whole.is_neg()
        if (steps := self._known.get(seen)) is None:
            self._check(whole, 3)
            steps = self._filling(whole)
            if len(self._known) == ARRAYS_KEPT:
                del self._known[next(iter(self._known))]
            self._known[seen] = steps  # the steps keep the memory, so that their descriptions of it are still valid
        else:
            self._group.backend(whole.device)  # raises if the group has ended, also on a rank without neighbours
        for step in steps:
            step()
        return tensor

    def pad(self, tensor: Any) -> Any:
        """Return a copy of an array with ghost cells around it; its neighbours in the mesh call too.

        The result can be differentiated, once: backward adds the gradient of a ghost cell to that of the original cell,
        on the rank that owns it. So all ranks call backward, and either all give tensors that require grad, or none.

        Args:
            tensor: this rank's cells, of any dtype and layout, or a NumPy array.

        Returns:
            A contiguous tensor, larger by ``2 * width`` in each dimension of the mesh; zeros at an end of the mesh that
            is not periodic.

        Raises:
            TypeError, ValueError, RuntimeError: as for a call of this object.
        """
        given = check_one_dense(as_tensor(tensor, "tensor"))
        self._check(given, 1)
        if isinstance(tensor, np.ndarray):
            return self._padded(given).numpy()
        if given is tensor:  # no gradient to record
            return self._padded(given)
        return WithGradient.apply(tensor, self._padded, self._unpadded)

    def _check(self, tensor: Tensor, layers: int) -> None:
        """Raise if the group has no backend for a tensor, or it has fewer cells than ``layers`` times the width."""
        self._group.backend(tensor.device)
        sizes = tensor.shape[-len(self.dims) :]
        needed = [layers * width for width in self.width]
        if len(sizes) < len(self.dims) or any(map(lt, sizes, needed)):
            raise MismatchError(
                f"HaloExchange: a tensor of shape {tuple(tensor.shape)}; expected last dimensions of {tuple(needed)} "
                f"cells or more: as many as the {self.width} ghost cells that neighbours copy"
                + (", and ghost cells at either end" if layers == 3 else "")
            )

    def _inner(self, whole: Tensor) -> Tensor:
        """Return the cells without the ghost cells."""
        for at, width in enumerate(self.width, -len(self.dims)):
            if width:
                whole = whole.narrow(at, width, whole.size(at) - 2 * width)
        return whole

    def _padded(self, tensor: Tensor) -> Tensor:
        looks = tensor.shape, tensor.dtype, tensor.device
        if looks == self._kept[0]:
            _, whole, inner, steps = self._kept
        else:
            shape = list(tensor.shape)
            for at, width in enumerate(self.width, -len(self.dims)):
                shape[at] += 2 * width
            with torch.inference_mode(False):  # it may be written in both modes
                whole = tensor.new_empty(shape)
                for at, width in enumerate(self.width, -len(self.dims)):
                    if width:
                        whole.narrow(at, 0, width).zero_()
                        whole.narrow(at, -width, width).zero_()
                inner = self._inner(whole)
                is_kept = whole.nbytes <= COPY_KEPT and whole.is_cpu and tensor.__class__ in PLAIN_TYPES
                steps = self._filling(whole)
            if is_kept:
                self._kept = looks, whole, inner, steps
        inner.copy_(tensor)
        for step in steps:
            step()
        return whole.clone() if whole is self._kept[1] else whole

    def _unpadded(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the cells, with that of the ghost cells which are their copies added."""
        whole = gradient.clone(memory_format=torch.contiguous_format)
        for dim, low, first, last, high in reversed(self._ends(whole)):
            for step in self._swap(dim, (low, high), (first, last), make_add):
                step()
        return self._inner(whole)

    def _filling(self, whole: Tensor) -> list[Step]:
        """Return the steps that copy outermost cells to the neighbours' ghost cells, dimension after dimension."""
        steps: list[Step] = []
        for dim, low, first, last, high in self._ends(whole):
            steps += self._swap(dim, (first, last), (low, high), make_copy)
        return steps

    def _ends(self, whole: Tensor) -> list[Ends]:
        """Return the dimensions in which this rank has neighbours, and the layers of cells that they exchange."""
        found = []
        for dim, (width, neighbours) in enumerate(zip(self.width, self._neighbours, strict=True)):
            if width and neighbours != (None, None):
                at = dim - len(self.dims)
                end = whole.size(at) - width
                low, first, last, high = (whole.narrow(at, start, width) for start in (0, width, end - width, end))
                found.append((dim, low, first, last, high))
        return found

    def _swap(self, dim: int, given: Sequence[Tensor], targets: Sequence[Tensor], write: Write) -> list[Step]:
        """Return the steps that send layers to the previous and next neighbour, and write those that they send."""
        before, after = self._neighbours[dim]
        if before == after == self._group.rank():
            return [write(targets[1], given[0]), write(targets[0], given[1])]
        # if both neighbours are one rank, its first message, its lower end, belongs to the upper end here
        ends = [(peer, target) for peer, target in ((after, targets[1]), (before, targets[0])) if peer is not None]
        buffer_for = contiguous_like if write is make_add else for_writing  # the target itself, if possible
        received = [(buffer_for(target), peer, target) for peer, target in ends]
        sent = [
            (for_writing(layer), peer, layer)
            for layer, peer in zip(given, (before, after), strict=True)
            if peer is not None
        ]
        sends, recvs = ([(buffer, peer) for buffer, peer, _ in ends] for ends in (sent, received))
        are_plain = all(buffer.__class__ in PLAIN_TYPES and buffer.is_cpu for buffer, _ in (*sends, *recvs))
        exchange = between(self._group, sends, recvs, are_plain)
        first = [make_copy(buffer, layer) for buffer, _, layer in sent if buffer is not layer]
        last = [write(target, buffer) for buffer, _, target in received if buffer is not target]
        return [*first, exchange, *last]
