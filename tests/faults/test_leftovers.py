"""A job that is killed leaves nothing behind, neither processes nor files in the node's memory."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from hpcdist.core.waiting import wait_until
from tests.faults.launch import HERE, LIBRARY, PLAIN, Job
from tests.programs import is_alive

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]
END_SECONDS = 20.0
SHARED = ("/dev/shm/", "/tmp/")


def shared_files(pids: list[int]) -> set[Path]:
    """Return the files through which processes share memory, also those whose name is gone already."""
    found = set()
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            _, access, _, _, _, *path = line.split(maxsplit=5)
            if access.endswith("s") and path and path[0].startswith(SHARED):
                found.add(Path(path[0].removesuffix(" (deleted)")))
    return found


def kill_under_way(job: Job, victim: str) -> set[Path]:
    """Kill a rank, or what started the job, amid its calls; return the files that its ranks shared."""
    job.expect("ready", 3)
    time.sleep(0.3)
    pids = job.pids()
    shared = shared_files(list(pids.values()))
    assert shared, "ranks of one node share a window at the least"
    os.kill(pids[1] if victim == "rank" else job.process.pid, signal.SIGKILL)
    assert job.finish(END_SECONDS) != 0
    job.until(lambda: not any(map(is_alive, pids.values())), END_SECONDS)
    return shared


def remaining(files: set[Path], seconds: float = 5.0) -> list[Path]:
    """Return which files are still there after a moment, and remove them."""
    wait_until(lambda: not any(path.exists() for path in files), seconds)
    left = sorted(path for path in files if path.exists())
    for path in left:
        path.unlink()
    return left


@pytest.mark.quick
@pytest.mark.parametrize("launcher", PLAIN)
def test_a_job_whose_rank_is_killed_leaves_nothing(launcher: str) -> None:
    with Job(launcher, 3, ["stop"], HERE / "signal_job.py", is_forked=False) as job:
        assert remaining(kill_under_way(job, "rank")) == []


@pytest.mark.parametrize("launcher", PLAIN)
def test_no_rank_outlives_its_mpirun(launcher: str) -> None:
    with Job(launcher, 3, ["stop"], HERE / "signal_job.py", is_forked=False) as job:
        left = remaining(kill_under_way(job, "mpirun"))
    if LIBRARY == "mpich":  # Open MPI's files are removed by the mpirun that was killed
        assert left == []


@pytest.mark.parametrize("launcher", [each for each in PLAIN if LIBRARY == "mpich"])
def test_what_mpi_opens_later_needs_no_name_that_is_gone(launcher: str) -> None:
    """Windows, large messages, groups, and processes that are started later."""
    with Job(launcher, 3, [], HERE / "later_job.py", is_forked=False) as job:
        assert job.finish(120) == 0, job.stderr()
        assert len(job.events("done")) == 3, job.stderr()
        assert [each["segments"] for each in job.events("done")] == [[]] * 3
