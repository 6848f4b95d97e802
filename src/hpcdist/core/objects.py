"""Object collectives: the interface of every backend, and its implementation by calls on tensors.

An object is pickled to a tensor of bytes, and its length is sent before it. MPI has its own implementation, with
out-of-band buffers (``backends.mpi.objects``).
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from hpcdist.core.buffers import PLAIN_TYPES, check_memory
from hpcdist.core.call import Call
from hpcdist.core.call_words import GATHERS, OBJECTS, kind_word
from hpcdist.core.table import ALL_GATHER, ALL_GATHER_SINGLE, BROADCAST, GATHER, SCATTER

REASON_LENGTH = 200  # characters of an error's text that are sent
APART_BYTES = 2048  # bytes from which a buffer is sent by itself; to copy a smaller one is faster
# of messages that are objects, one of the tags that are refused to users (``core.point_to_point``): under a tag of the
# user's a tensor would take an object's length for its values, and an object a tensor's values for its length
TAG = 32_766
SAVED = b"PK"  # the first bytes of what torch.save writes; no pickle of protocol 5 begins so
UNPICKLABLE = b"!"  # nor so; the rank that could not pickle its object follows, and why
MARK = b"hpcdist: memory "
STAND = struct.Struct("16sQ")  # the bytes in place of a storage that is sent apart: the mark, and its number
REFUSAL = (
    "with weights_only=True only what torch.load(weights_only=True) takes is read: tensors, numbers, texts, containers "
    "of such, and the classes given to torch.serialization.add_safe_globals"
)

Packed = tuple[bytes, list[memoryview]]


class SharedStorage:
    """The memory of one or more tensors of an object that is pickled."""

    __slots__ = ("memory",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()


class ObjectPickler(pickle.Pickler):
    """Pickler that leaves the memory of dense CPU tensors where it is, as pickle 5 does with that of arrays.

    torch would copy it into the pickle, more than once. Tensors that share memory share it at the receiver too. Other
    tensors are pickled by torch: sparse, quantized, of a subclass, on a GPU, with attributes of their own.
    """

    def __init__(self, file: io.BytesIO, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None) -> None:
        super().__init__(file, 5, buffer_callback=buffer_callback)
        self._storages: dict[tuple[int, int], SharedStorage] = {}

    def reducer_override(self, value: Any) -> Any:
        """Return the reduction of an object: of a tensor from its memory, of any other by its class."""
        kind = value.__class__
        if kind is SharedStorage:
            return torch_storage, (pickle.PickleBuffer(value.memory),)
        if kind not in PLAIN_TYPES or not is_dense(value):
            return NotImplemented
        storage = value.untyped_storage()
        place = storage.data_ptr(), storage.nbytes()
        if not place[1]:
            check_memory(value)
        shared = self._storages.get(place) if place[1] else SharedStorage(storage)
        if shared is None:
            shared = self._storages[place] = SharedStorage(storage)
        layout = value.storage_offset(), tuple(value.shape), value.stride()
        return rebuild_tensor, (shared, value.dtype, layout, value.requires_grad, kind is torch.nn.Parameter)


class WeightsPickler(pickle.Pickler):
    """Pickler for ``torch.save`` that leaves the memory of large dense CPU tensors where it is (``STAND``)."""

    apart: list[memoryview]  # the memory that is left out

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self._stands: dict[tuple[int, int], torch.UntypedStorage] = {}

    def reducer_override(self, value: Any) -> Any:
        """Return torch's reduction of a tensor, on another storage."""
        if value.__class__ is not torch.Tensor or not is_dense(value):  # of a parameter, this is its ``data``
            return NotImplemented
        storage = value.untyped_storage()
        place = storage.data_ptr(), storage.nbytes()
        if place[1] < APART_BYTES:
            check_memory(value)
            return NotImplemented
        if (stand := self._stands.get(place)) is None:
            text = bytearray(STAND.pack(MARK, len(self.apart)))
            stand = self._stands[place] = torch.frombuffer(text, dtype=torch.uint8).untyped_storage()
            self.apart.append(SharedStorage(storage).memory.data)
        rebuild, (given, *layout) = value.__reduce_ex__(2)
        if not isinstance(given, torch.UntypedStorage):
            return rebuild, (torch.TypedStorage(wrap_storage=stand, dtype=value.dtype, _internal=True), *layout)
        return rebuild, (stand, *layout)


def save(value: Any, is_whole: bool) -> tuple[bytes, list[memoryview]]:
    """Return an object as ``torch.save`` writes it, and the memory of its large tensors apart, unless ``is_whole``."""
    file, apart = io.BytesIO(), list[memoryview]()
    pickler = pickle.Pickler if is_whole else type("Pickler", (WeightsPickler,), {"apart": apart})
    torch.save(value, file, pickle_module=SimpleNamespace(__name__="pickle", Pickler=pickler))
    return file.getvalue(), apart


def load(data: Any, apart: Sequence[Any], weights_only: bool) -> Any:
    """Return the object from the results of ``save``."""

    def locate(storage: Any, _: str) -> Any:
        if storage.nbytes() != STAND.size:
            return None
        mark, index = STAND.unpack(SharedStorage(storage).memory.data)
        return torch_storage(apart[index]) if mark == MARK and index < len(apart) else None

    return torch.load(io.BytesIO(data), map_location=locate, weights_only=weights_only)


def is_dense(value: torch.Tensor) -> bool:
    """Tell whether a tensor is only a view of CPU memory, without a state of its own."""
    return (
        value.is_cpu
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_conj() or value.is_neg() or any(getattr(value, "names", ())))
        and not value.__dict__
    )


def torch_storage(memory: Any) -> torch.UntypedStorage:
    """Return received memory as a storage, which keeps it alive."""
    if not len(memory):
        return torch.UntypedStorage(0, device="cpu")
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def rebuild_tensor(
    storage: Any, dtype: torch.dtype, layout: Any, requires_grad: bool, is_parameter: bool
) -> torch.Tensor:
    """Return a tensor or a parameter on received memory; its layout is offset, shape and strides."""
    made = torch.empty(0, dtype=dtype, device="cpu").set_(storage, *layout)
    if is_parameter:
        return torch.nn.Parameter(made, requires_grad)
    return made.requires_grad_() if requires_grad else made


def pack(
    value: Any, rank: int, *, is_whole: bool = False, weights_only: bool = False
) -> tuple[bytes, list[memoryview], BaseException | None]:
    """Pickle an object of this rank for which other ranks wait; with ``is_whole`` no buffer is apart.

    With ``weights_only`` it is written by ``torch.save``, for ``torch.load(weights_only=True)``. Returns the bytes, the
    buffers apart from them, and the exception that this rank raises after the others have their answer.
    """
    apart: list[pickle.PickleBuffer] = []
    try:
        if weights_only:
            return *save(value, is_whole), None

        def keep(buffer: pickle.PickleBuffer) -> bool:
            is_small = buffer.raw().nbytes < APART_BYTES
            if not is_small:
                apart.append(buffer)
            return is_small

        written = io.BytesIO()
        ObjectPickler(written, None if is_whole else keep).dump(value)
        return written.getvalue(), [each.raw() for each in apart], None
    except BaseException as error:  # Ctrl-C too: the others wait for this rank's part
        reason = f"{type(error).__name__}: {error}"[:REASON_LENGTH]
        return UNPICKLABLE + json.dumps([rank, reason]).encode(), [], error


def unpack(data: Any, *apart: Any, weights_only: bool = False) -> Any:
    """Return the object from the bytes and the buffers that ``pack`` returned.

    Ranks of one call may differ in ``weights_only``: the bytes show how they were written, and the receiver decides
    what it reads. An object that could run code is then an UnpicklingError; one that its rank could not pickle is
    always a RuntimeError.
    """
    begins = bytes(data[:2])
    if begins[:1] == UNPICKLABLE:
        rank, reason = json.loads(bytes(data[1:]))
        raise RuntimeError(f"rank {rank} of the group could not pickle its object: {reason}")
    if begins == SAVED:
        try:
            return load(data, apart, weights_only)
        except pickle.UnpicklingError as error:
            raise pickle.UnpicklingError(f"{REFUSAL}: {error}") from error
    if weights_only:
        raise pickle.UnpicklingError(f"{REFUSAL}. Its sender wrote an ordinary pickle (without weights_only=True)")
    return pickle.loads(data, buffers=apart)


def as_bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpickle(data: torch.Tensor, weights_only: bool) -> Any:
    return unpack(data.cpu().numpy().data, weights_only=weights_only)


def pack_list(values: list[Any], rank: int, **how: bool) -> tuple[list[Packed], BaseException | None]:
    """Pickle the objects of a scatter as ``pack`` does; if one fails, no rank gets an object."""
    made = [pack(value, rank, **how) for value in values]
    bad = next((each for each in made if each[2] is not None), None)
    return [(bad or each)[:2] for each in made], None if bad is None else bad[2]


class Objects(ABC):
    """The object calls of a backend; a rank that cannot pickle its object sends the error in its place.

    With ``weights_only`` an object is written by ``torch.save``, and this rank reads objects only by
    ``torch.load(weights_only=True)``. The library's calls are the same, so that ranks may differ in it.
    """

    @abstractmethod
    def all_gather(self, value: Any, weights_only: bool = False, call: str = "all_gather_object") -> list[Any]:
        """Gather every rank's object on all ranks, as part of a user's call that is the same on all of them."""

    @abstractmethod
    def gather(self, value: Any, root: int, weights_only: bool = False) -> list[Any] | None:
        """Gather every rank's object on the root."""

    @abstractmethod
    def broadcast(self, value: Any, root: int, weights_only: bool = False) -> Any:
        """Hand the root's object to all ranks."""

    @abstractmethod
    def scatter(self, values: list[Any] | None, root: int, weights_only: bool = False) -> Any:
        """Hand each rank its object of the root's list."""

    @abstractmethod
    def send(self, value: Any, dst: int, weights_only: bool = False) -> None:
        """Send an object."""

    @abstractmethod
    def recv(self, src: int | None, weights_only: bool = False) -> tuple[Any, int]:
        """Receive an object; return it and its sender."""


class TensorObjects(Objects):
    """Object calls by a ``Backend``'s calls on tensors, which ``run`` carries out; the bytes are on its device."""

    def __init__(self, backend: Any, run: Callable[[Call], None]) -> None:
        self._backend, self._run = backend, run
        self.rank, self.size = backend.rank, backend.size

    def _record(self, name: str, root: int) -> None:
        if self._backend.calls is not None:
            self._backend.calls.add(kind_word(name, root=root), 0)

    def _packed(self, value: Any, weights_only: bool) -> tuple[torch.Tensor, BaseException | None]:
        data, _, failure = pack(value, self.rank, is_whole=True, weights_only=weights_only)
        return as_bytes(data).to(self._backend.device), failure

    def _memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._backend.device)

    def _lengths(self, length: int) -> list[int]:
        mine = torch.tensor([length], device=self._backend.device)
        lengths = torch.empty(self.size, dtype=torch.int64, device=self._backend.device)
        self._run(Call(ALL_GATHER_SINGLE, mine, lengths))
        return lengths.tolist()

    def all_gather(self, value: Any, weights_only: bool = False, call: str = "all_gather_object") -> list[Any]:
        self._record(OBJECTS[0], GATHERS.index(call))
        data, failure = self._packed(value, weights_only)
        lengths = self._lengths(data.numel())
        everything = self._memory(sum(lengths))
        self._run(Call(ALL_GATHER, data, everything, counts=([data.numel()], lengths)))
        if failure is not None:
            raise failure
        return [unpickle(part, weights_only) for part in everything.split(lengths)]

    def gather(self, value: Any, root: int, weights_only: bool = False) -> list[Any] | None:
        self._record("gather_object", root)
        data, failure = self._packed(value, weights_only)
        lengths = self._lengths(data.numel())
        longest = max(lengths)  # GATHER moves equal shares
        padded = self._memory(longest).zero_()
        padded[: data.numel()] = data
        is_root = self.rank == root
        everything = self._memory(self.size * longest) if is_root else None
        self._run(Call(GATHER, padded, everything, root=root))
        if failure is not None:
            raise failure
        if everything is None:
            return None
        parts = everything.split(longest)
        return [unpickle(part[:length], weights_only) for part, length in zip(parts, lengths, strict=True)]

    def broadcast(self, value: Any, root: int, weights_only: bool = False) -> Any:
        self._record("broadcast_object", root)
        is_root = self.rank == root
        data, failure = self._packed(value, weights_only) if is_root else (None, None)
        length = torch.tensor([data.numel() if data is not None else 0], device=self._backend.device)
        self._run(Call(BROADCAST, length, length, root=root))
        if data is None:
            data = self._memory(int(length))
        self._run(Call(BROADCAST, data, data, root=root))
        if failure is not None:
            raise failure
        return value if is_root else unpickle(data, weights_only)

    def scatter(self, values: list[Any] | None, root: int, weights_only: bool = False) -> Any:
        self._record("scatter_object", root)
        parts, failure = None, None
        if values is not None and self.rank == root:
            made, failure = pack_list(values, root, is_whole=True, weights_only=weights_only)
            parts = [as_bytes(data).to(self._backend.device) for data, _ in made]
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self._backend.device)
        if parts is not None:
            lengths = torch.tensor([part.numel() for part in parts], device=self._backend.device)
        self._run(Call(BROADCAST, lengths, lengths, root=root))
        longest = int(lengths.max())
        everything = None
        if parts is not None:
            everything = self._memory(self.size * longest).zero_().view(self.size, longest)
            for row, part in zip(everything, parts, strict=True):
                row[: part.numel()] = part
        mine = self._memory(longest)
        self._run(Call(SCATTER, everything, mine, root=root))
        if failure is not None:
            raise failure
        return unpickle(mine[: int(lengths[self.rank])], weights_only)

    def send(self, value: Any, dst: int, weights_only: bool = False) -> None:
        data, failure = self._packed(value, weights_only)
        if failure is not None:
            raise failure
        self._backend.send(torch.tensor([data.numel()], device=self._backend.device), dst, TAG)
        self._backend.send(data, dst, TAG)

    def recv(self, src: int | None, weights_only: bool = False) -> tuple[Any, int]:
        length = torch.zeros(1, dtype=torch.int64, device=self._backend.device)
        sender = self._backend.recv(length, src, TAG)
        data = self._memory(int(length))
        self._backend.recv(data, sender, TAG)
        return unpickle(data, weights_only), sender
