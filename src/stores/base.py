"""Store: the contract of every key-value store, with torch.distributed's names, arguments and error classes.

``Store`` derives from torch's Store, so that each of ours can be handed to torch's gloo, PrefixStore or
init_process_group. A subclass writes ``set``, ``get``, ``add``, ``check``, ``compare_set``, ``wait_until``,
``delete_key``, ``num_keys``, ``list_keys`` and ``clone``; the rest follows, and is overridden by a store
that has a faster way.

The timeout is kept in torch's C++ half and nowhere else, because C++ can set it only there. One rule for
all stores, torch's TCPStore's: a timeout of 0 means "at once", a negative one "for ever".
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store as TorchStore

from hpcdist_stores.errors import wrong_kind
from hpcdist_stores.integers import is_i64
from hpcdist_stores.keep_alive import KeptAlive, release

Text = str | bytes
Timeout = timedelta | float

DEFAULT_TIMEOUT = timedelta(seconds=300)
LONGEST_S = 1e9  # 31 years: Python's locks and C++'s nanoseconds cannot hold much more


def as_bytes(text: Text, name: str = "key") -> bytes:
    """Return a key or value as bytes: str as UTF-8, bytes and bytearray as they are."""
    if isinstance(text, str):
        return text.encode()
    if isinstance(text, (bytes, bytearray)):
        return bytes(text)
    raise wrong_kind(name, text, "str or bytes")


def _as_bytes_list(texts: Sequence[Text], name: str) -> list[bytes]:
    try:
        return list(map(str.encode, texts))  # type: ignore[arg-type]
    except TypeError:  # not all are str, which is rare
        return [as_bytes(text, name) for text in texts]


def as_amount(amount: int) -> int:
    """Return the amount to add, an int of 64 bits."""
    if not hasattr(amount, "__index__"):
        raise wrong_kind("amount", amount, "an int")
    number = amount.__index__()
    if not is_i64(number):
        raise wrong_kind("amount", amount, "an int of 64 bits")
    return number


def as_seconds(timeout: Timeout) -> float:
    """Return a timeout in seconds, ``LONGEST_S`` at most; an int is refused, as by torch, because it has no unit."""
    if isinstance(timeout, timedelta):
        return min(timeout.total_seconds(), LONGEST_S)
    if isinstance(timeout, float):
        return min(timeout, LONGEST_S)
    raise wrong_kind("timeout", timeout, "a timedelta or a float of seconds")


def deadline_after(seconds: float) -> float | None:
    """Return the time on the monotonic clock when a timeout is over; None for never."""
    return None if seconds < 0 else time.monotonic() + seconds


class Store(KeptAlive, TorchStore):
    """Defines what every key-value store offers (c10d's Store).

    Keys and values are bytes; str is taken as UTF-8. Values come back as bytes. Nothing is ever unpickled.
    """

    where = "the store"
    _prefix = b""  # put before each key; a key with its prefix is a *name*
    timeout: timedelta  # torch's property, which reads the C++ half; torch's stubs do not have it

    def __init__(self) -> None:
        super().__init__()
        release()

    @property
    def _seconds(self) -> float:
        return self.timeout.total_seconds()

    def _name(self, key: Text) -> bytes:
        return self._prefix + (key.encode() if isinstance(key, str) else as_bytes(key))

    def _names(self, keys: Sequence[Text]) -> list[bytes]:
        """Return the names of a list of keys; a single str or bytes is not a list."""
        if isinstance(keys, (str, bytes, bytearray)) or not isinstance(keys, Sequence):
            raise wrong_kind("keys", keys, "a list of str or bytes")
        prefix = self._prefix
        return [prefix + key for key in _as_bytes_list(keys, "key")]

    def _pairs(self, keys: Sequence[Text], values: Sequence[Text]) -> tuple[list[bytes], list[bytes]]:
        """Return names, and values as bytes; raises DistStoreError if their numbers differ."""
        if len(keys) != len(values):
            raise DistStoreError(f"multi_set needs a value for each key: {len(keys)} keys, {len(values)} values")
        return self._names(keys), _as_bytes_list(values, "value")

    def _listed(self, names: Iterable[bytes]) -> list[str]:
        """Return the keys of some names."""
        size = len(self._prefix)
        return [name[size:].decode() for name in names if name.startswith(self._prefix)]

    # -- methods that each store writes -----------------------------------------------------------------

    def set(self, key: Text, value: Text) -> None:
        """Store a value, in place of any earlier one."""
        raise NotImplementedError

    def get(self, key: Text) -> bytes:
        """Return a value, waiting for the key up to the store's timeout.

        Raises:
            DistStoreError: If the key did not come in time, or a server did not answer in time.
            DistNetworkError: If a server has ended, at once.
        """
        raise NotImplementedError

    def add(self, key: Text, amount: int) -> int:
        """Add to a decimal counter and return the total; a missing key counts as 0, totals wrap at 64 bits.

        Raises:
            ValueError: If the value is not a number (TCPStore: DistNetworkError, because its server closes).
        """
        raise NotImplementedError

    def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        """Store ``desired`` if the value is ``expected``, or the key is missing and ``expected`` empty.

        Returns:
            The value now stored; ``expected`` when the key is missing and nothing was stored.
        """
        raise NotImplementedError

    def append(self, key: Text, value: Text) -> None:
        """Append to a value; a missing key counts as empty."""
        raise NotImplementedError

    def check(self, keys: Sequence[Text]) -> bool:
        """Return whether all keys (or queues that are not empty) are there, without waiting."""
        raise NotImplementedError

    def wait_until(self, names: list[bytes], seconds: float) -> None:
        """Wait until all names are there, or raise DistStoreError after ``seconds`` (negative: never)."""
        raise NotImplementedError

    def delete_key(self, key: Text) -> bool:
        """Delete a key and return whether it was there (a FileStore always says True)."""
        raise NotImplementedError

    def num_keys(self) -> int:
        """Return the number of keys, a store's own bookkeeping keys included."""
        raise NotImplementedError

    def list_keys(self) -> list[str]:
        """Return all keys; raises UnicodeDecodeError if one is not UTF-8."""
        raise NotImplementedError

    def clone(self) -> Store:
        """Return another handle to the same keys, for use beside this one."""
        raise NotImplementedError

    # -- methods that follow from them ------------------------------------------------------------------

    def wait(self, keys: Sequence[Text], timeout: Timeout | None = None) -> None:
        """Wait until all keys are there.

        Args:
            keys: The keys.
            timeout: The longest wait; the store's own timeout if not given.

        Raises:
            DistStoreError: If a key did not come in time; the message names keys, place and time.
        """
        self.wait_until(self._names(keys), self._seconds if timeout is None else as_seconds(timeout))

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        """Return several values, waiting for all keys."""
        return [self.get(name) for name in self._names(keys)]

    def multi_set(self, keys: Sequence[Text], values: Sequence[Text]) -> None:
        """Store several values; raises DistStoreError if their number is not that of the keys."""
        for key, value in zip(*self._pairs(keys, values), strict=True):
            self.set(key, value)

    def queue_push(self, key: Text, value: Text) -> None:
        """Put a value at the end of a queue (queues live apart from keys).

        Raises:
            NotImplementedError: If the store has no queues, by all queue calls.
        """
        raise NotImplementedError(f"{type(self).__name__} has no queues; HashStore and TCPStore do")

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        """Take the oldest value of a queue.

        Raises:
            QueueEmptyError: If there is none and ``block`` is False.
            DistStoreError: If none came within the store's timeout.
        """
        raise NotImplementedError(f"{type(self).__name__} has no queues; HashStore and TCPStore do")

    def queue_len(self, key: Text) -> int:
        """Return the number of values in a queue."""
        raise NotImplementedError(f"{type(self).__name__} has no queues; HashStore and TCPStore do")

    def barrier(self, key: Text, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until ``world_size`` callers have called with the same key; later callers pass at once.

        Raises:
            DistStoreError: If fewer came in time.
        """
        base = as_bytes(key)
        last = base + b"/last_member"
        if self.add(base + b"/num_members", 1) >= world_size:
            self.set(last, b"1")
        self.wait([last], timeout)

    def has_extended_api(self) -> bool:
        """Return whether append, multi_get and multi_set are one operation each (False for a FileStore, as torch's)."""
        return False

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the limit of get and wait; kept in whole milliseconds."""
        super().set_timeout(timedelta(seconds=as_seconds(timeout)))

    # torch's C++ calls these two by their C++ names
    def deleteKey(self, key: Text) -> bool:
        """Delete a key (c10d's C++ name of delete_key)."""
        return self.delete_key(key)

    def getNumKeys(self) -> int:
        """Return the number of keys (c10d's C++ name of num_keys)."""
        return self.num_keys()
