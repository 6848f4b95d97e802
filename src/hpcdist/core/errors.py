"""Errors, by torch's exception classes."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from torch.distributed import DistBackendError as DistBackendError
from torch.distributed import DistError as DistError
from torch.distributed import DistNetworkError as DistNetworkError
from torch.distributed import DistStoreError as DistStoreError

from hpcdist.core import hooks


class MismatchError(ValueError, RuntimeError):
    """Sizes, dtypes or ranks that do not fit a call.

    c10d checks some of them in Python (ValueError) and some in C++ (RuntimeError), depending on the call and the
    backend; this is caught as either.
    """


class LayoutError(TypeError, NotImplementedError):
    """A tensor that has no dense memory, or whose values do not follow from it: sparse, nested or quantized.

    c10d finds no kernel for it (NotImplementedError), or no tensor that it takes (TypeError), depending on the call.
    """


class CallsDifferError(MismatchError, DistError):
    """Ranks of a group made different calls, or the same one with other sizes, dtypes, ops or roots."""


def end_all(steps: Iterable[Callable[[], Any]]) -> None:
    """Run all steps of an end, also after one that failed, then raise the first error; Ctrl-C raises at once."""
    first: Exception | None = None
    for step in steps:
        try:
            step()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


def not_initialized() -> ValueError:
    return ValueError("Default process group has not been initialized, please make sure to call init_process_group.")


def destroyed(group: Any) -> ValueError:
    """Return the error of a call on a group that does not exist, or not any more.

    A daemon thread of a process that ends gets no error: it stops here, as Python would stop it a little later.
    """
    if hooks.is_ending and threading.current_thread() is not threading.main_thread():
        threading.Event().wait()
    why = f" ({group.end_reason})" if getattr(group, "end_reason", "") else ""
    return ValueError(
        f"Invalid process group specified: {group!r} is not a live group of this process; it was destroyed "
        f"or aborted{why}, or does not come from hpcdist.init_process_group, new_group, new_subgroups or split_group"
    )


def run_hook(hook: Callable[..., Any], *exception: Any) -> None:
    """Let another hook print an uncaught exception; if it fails, print its error, and go on."""
    try:
        hook(*exception)
    except Exception:
        traceback.print_exc()
