"""Supervision of checks that end the process or never end, such as MPI_Init if launcher and library do not match.

The checks run in a forked process; this one makes no calls of MPI, waits for it, and can report its end. Launchers
allow that: their rank's process is often a shell whose child calls MPI. MPICH's is the exception: it passes its
processes a connection (PMI_FD), and often killed the job at its end when two processes held it (MPICH 5.0.2, 8 of 12
jobs of four ranks), always when only the forked one did. There the checks run in this process, and a thread watches the
time.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

Step = Callable[[str], None]

FORK = multiprocessing.get_context("fork")
CONNECTION = "PMI_FD"
SECONDS_TO_END = 2.0  # seconds for checks that SIGINT interrupts
END = "page written"


def supervise(work: Callable[[Step], int], seconds: float, report: Callable[[str], None]) -> int:
    """Run the checks in a process of their own, and return their status.

    If a step ends that process or takes longer than ``seconds``, this is reported, and the status is 1. After SIGINT,
    or if it is late, the process is killed.
    """
    steps, writer = FORK.Pipe(duplex=False)
    checks = FORK.Process(target=run, args=(work, writer))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until both processes can handle it
    checks.start()
    writer.close()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        step, is_late = follow(steps, seconds)
        if is_late:
            report(step)
            return 1
        checks.join()
    except KeyboardInterrupt:  # a terminal sends it to the checks too, `kill -INT` does not
        checks.join(SECONDS_TO_END)
        raise
    finally:
        checks.kill()
        checks.join()
    status = checks.exitcode or 0
    if step != END:
        report(f"{step} ended the process with {'signal' if status < 0 else 'status'} {abs(status)}")
    return int(step != END or status != 0)


def watch(work: Callable[[Step], int], seconds: float, report: Callable[[str], None]) -> int:
    """Run the checks in this process, and return their status; past the time limit of a step, report and end it."""
    steps, writer = FORK.Pipe(duplex=False)

    def look_at_the_clock() -> None:
        step, is_late = follow(steps, seconds)
        if is_late:
            report(step)
            sys.stdout.flush()
            os._exit(1)

    threading.Thread(target=look_at_the_clock, daemon=True).start()
    try:
        return work(writer.send)
    finally:
        writer.close()


def follow(steps: Connection, seconds: float) -> tuple[str, bool]:
    """Return the last step of checks that have ended, or the report of a step that takes too long, and True."""
    step = "start"
    with suppress(EOFError):
        while steps.poll(seconds):
            step = steps.recv()
        return f"{step} did not finish within {seconds:g} s", True
    return step, False


def run(work: Callable[[Step], int], steps: Connection) -> None:
    """Run the checks, in the forked process, and end MPI as a program would."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        status = work(steps.send)
        steps.send(END)
        atexit._run_exitfuncs()  # a forked process does not call it
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    sys.exit(status)
