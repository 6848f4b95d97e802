"""Buffers of a call: the memory that it reads and the memory that it writes.

Backends get flat, contiguous, dense tensors of one device. A caller may give a NumPy array, a strided view, a
lazily conjugated or negated tensor, or one that requires grad: then a contiguous copy takes its place, and the
result is copied back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_char
from functools import partial
from typing import Any

import numpy as np
import torch

from hpcdist.core.errors import LayoutError, MismatchError
from hpcdist.core.printing import format_value
from hpcdist.core.reduction import canonical, is_done_by_parts, name_of
from hpcdist.core.table import Row

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
REQUIRES_GRAD = operator.attrgetter("requires_grad")
from_numpy = torch.from_numpy
# only a heap may lie below; an address there may be an offset in a storage that was freed
LOWEST_PLACE = 1 << 32
COPY_KEPT, COPIES_KEPT = 1 << 16, 32  # the largest copy whose memory is kept, in bytes; how many of a kind
PLACES_KEPT = 128  # places in memory whose descriptions are kept
COMPLEX_TYPES = frozenset({torch.complex32, torch.complex64, torch.complex128})  # only these are lazily conjugated
# whose scale and zero point are not in their memory
QUANTIZED_TYPES = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})
SPECIAL_TYPES = COMPLEX_TYPES | QUANTIZED_TYPES
BITS = {size: np.dtype(f"u{size}" if size < 16 else "c16") for size in (1, 2, 4, 8, 16)}  # NumPy's dtypes, by bytes


class ArrayCopy(torch.Tensor):
    """A copy of an array with negative strides; ``copy_into`` writes to the array too.

    Attributes:
        original: the array.
    """

    original: np.ndarray
    __torch_function__ = torch.nn.Parameter.__torch_function__  # what is computed from it is a tensor


def is_plain(tensor: Any) -> bool:
    """Tell whether a tensor's own memory can be handed to a library as it is."""
    return (
        tensor.__class__ in PLAIN_TYPES
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_neg()
        and not tensor.is_nested
        and (tensor.dtype not in SPECIAL_TYPES or not (tensor.dtype in QUANTIZED_TYPES or tensor.is_conj()))
    )


class TensorList:
    """The contiguous CPU tensors of a list as one buffer of a call: in order, each where it lies in memory.

    The dtype is the one that they travel in (``same_dtype``), the sizes are in bytes.
    """

    __slots__ = ("addresses", "dtype", "nbytes", "sizes", "tensors")
    is_cpu = True
    device = torch.device("cpu")

    def __init__(self, tensors: list[torch.Tensor], dtype: torch.dtype) -> None:
        self.tensors, self.dtype = tensors, dtype
        self.sizes = [each.nbytes for each in tensors]
        self.nbytes = sum(self.sizes)
        self.locate()

    def locate(self) -> None:
        """Find where the tensors lie now; raise if one has no memory."""
        self.addresses = [each.data_ptr() for each in self.tensors]
        if 0 in self.sizes:  # an empty tensor has no address
            place = max(self.addresses)
            self.addresses = [each if size else place for each, size in zip(self.addresses, self.sizes, strict=True)]
        if min(self.addresses, default=LOWEST_PLACE) < LOWEST_PLACE:
            check_memory(*self.tensors)

    def without_memory(self) -> TensorList:
        """Return a list with the sizes of these tensors, which keeps none of them."""
        made = TensorList([], self.dtype)
        made.sizes, made.nbytes = self.sizes, self.nbytes
        return made

    def places(self) -> Iterable[tuple[int, int]]:
        """Return the address and the bytes of each tensor."""
        return zip(self.addresses, self.sizes, strict=True)

    def numel(self) -> int:
        """Return the number of elements of all."""
        return self.nbytes // self.dtype.itemsize

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return self.dtype.itemsize

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor that holds all."""
        return torch.Size((self.numel(),))


def as_list(values: Any, dtype: Any) -> TensorList | None:
    """Return a list as a buffer without a copy; None unless its tensors are plain, on the CPU and of the dtype."""
    if values.__class__ is not list or dtype in QUANTIZED_TYPES:
        return None
    is_complex = dtype in COMPLEX_TYPES
    for each in values:
        if (
            each.__class__ not in PLAIN_TYPES
            or each.dtype is not dtype
            or each.layout is not torch.strided
            or not each.is_contiguous()
            or each.requires_grad
            or not each.is_cpu
            or each.is_neg()
            or each.is_nested
            or (is_complex and each.is_conj())
        ):
            return None
    return TensorList(values.copy(), dtype)  # the caller may change the list before an asynchronous call has ended


def as_tensor(value: Any, name: str, writable: bool = False, is_viewed: bool = False) -> torch.Tensor:
    """Return a caller's tensor or array as a tensor on the same memory, outside autograd.

    An array with negative strides, which torch lacks, is copied; ``copy_into`` on the copy writes to the array too. It
    cannot be written to by views (``is_viewed``), nor at all if it is read-only: that is a ValueError, and any other
    value or dtype, or an array with a mask, a TypeError. The name is the parameter's, for the message.
    """
    if value.__class__ in PLAIN_TYPES and not value.requires_grad:
        return value
    if isinstance(value, torch.Tensor):
        # what is written to a detached sparse tensor does not reach the original: its number of nonzeros may change
        return value.detach() if value.layout is torch.strided and not isinstance(value, ArrayCopy) else value
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(
                f"parameter `{name}` is a numpy.ma.MaskedArray, whose mask would be ignored; expected an array without "
                "one, such as its `data`, or `filled()` with the op's neutral element"
            )
        if writable and not value.flags.writeable:
            raise ValueError(f"parameter `{name}` is a read-only numpy.ndarray, and this call writes to it")
        if value.flags.writeable:
            try:  # suppress takes 0.5 µs
                return torch.from_numpy(value)
            except ValueError:  # such as negative strides
                pass
        is_backward = min(value.strides, default=0) < 0 and not is_viewed
        tensor = torch.from_numpy(value.copy() if is_backward or not value.flags.writeable else value)
        if is_backward and writable:
            tensor = tensor.as_subclass(ArrayCopy)
            tensor.original = value
        return tensor  # TypeError names the dtypes that torch has
    raise TypeError(
        f"Invalid function argument. Expected parameter `{name}` of type torch.Tensor "
        f"(or numpy.ndarray) but got {type(value)} instead."
    )


def on_memory(values: Any) -> Any:
    """Return an array, or a list of arrays, as tensors on the same memory; as given if there is more to do.

    The rest is for ``as_tensor`` and ``as_tensors``: read-only arrays, negative strides, dtypes that torch lacks.
    """
    try:
        if values.__class__ is not list:
            return from_numpy(values) if values.flags.writeable else values
        made = []
        for each in values:
            if each.__class__ is not np.ndarray or not each.flags.writeable:
                return values
            made.append(from_numpy(each))
        return made
    except (TypeError, ValueError):
        return values


def has_arrays(values: Any) -> bool:
    """Tell whether a list begins with an array."""
    return values.__class__ is list and len(values) > 0 and values[0].__class__ is np.ndarray


def as_tensors(values: Any, name: str, writable: bool = False) -> list[torch.Tensor]:
    """Return a caller's list of tensors or arrays as tensors; TypeError if it is not such a list."""
    if not isinstance(values, (list, tuple)):
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type List[torch.Tensor] "
            f"but got {type(values)} instead."
        )
    if PLAIN_TYPES.issuperset(map(type, values)) and not any(map(REQUIRES_GRAD, values)):
        return [*values]
    wrong = {type(value).__name__ for value in values if not isinstance(value, (torch.Tensor, np.ndarray))}
    if wrong:
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type List[torch.Tensor] "
            f"but got {type(values)} with elements of type {sorted(wrong)}."
        )
    return [as_tensor(value, name, writable) for value in values]


def as_tensor_lists(lists: Any, name: str, writable: bool = False) -> list[list[torch.Tensor]]:
    """Return a caller's list of lists of tensors or arrays as tensors; TypeError if it is not such a list."""
    if not isinstance(lists, (list, tuple)):
        raise TypeError(f"Invalid function argument: {name} should be a list of lists of tensors, got {type(lists)}")
    return [as_tensors(each, name, writable) for each in lists]


def is_direct(tensor: torch.Tensor) -> bool:
    """Tell whether a call can read or write a dense tensor's own memory."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj() and not isinstance(tensor, ArrayCopy)


def for_reading(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with the same values."""
    if isinstance(tensor, ArrayCopy):
        return tensor.clone()
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_neg().resolve_conj()
    return tensor.contiguous()


def for_writing(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor that receives the values for ``tensor``: itself if possible."""
    if is_direct(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def new_memory(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return new CPU memory that may be written inside and outside of ``torch.inference_mode()``."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device="cpu")


CopyBack = Callable[[], object]


class Copies:
    """Contiguous copies of strided CPU tensors, each valid until the next one; memory of small ones is kept, by layout.

    NumPy copies in a tenth (one element) to half (64 KiB) of the time of torch's ``copy_``. Its views of the tensors'
    memory are kept, without the tensors: each is only used for another tensor of that place, shape and strides.
    """

    def __init__(self, dtype: torch.dtype, describe: Callable[[torch.Tensor], Any]) -> None:
        self._dtype, self._describe = dtype, describe
        # by shape and strides: the memory, its description, as an array, and how to view a tensor's memory
        self._memory: dict[Any, tuple[torch.Tensor, Any, Any, Callable[[int], Any]]] = {}
        self._kept: dict[Any, tuple[Callable[[], object], CopyBack, Any]] = {}

    def of(self, tensor: torch.Tensor) -> tuple[CopyBack, Any]:
        """Return a function that copies the copy back, and the copy, described for a library."""
        fill, copy_back, copy = self._find(tensor)
        fill()
        return copy_back, copy

    def like(self, tensor: torch.Tensor) -> tuple[CopyBack, Any]:
        """Return the same with memory for a copy, which is not filled."""
        _, copy_back, copy = self._find(tensor)
        return copy_back, copy

    def _find(self, tensor: torch.Tensor) -> tuple[Callable[[], object], CopyBack, Any]:
        key = (place := tensor.data_ptr()), tensor.shape, tensor.stride()
        if (found := self._kept.get(key)) is not None:
            return found
        if place < LOWEST_PLACE:
            check_memory(tensor)
        layout = key[1:]
        if (memory := self._memory.get(layout)) is None:
            made = new_memory(tensor.shape, self._dtype)
            memory = made, self._describe(made), viewer(made)(made.data_ptr()), viewer(tensor)
        made, copy, array, view = memory
        if made.nbytes > COPY_KEPT or tensor.is_conj() or tensor.is_neg():
            return partial(made.copy_, tensor), partial(tensor.copy_, made), copy
        if len(self._memory) >= COPIES_KEPT or len(self._kept) >= PLACES_KEPT:
            self._memory.clear()
            self._kept.clear()
        values = view(place)
        found = partial(array.__setitem__, ..., values), partial(values.__setitem__, ..., array), copy
        self._memory[layout], self._kept[key] = memory, found
        return found


def viewer(tensor: torch.Tensor) -> Callable[[int], Any]:
    """Return a function from the place of a CPU tensor like this one to an array of its bits, which does not keep it.

    ``Tensor.numpy`` lacks some dtypes, and would keep the storage from being resized.
    """
    itemsize, shape = tensor.itemsize, tensor.shape
    span = 1 + sum((length - 1) * stride for length, stride in zip(shape, tensor.stride(), strict=True))
    from_address: Any = (c_char * (span * itemsize if tensor.numel() else 0)).from_address
    strides, dtype, array = tuple(stride * itemsize for stride in tensor.stride()), BITS[itemsize], np.ndarray
    return lambda place: array(shape, dtype, from_address(place), 0, strides)


class LentCopies:
    """Contiguous copies of tensors for calls that go on after they return; memory of small ones is kept.

    A copy comes with a function that ends its use: it is called once, from any thread.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._free: dict[torch.Size, list[torch.Tensor]] = {}

    def to_read(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return a copy of a tensor, and a function that ends its use."""
        copy, free = self._lend(tensor)
        return copy, partial(free.append, copy)

    def to_write(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return a copy of a tensor, and a function that copies it back and ends its use."""
        copy, free = self._lend(tensor)

        def finish() -> None:
            check_memory(tensor)
            tensor.copy_(copy)
            free.append(copy)

        return copy, finish

    def _lend(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return a copy of a tensor, and the list to which it goes back when its use has ended."""
        shape = tensor.shape
        try:
            copy = (free := self._free[shape]).pop()
        except (KeyError, IndexError):  # IndexError if all are in use, such as by another thread
            copy = new_memory(shape, self._dtype)
            free = self._free.get(shape, [])
            if copy.nbytes <= COPY_KEPT:
                if len(self._free) >= COPIES_KEPT:
                    self._free.clear()
                self._free[shape] = free
        return copy.copy_(tensor), free


def same_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """Return the dtype in which tensors travel together: their own, or the real one if only some are complex.

    Raises c10d's error for dtypes that differ in more than that.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) == 1:
        return dtypes.pop()
    kinds = {real_dtype(dtype) for dtype in dtypes}
    if len(kinds) > 1:
        raise MismatchError(
            f"Invalid usage of tensors with different dtypes Found {' and '.join(sorted(map(str, dtypes)))}: invalid "
            "tensor type; expected one dtype"
        )
    return kinds.pop()


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the two parts of a complex dtype; a real dtype as it is."""
    return dtype.to_real() if dtype.is_complex else dtype


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values, to be read, as real numbers: two for each complex number."""
    return torch.view_as_real(tensor.resolve_neg().resolve_conj()) if tensor.is_complex() else tensor


def check_dense(call: str, *tensors: torch.Tensor) -> None:
    """Raise if a tensor is sparse, which only all_reduce takes, nested or quantized."""
    for tensor in tensors:
        if tensor.is_nested:
            raise nested(call)
        if tensor.layout is not torch.strided:
            raise LayoutError(
                f"{call} takes dense tensors, not {tensor.layout}; of the collectives only all_reduce (and "
                "all_reduce_coalesced) takes sparse COO ones"
            )
        if tensor.dtype in QUANTIZED_TYPES:
            raise quantized_error(call, tensor)


def nested(call: str) -> LayoutError:
    return LayoutError(f"{call} does not carry nested tensors, which have no shape; send the tensors of unbind() of it")


def quantized_error(call: str, tensor: torch.Tensor) -> LayoutError:
    """Return c10d's error for a quantized tensor, whose values do not follow from its memory alone."""
    return LayoutError(
        f"Invalid scalar type: {call} does not carry quantized tensors ({tensor.dtype}), because scale and zero point "
        "would not travel with the elements; give int_repr() or dequantize() of it, or send it as an object"
    )


def check_dtype(dtype: Any) -> None:
    """Raise unless a dtype is one of torch's that is not quantized."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"`dtype` is of type {type(dtype).__name__}; expected a torch.dtype")
    if dtype in QUANTIZED_TYPES:
        raise TypeError(f"`dtype` is {dtype}, whose scale and zero point have no memory; expected another dtype")


def check_memory(*tensors: torch.Tensor) -> None:
    """Raise if a dense tensor has elements but no memory: a library would read or write at address 0."""
    for tensor in tensors:
        if tensor.data_ptr() < LOWEST_PLACE and tensor.nbytes and not tensor.untyped_storage().data_ptr():
            if tensor.is_meta:
                raise MismatchError(
                    f"a tensor of shape {tuple(tensor.shape)} is on the device meta, which has no memory; expected one "
                    "on a device that the group carries"
                )
            raise MismatchError(
                f"a tensor of shape {tuple(tensor.shape)} has no memory: its storage was freed, as by "
                "`untyped_storage().resize_(0)`; expected one whose storage holds its elements"
            )


def resized(call: str) -> MismatchError:
    """Return the error of a call whose tensors have other sizes than when it was made."""
    return MismatchError(
        f"{call}: a tensor was resized, or got other memory, after the call was made and before it began; expected it "
        "to stay as it is until wait()"
    )


def check_length(call: str, name: str, tensors: Sequence[torch.Tensor], size: int) -> None:
    """Raise unless a list has one tensor for each rank."""
    if len(tensors) != size:
        raise MismatchError(f"{call}: `{name}` has {len(tensors)} tensors; expected {size}, one a rank of the group")


def check_sizes(call: str, name: str, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> None:
    """Raise if tensors that belong together differ in size."""
    for index, tensor in enumerate(tensors):
        if tensor.nbytes != like.nbytes:  # a complex tensor goes with a real one of twice as many elements
            raise MismatchError(
                f"{call}: invalid tensor size: the one of `{name}` with index {index} has {tensor.numel()} elements "
                f"{tuple(tensor.shape)}; expected {like.nbytes // tensor.itemsize}, as the tensor of shape "
                f"{tuple(like.shape)} that goes with it"
            )


def check_parts(row: Row, op: Any, given: torch.Tensor, output: torch.Tensor) -> None:
    """Raise if a call on a complex tensor and a real one of its parts combines complex numbers as a whole."""
    if row.reduces and not is_done_by_parts(canonical(op)):
        raise MismatchError(
            f"{row.name} by {name_of(op)} combines complex numbers as a whole; expected tensors of one dtype, "
            f"found {given.dtype} and {output.dtype}"
        )


def as_splits(given: Any) -> list[int] | None:
    """Return split sizes, a list, an array or a tensor, as a list; TypeError if they are not integers."""
    try:
        return None if given is None else [operator.index(each) for each in given]
    except TypeError:
        raise TypeError(f"split sizes are {format_value(given)}; expected a list of integers, one a rank") from None


def rows_of(tensor: torch.Tensor, splits: Sequence[int] | None, size: int, name: str) -> list[int]:
    """Return the elements of each rank's rows of a tensor."""
    rows = tensor.size(0) if tensor.dim() else tensor.numel()
    width = tensor.numel() // rows if rows else 0
    if not splits:
        if rows % size:
            raise RuntimeError(
                f"Tensor's dim 0 does not divide equally across group size: {name} has {rows} rows, the group "
                f"{size} ranks; give {name}_split_sizes"
            )
        return [tensor.numel() // size] * size
    if len(splits) != size:
        raise RuntimeError(
            f"Number of tensor splits not equal to group size: {name}_split_sizes has {len(splits)} entries, "
            f"the group {size} ranks"
        )
    if sum(splits) != rows or min(splits) < 0:
        raise RuntimeError(
            f"Split sizes doesn't match total dim 0 size: {name}_split_sizes {list(splits)} add up to {sum(splits)}, "
            f"{name} has {rows} rows; none may be below zero"
        )
    return [length * width for length in splits]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as a tensor of bytes."""
    check_memory(tensor)
    # a single element is contiguous whatever its stride, but ``view`` checks the stride
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def counts_in(dtype: torch.dtype, tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the number of elements of each tensor, in the dtype in which they travel (``same_dtype``)."""
    return [tensor.nbytes // dtype.itemsize for tensor in tensors]


def one_device(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Return the device of the tensors of a list; raise c10d's error if there are several."""
    device = tensors[0].device
    if any(tensor.device != device for tensor in tensors):
        found = ", ".join(sorted({str(tensor.device) for tensor in tensors}))
        raise MismatchError(f"the tensors of one call must be on the same device; found {found}")
    return device


def concatenate(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensors' elements one after another, in the dtype in which they travel (``same_dtype``)."""
    check_memory(*tensors)
    one_device(tensors)
    return cat([(tensor if tensor.dtype is dtype else as_real(tensor)).reshape(-1) for tensor in tensors])


def cat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return ``torch.cat`` of tensors of one dtype; autocast would refuse a half type other than its own."""
    kind = tensors[0].device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return torch.cat(tensors)
    with torch.autocast(kind, enabled=False):
        return torch.cat(tensors)


def allocate_flat(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return memory for the elements of all tensors, in the dtype in which they travel (``same_dtype``)."""
    check_memory(*tensors)
    return torch.empty(sum(counts_in(dtype, tensors)), dtype=dtype, device=one_device(tensors))


def make_unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return a function that copies the elements of ``flat`` to the tensors."""

    def copy() -> None:
        parts = flat.split(counts_in(flat.dtype, tensors))
        for tensor, part in zip(tensors, parts, strict=True):
            # a copy, because a pair of numbers in a buffer may not be aligned as a complex number must be
            values = part if tensor.dtype is flat.dtype else torch.view_as_complex(part.clone().view(-1, 2))
            copy_into(values.view(tensor.shape), tensor)

    return copy


def copy_into(values: torch.Tensor, target: torch.Tensor) -> None:
    """Copy values to a tensor of the same shape; elements that share memory (``expand``) are written once."""
    check_memory(target)  # its storage may have been freed since the call began
    if not target.is_contiguous():
        for dim, stride in enumerate(target.stride()):
            if stride == 0 and target.size(dim) > 1:
                values, target = values.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
    if target.is_inference() and not torch.is_inference_mode_enabled():  # it may only be written in that mode
        with torch.inference_mode():
            target.copy_(values)
    else:
        target.copy_(values)
    if isinstance(target, ArrayCopy):
        target.original[...] = target.numpy()


Places = Iterable[tuple[int, int]]  # addresses, and bytes from there on


def do_overlap(one: Places, other: Places) -> bool:
    """Tell whether some ranges of memory overlap others."""
    ends = [0, 0]  # of what was met of each
    for place, size, index in sorted((*each, index) for index, places in enumerate((one, other)) for each in places):
        if size and place < ends[1 - index]:
            return True
        ends[index] = max(ends[index], place + size)
    return False


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two contiguous tensors share memory, which libraries forbid between input and output."""
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes
