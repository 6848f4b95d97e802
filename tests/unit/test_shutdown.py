"""Shutdown: the stages in their order, also after one that failed."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = """
    import atexit, sys
    from hpcdist.core.shutdown import Stage, register

    def fail():
        print("job")
        raise SystemExit("no") if sys.argv[1:] else RuntimeError("no")

    atexit.register(print, "user's")
    register(Stage.COLLECTIONS, lambda: print("collections"))
    register(Stage.MPI, lambda: print("mpi"))
    register(Stage.JOB, fail)
    register(Stage.PROGRESS, lambda: print("progress"))
"""


def test_the_stages_follow_each_other_whatever_was_registered_first() -> None:
    for arguments in ([], ["exits"]):
        ended = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), *arguments], capture_output=True, text=True, timeout=60
        )
        assert ended.stdout.split() == ["user's", "job", "progress", "mpi", "collections"], ended.stderr
        assert "no" in ended.stderr.split()[-1]
