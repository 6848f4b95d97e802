"""DictStore: the calls of a store whose keys this process has in a dictionary, HashStore's and FileStore's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from hpcdist_stores.base import Store, Text, as_amount, as_bytes
from hpcdist_stores.integers import add_i64

T = TypeVar("T")


class DictStore(Store):
    """Keeps keys and values in ``_data``, which is read within ``_reading()`` and changed within ``_writing()``.

    A subclass writes both, ``_put`` and ``_when_there``, besides ``delete_key`` and ``clone``.
    """

    _data: Mapping[bytes, bytes]

    def _reading(self) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def _writing(self) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def _put(self, *pairs: tuple[bytes, bytes]) -> None:
        """Store keys and values; called within ``_writing``."""
        raise NotImplementedError

    def _when_there(self, names: list[bytes], seconds: float, use: Callable[[], T]) -> T:
        """Call ``use`` once all names are there, and return its result; DistStoreError after ``seconds``."""
        raise NotImplementedError

    def set(self, key: Text, value: Text) -> None:
        self.multi_set([key], [value])

    def get(self, key: Text) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        names = self._names(keys)
        return self._when_there(names, self._seconds, lambda: [self._data[name] for name in names])

    def multi_set(self, keys: Sequence[Text], values: Sequence[Text]) -> None:
        """Store several values in one step."""
        pairs = zip(*self._pairs(keys, values), strict=True)
        with self._writing():
            self._put(*pairs)

    def append(self, key: Text, value: Text) -> None:
        name, value = self._name(key), as_bytes(value, "value")
        with self._writing():
            self._put((name, self._data.get(name, b"") + value))

    def add(self, key: Text, amount: int) -> int:
        """Add to a decimal counter and return the total.

        Raises:
            ValueError: If the value is not a number.
            IndexError: If the value does not fit into 64 bits (torch's class for it).
        """
        name, amount = self._name(key), as_amount(amount)
        with self._writing():
            try:
                total = add_i64(self._data.get(name) or b"0", amount)
            except OverflowError as error:
                raise IndexError(f"add to {as_bytes(key)!r}: {error}") from None
            self._put((name, total))
            return int(total)

    def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        name, expected, desired = self._name(key), as_bytes(expected, "expected"), as_bytes(desired, "desired")
        with self._writing():
            value = self._data.get(name)
            if value == expected or (value is None and not expected):
                self._put((name, desired))
                return desired
            return expected if value is None else value

    def check(self, keys: Sequence[Text]) -> bool:
        names = self._names(keys)
        with self._reading():
            return not self._missing(names)

    def _missing(self, names: list[bytes]) -> list[bytes]:
        return [name for name in names if name not in self._data]

    def wait_until(self, names: list[bytes], seconds: float) -> None:
        self._when_there(names, seconds, lambda: None)

    def num_keys(self) -> int:
        with self._reading():
            return len(self._data)

    def list_keys(self) -> list[str]:
        with self._reading():
            return self._listed(self._data)
