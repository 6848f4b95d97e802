"""Supervisor that ends a test cluster with its test run.

A small process of its own, the parent of every daemon of the cluster. It makes itself the *subreaper* of all that it
starts (``prctl(2)``), so that job steps, which Slurm turns into daemons, stay its descendants. It holds on to its
standard input, a pipe from the test run: when that closes, because the run tore the cluster down or because the run
was killed, everything below is ended, and the folder removed. Standard library alone, so that it starts at once.

Usage: ``python supervisor.py FOLDER`` with the daemons' command lines as JSON on the first line of standard input.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
# Every daemon gets this long to leave in good order: slurmctld saves its state, munged unlinks its socket.
GRACE_S = 2.0


def descendants(ancestor: int) -> list[int]:
    """List the processes below ``ancestor``, from ``/proc``."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The command's name may hold spaces and brackets; the state and the parent follow the last bracket.
            after_name = stat.read_text(errors="replace").rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(after_name[1])

    def is_below(pid: int) -> bool:
        while pid > 1:
            pid = parents.get(pid, 0)
            if pid == ancestor:
                return True
        return False

    return [pid for pid in parents if is_below(pid)]


def reap() -> None:
    """Collect the children that have ended; orphans of the cluster come to us as well."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end(pids: list[int], signal_number: int) -> None:
    """Send ``signal_number`` to all of ``pids`` that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)


def main(folder: Path) -> int:
    """Start the daemons, wait until standard input closes, end all that was started."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Ctrl-C and a killed session reach the test run, whose end reaches us by the pipe.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda *_: os.close(0))
    daemons: dict[str, list[str]] = json.loads(sys.stdin.readline())
    pids = []
    for name, command in daemons.items():
        with open(folder / f"{name}.out", "wb") as output:
            pids.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT).pid
            )
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass

    # Steps first: a daemon that is told to go waits for nobody's job.
    end([pid for pid in descendants(os.getpid()) if pid not in pids], signal.SIGKILL)
    end(pids, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while left := descendants(os.getpid()):
        if time.monotonic() > deadline:
            end(left, signal.SIGKILL)
        reap()
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
