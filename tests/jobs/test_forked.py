"""The fork server, which starts most programs of the tests, leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time

import pytest

from hpcdist.core.waiting import wait_readable
from tests import forked, programs

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
    assert wait_readable(ends, 0) == []
    process.kill()
    process.wait()
    for end in ends:
        assert wait_readable([end], 30) == [end]
        end.close()


def begun(seconds):
    """Start a program that lasts so long; return its client, and the process id of the server."""
    code = f"import os, time; print(os.getppid(), flush=True); time.sleep({seconds})"
    client = subprocess.Popen([*forked.python(), "-c", code], stdout=subprocess.PIPE)
    return client, int(client.stdout.readline())


def test_a_client_that_is_killed_when_its_program_ends_does_not_end_the_server():
    """The server finds both at one look: it is stopped meanwhile."""
    client, server = begun(0.2)
    os.kill(server, signal.SIGSTOP)
    time.sleep(0.6)
    asking = subprocess.Popen([*forked.python(), "-c", ""])
    time.sleep(0.2)
    for each in (client, asking):
        each.kill()
        each.wait()
    os.kill(server, signal.SIGCONT)
    assert subprocess.run([*forked.python(), "-c", ""], timeout=60).returncode == 0


def test_a_client_that_is_killed_takes_no_files_from_the_next_program():
    """The server sees that client and the next one at one look, before the killed program has ended."""
    client, server = begun(100)
    os.kill(server, signal.SIGSTOP)
    client.kill()
    client.wait()
    time.sleep(0.2)
    files = range(4, 30)  # among which is the number that the killed client has in the server
    opens = " ".join(f"{each}</dev/null" for each in files)
    code = f"import os; assert [os.fstat(each) for each in {files}]"
    following = subprocess.Popen(["bash", "-c", f'exec {opens}; exec "$@"', "bash", *forked.python(), "-c", code])
    time.sleep(0.2)
    os.kill(server, signal.SIGCONT)
    assert following.wait(60) == 0
