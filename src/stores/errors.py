"""Errors that the stores raise, and their messages.

The classes are torch's own, so that ``except torch.distributed.DistStoreError`` works for both kinds of
stores. Messages begin like torch's and add the place, the time, and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import DistNetworkError, DistStoreError, QueueEmptyError

_SHOWN = 16  # keys named in a message
_LONGEST = 256  # bytes of a key there


class NoAnswerError(DistNetworkError):
    """Reports a server that did not answer in time; a call with a deadline turns it into a wait timeout."""

    def __init__(self, what: str, where: str, seconds: float) -> None:
        super().__init__(f"no answer from {where} to {what} within {seconds:.3f} s: is the server stopped?")


class LostServerError(DistNetworkError):
    """Reports a connection that ended or could not be reopened: the server has ended, or refused the request."""


class ServerClosedError(ConnectionResetError):
    """Reports a connection that the server closed in order: it has not carried out the requests without an answer."""


def add_hint(text: str, name: str) -> str:
    """Return a message with the command that prints its entry on the page of errors."""
    return f"{text} [python -m hpcdist explain {name}]"


def name_keys(keys: Sequence[bytes]) -> str:
    """Return keys as text for a message, at most 16 of them; long ones are cut."""
    shown = ", ".join(
        key[:_LONGEST].decode("utf-8", "backslashreplace") + (f"... ({len(key)} bytes)" if len(key) > _LONGEST else "")
        for key in keys[:_SHOWN]
    )
    return shown if len(keys) <= _SHOWN else f"{shown}, ... ({len(keys)} keys)"


def wait_timeout(keys: Sequence[bytes], seconds: float, waited: float, where: str, note: str = "") -> DistStoreError:
    """Make the error for keys that did not come in time."""
    late = f"the {'key' if len(keys) == 1 else 'keys'} did not come to {where} in {waited:.3f} s{note}"
    text = f"wait timeout after {seconds * 1000:.0f}ms, keys: {name_keys(keys)} ({late})"
    return DistStoreError(add_hint(text, "store-timeout"))


def barrier_timeout(
    key: bytes, world_size: int, seconds: float, waited: float, where: str, note: str
) -> DistStoreError:
    """Make the error for a barrier that too few callers reached in time."""
    late = f"fewer than {world_size} callers came to {where} in {waited:.3f} s{note}"
    text = f"barrier timeout after {seconds * 1000:.0f}ms, key: {name_keys([key])} ({late})"
    return DistStoreError(add_hint(text, "store-timeout"))


def queue_empty(key: bytes, where: str) -> QueueEmptyError:
    """Make the error for a pop from an empty queue that does not wait."""
    return QueueEmptyError(f"queue is empty: {name_keys([key])} at {where}")


def lost_server(what: str, where: str, waited: float, cause: object) -> LostServerError:
    """Make the error for a connection that ended or could not be opened again."""
    text = (
        f"lost the connection to {where} in {what}, after {waited:.3f} s: {cause}. The server has ended, "
        "or it refused the request (a length above its limits, or text where it expected a number)."
    )
    return LostServerError(add_hint(text, "store-lost"))


def connect_timeout(where: str, seconds: float, tries: int, cause: object) -> DistNetworkError:
    """Make the error for a server that could not be reached in time."""
    text = (
        f"the connection to {where} timed out after {seconds * 1000:.0f}ms "
        f"({tries} tries, the last: {cause}). Is the server's process running, and is this its address?"
    )
    return DistNetworkError(add_hint(text, "store-unreachable"))


def wrong_kind(name: str, value: object, expected: str) -> TypeError:
    """Make the error for an argument of a wrong type."""
    return TypeError(f"{name}: expected {expected}, got {type(value).__name__} {value!r:.60}")
