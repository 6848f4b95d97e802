"""Optional parts of a backend: what only some libraries can do when a call blocks, or a rank dies or leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hpcdist.core.errors import DistBackendError
    from hpcdist.core.remote_memory import RemoteMemory


class Faults:
    """How a call that blocks is ended, and which ranks have died; here, for a library that can do nothing of it."""

    def interrupt(self, reason: str, thread: int | None = None) -> bool:
        """Make a call that blocks on the communicator raise; return False if the library cannot.

        ``thread`` is the identifier of the thread that it blocks; None stands for any call.
        """
        return False

    def end_receives(self, reason: str) -> None:
        """Make receives raise that wait for a message, of other threads too: no rank sends one any more."""

    def set_revoke_reason(self, reason: str) -> None:
        """Take note of why another rank is about to interrupt the call that blocks on all ranks, for its error."""

    def interrupts_all(self) -> bool:
        """Tell whether to interrupt a collective ends it on all ranks."""
        return False

    def revoke(self, reason: str) -> bool:
        """Make every call on the communicator raise, on all ranks, now and later; False if the library cannot."""
        return False

    def is_revoked(self) -> bool:
        """Tell whether a rank has revoked the communicator; makes progress."""
        return False

    def check_async(self) -> DistBackendError | None:
        """Return an error that the library met outside any call, which the watchdog asks for."""
        return None

    def failed(self) -> list[int]:
        """Return the ranks that the library knows to have died."""
        return []

    def knows_death(self) -> bool:
        """Tell whether the library knows that a rank of the job has died; it need not be one of this group."""
        return False


class Membership(ABC):
    """How ranks leave the job, and how those that live go on."""

    @abstractmethod
    def survivors(self) -> Any:
        """Make the Backend of the ranks that live, in order, also if this one is revoked; they all call."""

    @abstractmethod
    def agree(self, flag: bool) -> bool:
        """Return whether all ranks that live gave True and none has just died, also if this one is revoked."""

    @abstractmethod
    def leave_launcher(self) -> bool:
        """Leave a launcher that ends the job when a rank dies, if there is one; every process of the job calls."""

    @abstractmethod
    def exit_barrier(self) -> Callable[[], bool] | None:
        """Begin a barrier of all ranks that leave the job; return what tells, without waiting, whether all have come.

        None says that a rank may leave without the others.
        """

    @abstractmethod
    def skip_finalize(self, seconds: float | None = None, ends_well: bool = False) -> None:
        """Leave the library's end out, in which all ranks take part, when this process ends.

        That may take so many seconds; None is no limit. ``ends_well`` says whether the launcher is told that this is no
        failure.
        """


class Windows(ABC):
    """Memory of ranks that others write and read."""

    @abstractmethod
    def open(
        self, sizes: Sequence[int], tensor: torch.Tensor | None, during: Callable[..., AbstractContextManager[object]]
    ) -> RemoteMemory:
        """Open memory of every rank, of so many bytes each, to the others; every rank calls.

        It is the tensor's, if this rank has one. ``during`` records a call that blocks, and the other rank
        (``Journal.during``).
        """
