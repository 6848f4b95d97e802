"""The fork server, which starts most programs of the tests, leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpcdist.core.readiness import readable
from tests import programs

STARTS = """
import subprocess, sys, time
from tests import forked
code = "import os, time; print(os.getpid(), os.getppid(), flush=True); time.sleep(100)"
client = subprocess.Popen([*forked.python(), "-c", code])
print(client.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no descriptors of processes here")
def test_the_fork_server_and_its_children_end_with_the_process_that_started_it():
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS], cwd=programs.ROOT, stdout=subprocess.PIPE, env=programs.environment()
    )
    programs.at_exit(process.kill)
    pids = [int(each) for _ in range(2) for each in process.stdout.readline().split()]
    assert len(pids) == 3  # the client, the program and its parent, the server
    ends = [os.fdopen(os.pidfd_open(pid)) for pid in pids]
    assert readable(ends, 0) == []
    process.kill()
    process.wait()
    for end in ends:
        assert readable([end], 30) == [end]
        end.close()
