"""Checkpoints that are written while the job goes on, on MPI, without MASTER_ADDR."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.faults.launch import FIRST, HERE, Job, some

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
SCRIPT = HERE / "checkpoint_job.py"


@pytest.mark.parametrize("launcher", FIRST)
@pytest.mark.parametrize("variant", some(["THREAD", "PROCESS"], 1))
def test_training_goes_on_while_a_checkpoint_is_written(launcher: str, variant: str, tmp_path: Path) -> None:
    with Job(launcher, 2, [str(tmp_path)], SCRIPT, CHECKPOINT_BY=variant, CHECKPOINT_SAVES="3") as job:
        assert job.finish(120) == 0, job.stderr()
        saves = job.events("saved")
    assert len(saves) == 6
    # a save of a crowded machine may end within one step; one that kept the training waiting would do so each time
    assert any(each["meanwhile"] > 1 for each in saves), saves
    assert len(list(tmp_path.glob("*/.metadata"))) == 3


@pytest.mark.parametrize("launcher", FIRST)
def test_a_job_that_was_killed_in_a_save_goes_on_from_the_last_whole_one(launcher: str, tmp_path: Path) -> None:
    """On another number of ranks each time; the kills come at any moment."""
    chance, steps = random.Random(0), [0]
    for ranks in some([3, 2, 1, 4, 2], 3):
        with Job(launcher, ranks, [str(tmp_path)], SCRIPT) as job:
            begun = job.expect("begins", ranks)
            assert [each["step"] for each in begun] == [steps[-1]] * ranks, job.stderr()
            job.wait("saved", 2 * ranks)
            time.sleep(chance.uniform(0.0, 0.2))
            for pid in job.pids().values():
                os.kill(pid, signal.SIGKILL)
            job.finish(90)
            steps.append(max(int(each.parent.name) for each in tmp_path.glob("*/.metadata")))
    assert steps == sorted(set(steps)), steps
