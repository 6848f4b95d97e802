"""Table and dispatch of the commands: ``python -m hpcdist COMMAND`` and the console script ``hpcdist``."""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
from typing import Any, TextIO

import hpcdist
from hpcdist.cli.job_arguments import is_first_rank

# each is a module here: its ``parser()``, but for submit's own, and ``run(args)``, which returns the exit status
COMMANDS = {
    "demo": "train a small network on some ranks of this machine",
    "doctor": "test what a job needs here, and say how to fix what fails",
    "bench": "time hpcdist beside mpi4py, gloo and a memory copy, in one run",
    "tune": "measure from which size on shared memory is faster here",
    "explain": "say what a message means, what causes it and how to fix it",
    "debug": "show a running job: each rank's call, stack, counts and times",
    "run": "run an unmodified script of torch.distributed on hpcdist",
    "submit": "submit a script to Slurm, or write its job script",
    "completion": "print a shell's script that completes these words",
}
UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)
MORE = "options of a command: python -m hpcdist COMMAND --help; also: --version"


def module_of(command: str) -> Any:
    """Import a command, and return its module."""
    return importlib.import_module(f"hpcdist.cli.{command}")


def usage() -> str:
    lines = [f"  {name:<10} {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(["usage: python -m hpcdist COMMAND [ARGUMENT...]", "", "commands:", *lines, "", MORE])


def tell(text: str, file: TextIO | None = None) -> None:
    if is_first_rank():
        print(text, file=file)


def main(args: list[str] | None = None) -> int:
    """Run one command, by its name and arguments; return its exit status, 2 for a wrong call, 130 after Ctrl-C."""
    given = sys.argv[1:] if args is None else args
    if given and given[0] == "run":  # its output and errors are its script's
        return dispatched(given)
    try:
        if sys.stdout is None:  # closed by the caller (`>&-`)
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lives
        elif isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a locale may lack some characters
        status = dispatched(given)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own output at its end
        if isinstance(error, BrokenPipeError):  # the reader has ended, such as `head`
            return 128 + signal.SIGPIPE
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return status


def dispatched(given: list[str]) -> int:
    if given and given[0] in ("-h", "--help"):
        tell(usage())
        return 0
    if given and given[0] == "--version":
        tell(f"hpcdist {hpcdist.__version__}")
        return 0
    if not given or given[0] not in COMMANDS:
        wrong = f"\nerror: no command {given[0]!r} (known: {', '.join(COMMANDS)})" if given else ""
        tell(usage() + wrong, sys.stderr)
        return 2
    return int(module_of(given[0]).run(given[1:]))
