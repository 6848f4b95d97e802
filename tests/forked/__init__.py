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
from pathlib import Path
from typing import Any

from tests import programs

HERE = Path(__file__).parent


@functools.cache
def server() -> str:
    """Start this process's server, once, and return the name of its socket."""
    path = str(programs.TEMPORARY / "forked")
    process = subprocess.Popen(
        [sys.executable, HERE / "server.py", path],
        stdin=subprocess.PIPE,  # it ends with this process, however that ends
        stdout=subprocess.PIPE,
        env=programs.environment(),
        start_new_session=True,
    )
    programs.at_exit(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == b"listens\n"
    return path


def python() -> list[str]:
    """Return the words that run a script, ``-c CODE`` or ``-m MODULE``, as ``sys.executable`` does."""
    return [sys.executable, "-I", "-S", str(HERE / "client.py"), server()]


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
