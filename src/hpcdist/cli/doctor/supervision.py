"""Supervision of checks that end the process or never end, as MPI_Init may if launcher and library do not fit.

The checks run in a forked process; this one calls no MPI, waits for it, and can tell what became of it. Launchers allow
that: their rank's process is often a shell whose child calls MPI. MPICH's is the exception: it hands its processes a
connection (PMI_FD), and often killed the job at its end when two processes held it (MPICH 5.0.2, 8 of 12 jobs of four
ranks). There the checks run in this process, and a thread looks at the clock.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from io import RawIOBase
from typing import NamedTuple

from hpcdist.core.waiting import readable

Step = Callable[[str], None]


class Ended(NamedTuple):
    """How the checks ended."""

    status: int  # exit status, or minus the signal
    step: str  # what was tried last
    is_late: bool
    is_said: bool  # whether the page was written


CONNECTION = "PMI_FD"
SECONDS_TO_END = 2.0  # for checks that SIGINT interrupts
READ_BYTES = 4096


def watch(work: Callable[[Step], int], seconds: float, report: Callable[[Ended], None]) -> Ended:
    """Run the checks in this process; past the time limit of a step, report and end it."""
    step, deadline = "start", time.monotonic() + seconds
    ended = threading.Event()

    def tell(name: str) -> None:
        nonlocal step, deadline
        step, deadline = name, time.monotonic() + seconds

    def look_at_the_clock() -> None:
        while not ended.wait(0.1):
            if time.monotonic() > deadline:
                report(Ended(1, step, True, False))
                flush()
                os._exit(1)

    threading.Thread(target=look_at_the_clock, daemon=True).start()
    try:
        return Ended(work(tell), step, False, True)
    finally:
        ended.set()


def supervise(work: Callable[[Step], int], seconds: float) -> Ended:
    """Run the checks in a process of their own, which is killed past the time limit of a step, or on SIGINT."""
    flush()
    reader, writer = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until each of the two processes can handle it
    child = os.fork()
    if child == 0:
        os.close(reader)
        os._exit(run(work, writer))
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            step, is_late, is_said = follow(pipe, seconds)
            if is_late:
                os.kill(child, signal.SIGKILL)
        except KeyboardInterrupt:  # a terminal sends it to the checks too, `kill -INT` does not
            deadline = time.monotonic() + SECONDS_TO_END
            while readable([pipe], deadline - time.monotonic()) and pipe.read(READ_BYTES):
                pass
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
    _, status = os.waitpid(child, 0)
    return Ended(os.waitstatus_to_exitcode(status), step, is_late, is_said)


def follow(pipe: RawIOBase, seconds: float) -> tuple[str, bool, bool]:
    """Read what the checks tell until they end; return the last step, if it is late, and if the page was written."""
    step, is_said = "start", False
    while readable([pipe], seconds):
        if not (data := pipe.read(READ_BYTES)):
            return step, False, is_said
        for line in data.decode().splitlines():
            is_said = is_said or line == END
            step = step if line == END else line
    return step, True, is_said


END = "page written"


def run(work: Callable[[Step], int], writer: int) -> int:
    """Do the checks, in the forked process, and end MPI as a program would."""
    import atexit
    import traceback

    def tell(step: str) -> None:
        os.write(writer, f"{step}\n".encode())

    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        status = work(tell)
        tell(END)
        atexit._run_exitfuncs()  # os._exit, which must end a forked process, calls none of them
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
        status = 1
    flush()
    return status


def flush() -> None:
    """Write what a process that ends by ``os._exit`` would lose."""
    sys.stdout.flush()
    sys.stderr.flush()
