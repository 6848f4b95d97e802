"""PrefixStore: a part of another store, so that several users of one store have separate keys."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore as TorchPrefixStore
from torch.distributed.distributed_c10d import Store as TorchStore

from hpcdist_stores.base import Store, Text, Timeout, as_bytes
from hpcdist_stores.errors import wrong_kind
from hpcdist_stores.keep_alive import release


class PrefixStore(Store, TorchPrefixStore):
    """Puts ``prefix/`` before every key and calls another store, ours or torch's (c10d's PrefixStore).

    The timeout and num_keys are those of the store below. Unlike torch's, list_keys takes whole prefixes only
    (``p`` does not take ``pq/x``).

    The C++ half is torch's PrefixStore over the store below: a timeout that C++ sets arrives there.
    """

    def __init__(self, prefix: Text, store: TorchStore) -> None:
        if not isinstance(store, TorchStore):
            raise wrong_kind("store", store, "a Store")
        self._prefix = as_bytes(prefix, "prefix") + b"/"
        self._store: Any = store
        TorchPrefixStore.__init__(self, self._prefix[:-1], store)  # type: ignore[arg-type]  # bytes do as well
        release()
        # The attribute goes before the C++ half, the finalizer's reference after it: so the store below sees that
        # C++ has released it, and ends with this one.
        weakref.finalize(self, id, store).atexit = False

    def set(self, key: Text, value: Text) -> None:
        self._store.set(self._name(key), value)

    def get(self, key: Text) -> bytes:
        return self._store.get(self._name(key))

    def add(self, key: Text, amount: int) -> int:
        return self._store.add(self._name(key), amount)

    def append(self, key: Text, value: Text) -> None:
        self._store.append(self._name(key), value)

    def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        return self._store.compare_set(self._name(key), expected, desired)

    def check(self, keys: Sequence[Text]) -> bool:
        return self._store.check(self._names(keys))

    def wait(self, keys: Sequence[Text], timeout: Timeout | None = None) -> None:
        self._store.wait(self._names(keys), *(() if timeout is None else (timeout,)))

    def delete_key(self, key: Text) -> bool:
        return self._store.delete_key(self._name(key))

    def num_keys(self) -> int:
        """Return the number of keys in the store below."""
        return self._store.num_keys()

    def list_keys(self) -> list[str]:
        """Return the keys under this prefix, without it."""
        return self._listed(key.encode() for key in self._store.list_keys())

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        return self._store.multi_get(self._names(keys))

    def multi_set(self, keys: Sequence[Text], values: Sequence[Text]) -> None:
        self._store.multi_set(*self._pairs(keys, values))

    def queue_push(self, key: Text, value: Text) -> None:
        self._store.queue_push(self._name(key), value)

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        return self._store.queue_pop(self._name(key), block)

    def queue_len(self, key: Text) -> int:
        return self._store.queue_len(self._name(key))

    def barrier(self, key: Text, world_size: int, timeout: Timeout | None = None) -> None:
        self._store.barrier(self._name(key), world_size, *(() if timeout is None else (timeout,)))

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    def clone(self) -> PrefixStore:
        """Return the same prefix over a clone of the store below."""
        return PrefixStore(self._prefix[:-1], self._store.clone())
