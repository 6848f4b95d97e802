"""Programs forked from one process that has imported torch: they start in 50 ms, and not in 1.5 s.

For programs whose start is not what the test is about. ``python()`` returns what stands in the place of
``sys.executable``: a small client, which any launcher may start. It hands its arguments, environment, folder and open
files to the server, whose child becomes the program; it passes signals on, and ends as the child did. If the client is
killed, so is the child; if this process is, so are all.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import programs

HERE = Path(__file__).parent


def start(path: str, environment: dict[str, str], enter: Callable[[list[str]], list[str]] = list) -> int:
    """Start a server; return its process id, as it sees it.

    Args:
        path: its socket's name.
        environment: what it is started with, but PYTHONPATH, which is each program's own.
        enter: returns the command line that runs a command where the server is to run.
    """
    process = subprocess.Popen(
        enter([sys.executable, str(HERE / "server.py"), path]),
        stdin=subprocess.PIPE,  # it ends with this process, however that ends
        stdout=subprocess.PIPE,
        env={name: value for name, value in environment.items() if name != "PYTHONPATH"},
        start_new_session=True,
    )
    programs.at_exit(process.kill)
    assert process.stdout is not None
    return int(process.stdout.readline())


def words(path: str) -> list[str]:
    """Return the words that have the server of that socket run a script, ``-c CODE`` or ``-m MODULE``."""
    return [sys.executable, "-I", "-S", str(HERE / "client.py"), path]


@functools.cache
def server() -> str:
    """Start this process's server, once, and return the name of its socket."""
    path = str(programs.temporary_folder() / "forked")
    start(path, programs.environment())
    return path


def python() -> list[str]:
    """Return the words that run a script, ``-c CODE`` or ``-m MODULE``, as ``sys.executable`` does."""
    return words(server())


def mpirun(ranks: int, program: list[object], timeout: float = 60, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a forked program on some ranks to its end, as ``programs.mpirun`` does."""
    return programs.mpirun(ranks, program, timeout, python=python(), **more)


def folder_with_python(folder: Path) -> Path:
    """Write a program ``python`` that is forked to a folder, which may come first on a PATH, and return the folder."""
    folder.mkdir(exist_ok=True)
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {" ".join(python())} "$@"\n')
    program.chmod(0o755)
    return folder
