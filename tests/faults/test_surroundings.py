"""A job whose surroundings fail: it is suspended, a disk hangs, the kernel shows no processes, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.faults.launch import FIRST, HERE, IMPORTS, LAUNCHERS, LIBRARY, PLAIN, Job, Started, command, settings

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]
TIMEOUT = 2.0
PROGRAM = """
dist.init_process_group(timeout=timedelta(seconds=60))
dist.barrier()
dist.group.WORLD.timeout = timedelta(seconds=float(sys.argv[1]))
tell("ready")
if ME == 1:
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.05)
dist.all_reduce(torch.ones(8))
tell("passed")
dist.destroy_process_group()
"""
MOUNT_HANGING = """
import ctypes, os, sys
device = os.open("/dev/fuse", os.O_RDWR)
os.set_inheritable(device, True)
options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
if ctypes.CDLL(None, use_errno=True).mount(b"hangs", sys.argv[1].encode(), b"fuse", 0, options):
    sys.exit(os.strerror(ctypes.get_errno()))
os.execvp(sys.argv[2], sys.argv[2:])
"""
OWN_MOUNTS = ["unshare", "--mount", "--propagation", "private"]


def needs(trial: list[str]) -> pytest.MarkDecorator:
    """Skip a test where a command that shows that its surroundings can be made does not work, as without root."""
    try:
        works = subprocess.run([*OWN_MOUNTS, *trial], capture_output=True, timeout=30).returncode == 0
    except OSError:
        works = False
    return pytest.mark.skipif(not works, reason=f"takes root and a kernel that lets it run {trial[-1]}")


def started(line: list[str], **more: str) -> Started:
    """Start a job."""
    return Started(line, settings(**more), Path(tempfile.mkdtemp(prefix="hpcdist-fault-")))


@pytest.mark.parametrize("launcher", FIRST)
def test_a_job_that_was_suspended_goes_on(launcher: str, tmp_path: Path) -> None:
    """As by `scontrol suspend`, for longer than its calls may take: the time does not count."""
    gate = tmp_path / "gate"  # that rank 1 waits for
    with Job(launcher, 3, ["5", str(gate)], PROGRAM) as job:
        job.expect("ready", 3)
        time.sleep(1.5)  # the watchdogs have seen the calls
        for pid in job.pids().values():
            os.kill(pid, signal.SIGSTOP)
        time.sleep(6)
        for pid in job.pids().values():
            os.kill(pid, signal.SIGCONT)
        time.sleep(1)
        gate.touch()
        assert job.finish(30) == 0, job.stderr()
        assert len(job.events("passed")) == 3
        assert "has not ended" not in job.stderr()


@needs([sys.executable, "-c", MOUNT_HANGING, "/mnt", "true"])
@pytest.mark.parametrize("launcher", PLAIN)
def test_traces_on_a_file_system_that_never_answers_do_not_keep_the_job(launcher: str, tmp_path: Path) -> None:
    """The call may hang for the same reason: a rank waits for a file."""
    hanging = tmp_path / "hanging"
    hanging.mkdir()
    more = {"TORCH_FR_DUMP_TEMP_FILE": f"{hanging}/trace_", "FAULT_TIMEOUT": str(TIMEOUT)}
    line = command(launcher, 3, HERE / "job.py", ["stop", "all_reduce"])
    with started([*OWN_MOUNTS, sys.executable, "-c", MOUNT_HANGING, str(hanging), *line], **more) as job:
        job.wait("fault")
        assert job.finish(TIMEOUT + 15) != 0
        assert "rank 1 has not entered all_reduce" in job.stderr()
        assert "its process is stopped" in job.stderr()
        assert "traces: nowhere yet (it takes more than 2 s)\n" in job.stderr()


@needs(["sh", "-c", "mount -t tmpfs none /proc"])
@pytest.mark.parametrize("launcher", [each for each in FIRST if LIBRARY == "openmpi"])
def test_no_rank_is_taken_for_dead_if_the_kernel_shows_no_processes(launcher: str, tmp_path: Path) -> None:
    """As in containers with ``hidepid``. A rank that is known to have ended is waited for 2 s only.

    MPICH's MPI_Init fails without /proc.
    """
    python = [*OWN_MOUNTS, "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh", sys.executable]
    program, gate = tmp_path / "script.py", tmp_path / "gate"
    program.write_text(IMPORTS + PROGRAM)
    with started(command(launcher, 3, program, ["60", str(gate)], python=python)) as job:
        job.expect("ready", 3)
        time.sleep(4)
        gate.touch()
        assert job.finish(90) == 0, job.stderr()
        assert len(job.events("passed")) == 3
        assert "hpcdist:" not in job.stderr()


FAILING = """
from hpcdist.watch.watchdog import RUNNING

def fail(*_, **__):
    raise OSError("nothing is left")

dist.init_process_group(timeout=timedelta(seconds=60))
dist.barrier()
dist.group.WORLD.timeout = timedelta(seconds=1)
if ME == 1:
    time.sleep(60)
RUNNING[0].channel.ask = dist.group.WORLD.cpu.faults.interrupt = fail
dist.all_reduce(torch.ones(8))
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_call_ends_though_all_that_the_watchdog_tries_fails(launcher: str) -> None:
    with Job(launcher, 2, script=FAILING) as job:
        assert job.finish(90) != 0
        text = job.stderr()
    assert "all_reduce #2 of float32 [8] on group '0' has not ended" in text
    assert "where the others are could not be found out" in text
    assert "the watchdog goes on after an error of its own" in text
    assert "the job is aborted" in text
