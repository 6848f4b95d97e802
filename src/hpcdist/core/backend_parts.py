"""Optional parts of a backend: what only some libraries can do when a call blocks, or a rank dies or leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hpcdist.core.errors import DistBackendError


class Faults:
    """Ends calls that block, and knows which ranks have died. These defaults are for a library that can do neither."""

    def interrupt(self, reason: str, thread: int | None = None) -> bool:
        """Make a call that blocks on the communicator raise; return False if the library cannot.

        ``thread`` is the identifier of the thread that it blocks; None stands for any call.
        """
        return False

    def end_receives(self, reason: str) -> None:
        """Make all receives that wait for a message raise, also those of other threads: no rank sends one any more."""

    def set_revoke_reason(self, reason: str) -> None:
        """Store the reason, for the error, why another rank is about to interrupt the call that blocks on all ranks."""

    def interrupts_all(self) -> bool:
        """Tell whether interrupting a collective ends it on all ranks."""
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
    """Lets ranks leave the job, and the ranks that live go on."""

    @abstractmethod
    def survivors(self) -> Any:
        """Make the Backend of the ranks that live, in order, also if this one is revoked; they all call."""

    @abstractmethod
    def agree(self, flag: bool) -> bool:
        """Return whether all ranks that live gave True and none has just died, also if this one is revoked."""

    @abstractmethod
    def leave_launcher(self) -> bool:
        """Disconnect from a launcher that ends the job when a rank dies; every process of the job calls."""

    @abstractmethod
    def exit_barrier(self) -> Callable[[], bool] | None:
        """Begin a barrier of all ranks that exit; return a function that tells, without waiting, whether all have come.

        None says that a rank may leave without the others.
        """

    @abstractmethod
    def all_finalize(self, finalizes: bool) -> bool:
        """Return whether all ranks take part in MPI_Finalize; ranks that exit call, after the exit barrier."""

    @abstractmethod
    def skip_finalize(self, seconds: float | None = None, ends_well: bool = False) -> None:
        """Skip the library's finalization, in which all ranks would take part, when this process ends.

        The rest of this process may take ``seconds``; None sets no limit. With ``ends_well`` the launcher is told that
        this is not a failure.
        """


SIGNAL_BYTES = 8  # of a window's counter for each rank, beside its data


class RemoteMemory(ABC):
    """Memory of every rank of a group, open to the others until it is closed.

    A call is complete, here and there, when it returns. Tensors are contiguous, on the CPU and checked by the caller;
    offsets and sizes are in bytes, ranks the group's.
    """

    own: torch.Tensor  # this rank's memory, as bytes

    @abstractmethod
    def put(self, tensor: torch.Tensor, dst: int, offset: int) -> None:
        """Write a tensor to a rank's memory."""

    @abstractmethod
    def get(self, tensor: torch.Tensor, src: int, offset: int) -> None:
        """Read a rank's memory into a tensor."""

    @abstractmethod
    def accumulate(self, tensor: torch.Tensor, dst: int, offset: int, op: Any) -> None:
        """Combine a tensor with a rank's memory, each element atomically."""

    @abstractmethod
    def fetch_and_add(self, value: torch.Tensor, dst: int, offset: int) -> torch.Tensor:
        """Add one element to a rank's atomically, and return what was there before."""

    @abstractmethod
    def signal(self, dst: int) -> None:
        """Send a rank a signal, which it sees after all that was written to it before."""

    @abstractmethod
    def wait_signal(self, src: int, seconds: float) -> None:
        """Wait for one signal of a rank."""

    @abstractmethod
    def mapped(self, rank: int) -> torch.Tensor | None:
        """Return a rank's memory as bytes, or None if this rank cannot load from it."""

    @abstractmethod
    def close(self) -> None:
        """Close it; every rank calls, once or more often."""


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
