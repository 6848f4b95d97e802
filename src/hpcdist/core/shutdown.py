"""Shutdown: the steps at the end of Python, in one order that does not depend on imports and calls.

An exit function that the program registers after importing hpcdist runs before all of them.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from enum import IntEnum


class Stage(IntEnum):
    """The stages, in order."""

    JOB = 0  # the ranks wait for each other
    PROGRESS = 1  # no thread drives MPI any more
    MPI = 2  # MPI_Finalize
    THREADS = 3  # the threads of torch's own backends end
    COLLECTIONS = 4  # no more garbage is collected
    SIGNALS = 5  # SIGTERM ends the process by itself


STEPS: dict[Stage, Callable[[], object]] = {}


def register(stage: Stage, step: Callable[[], object]) -> None:
    """Register the step of a stage, to be run when Python ends; each stage has one."""
    STEPS[stage] = step


def shut_down() -> None:
    """Run all steps, also after one that failed, then raise the first error."""
    first: BaseException | None = None
    for stage in sorted(STEPS):
        try:
            STEPS.pop(stage)()
        except BaseException as error:  # Ctrl-C too: MPI must end in any case
            first = first or error
    if first is not None:
        raise first


atexit.register(shut_down)
