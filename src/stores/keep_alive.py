"""How does a Python store live as long as torch's C++ may still call it?

C++ that is handed a Python store (gloo, torch's PrefixStore, what clone() returned) holds its C++ half
alone; once the last Python name is gone, the next call from C++ fails with an internal assert. So when
Python lets go of a store, the reference count of its C++ half is looked at: above one, C++ still has it,
and the store is kept in ``_held`` until it is the last owner. That is checked whenever a store is made
or dropped, and by the garbage collector meanwhile.

pybind11 has no name for that count, so it is read from the object itself, at a place that is verified on
import with a real store; should a later torch lay it out differently, stores that Python drops are kept
for good instead.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

_HALF = object.__basicsize__  # pybind11 keeps the pointer to the C++ half right behind Python's own header ...
_COUNT = ctypes.sizeof(ctypes.c_void_p)  # ... and an intrusive_ptr_target its count right behind the vtable
_OWN = 3  # references to a held store when nobody else has it: the table's, the loop's, and the call's own

_held: dict[int, Store] = {}


def _read_owners(store: Store) -> int:
    half = ctypes.c_size_t.from_address(id(store) + _HALF).value
    return ctypes.c_uint32.from_address(half + _COUNT).value if half else 1


def _is_readable() -> bool:
    class Probe(Store):
        pass

    if sys.implementation.name != "cpython":
        return False
    probe = Probe()
    alone = _read_owners(probe)
    prefixed = PrefixStore("", probe)
    shared = _read_owners(probe)
    del prefixed
    return (alone, shared, _read_owners(probe)) == (1, 2, 1)


_READABLE = _is_readable()


def is_held_by_cpp(store: Store) -> bool:
    """Return whether C++ still holds the store (True when that cannot be known)."""
    return not _READABLE or _read_owners(store) > 1


def hold(store: Store) -> None:
    """Keep a store that Python has let go of."""
    if not _held and _READABLE:
        gc.callbacks.append(_on_collection)
    _held[id(store)] = store


def release() -> None:
    """Let go of the stores that C++ has let go of."""
    if not _READABLE:
        return
    for key, store in list(_held.items()):
        # list(...) and the loop hold one reference each beside the table's; the call holds the last
        if sys.getrefcount(store) <= _OWN + 1 and not is_held_by_cpp(store):
            del _held[key]
    if not _held and _on_collection in gc.callbacks:
        gc.callbacks.remove(_on_collection)


def _on_collection(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["generation"]:
        release()
