"""Lifetime of Python objects that C++ holds: keeps the Python half of a store for as long as C++ may call it.

C++ code that gets a Python object (gloo and torch's PrefixStore a store, c10d a Work) holds only its C++
half. With the last Python reference the Python half would be freed, and C++'s next call of an overridden
method would fail with an internal assert.

:class:`KeptAlive` is the remedy, a base class for any class that derives from one of torch's pybind11
classes with intrusive reference counts (Store, Work, Backend). When Python drops such an object, the
reference count of its C++ half is read. Above one, C++ still has it, and the object goes into a queue of
kept objects. Whenever an object is made or kept, and after garbage collections, the first few of the queue are
checked: those that C++ has released leave it, the others go to its end. A full garbage collection checks all.

pybind11 has no name for that count, so it is read from the object itself, at a place that is verified on
import with real stores. If a later torch lays it out differently, objects that Python drops are kept until
the process ends.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

# pybind11 keeps behind Python's own header: two pointers (to the C++ half and, for intrusive counts, to it again;
# or, for a class with several bound bases, to a table whose first entry is the C++ half), the list of weak
# references, and a byte of flags. An intrusive_ptr_target keeps its count behind the pointer to its vtable.
_POINTER = ctypes.sizeof(ctypes.c_void_p)
_HALF = object.__basicsize__
_FLAGS = _HALF + 4 * _POINTER
_IS_SIMPLE = 2  # the flag that distinguishes the two layouts

_FEW = 16  # a count of so many owners may be half a pointer
_LOOKS = 2  # kept objects checked at each event, so that the queue shrinks if one of two has been released


def _words(address: int, kind: Any) -> memoryview:
    """Return this process's memory from an address on as unsigned integers, by a format of the struct module.

    To read one from here takes 0.04 µs, by a ctypes object of its own 0.2 µs.
    """
    return memoryview((ctypes.c_char * 2**56).from_address(address)).cast("B").cast(kind)


# indexed by the address of an object, and of its C++ half, in units of a word
_HALVES = _words(_HALF, "P")
_COUNTS = _words(_POINTER, "I")
_TO_POINTERS = (_POINTER - 1).bit_length()
_TO_COUNTS = 2

_kept: deque[Any] = deque()


def _count_owners(kept: object) -> int:
    if not (half := _HALVES[id(kept) >> _TO_POINTERS]):
        return 1
    owners = _COUNTS[half >> _TO_COUNTS]
    if 0 < owners < _FEW or _HALVES[(id(kept) + _FLAGS - _HALF) >> _TO_POINTERS] & _IS_SIMPLE:
        return owners
    half = _HALVES[(half - _HALF) >> _TO_POINTERS]
    return _COUNTS[half >> _TO_COUNTS] if half else 1  # there is none if the class's __init__ has raised


def _is_readable() -> bool:
    class Plain(Store):
        pass

    class Prefixed(Plain, PrefixStore):
        def __init__(self, below: Store) -> None:
            PrefixStore.__init__(self, "", below)

    if sys.implementation.name != "cpython":
        return False
    below = Plain()
    for probe in (below, Prefixed(below)):
        alone = _count_owners(probe)
        above = PrefixStore("", probe)
        shared = _count_owners(probe)
        del above
        if (shared, _count_owners(probe)) != (alone + 1, alone):
            return False
    return _count_owners(below) == 2  # its own, and the second probe's, which still lives


_READABLE = _is_readable()


# references to what only a list holds. A variable would not do: whether its value on the way to a call is one more
# reference depends on the version of Python, and from 3.14 on (LOAD_FAST_BORROW) on the code around it
_PROBE = [object()]
_OWN = sys.getrefcount(_PROBE[0])


class KeptAlive:
    """Base class whose objects live until both Python and C++ have released them.

    It comes before torch's class among the bases. A subclass with a ``__del__`` of its own calls this one's.
    """

    __slots__ = ()

    # The defaults outlive this module's names: at the interpreter's end those are None when objects that lived in
    # older modules, or in C++, go. Nothing is kept then, because nobody can call Python any more.
    def __del__(
        self,
        address: Callable[[object], int] = id,
        halves: memoryview | None = _HALVES if _READABLE else None,
        counts: memoryview = _COUNTS,
        to_pointers: int = _TO_POINTERS,
        to_counts: int = _TO_COUNTS,
        is_finalizing: Callable[[], bool] = sys.is_finalizing,
    ) -> None:
        """Keep the object if C++ still holds it."""
        # usually it does not; a short check, because each asynchronous call drops a Work (0.15 µs, not
        # 0.7). No table of a class with several bases is taken for a count: its second word is a pointer, a multiple
        # of 16
        if halves is not None and (half := halves[address(self) >> to_pointers]) and counts[half >> to_counts] == 1:
            return
        if is_finalizing() or (_READABLE and _count_owners(self) <= 1):
            return
        if _kept:
            release()  # first the others: C++ has had no time to release this one
        _kept.append(self)


def release(at_once: bool = False) -> None:
    """Release kept objects that C++ has released, among the first few or among all."""
    if not _READABLE:
        return
    for _ in range(len(_kept) if at_once else min(_LOOKS, len(_kept))):
        try:
            looked_at = [_kept.popleft()]
        except IndexError:  # another thread has done so, or the end of an object on which others depended
            return
        if sys.getrefcount(looked_at[0]) > _OWN or _count_owners(looked_at[0]) > 1:
            _kept.append(looked_at[0])


def _after_collection(
    phase: str, info: dict[str, Any], *, is_finalizing: Callable[[], bool] = sys.is_finalizing
) -> None:
    if phase == "stop" and not is_finalizing():
        release(at_once=info["generation"] == 2)


gc.callbacks.append(_after_collection)

# the code, with what it calls, in which Python only prints an exception, such as that of Ctrl-C
PRINTING: frozenset[Any] = frozenset(each.__code__ for each in (KeptAlive.__del__, _after_collection))
