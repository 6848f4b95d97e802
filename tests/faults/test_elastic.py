"""The training job continues after losing a rank, and stops with its checkpoint when it is told to."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.faults.launch import FIRST, HERE, ULFM, Job

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
TRAINING = HERE.parents[1] / "slurm" / "jobs" / "train_digits.py"


def wait_for_epochs(job: Job, count: int) -> None:
    deadline = time.monotonic() + 150
    while len(re.findall(r"^ +\d+ +\d", job.output.read_text(), re.MULTILINE)) < count:
        assert job.process.poll() is None, job.stderr()
        assert time.monotonic() < deadline, job.output.read_text()
        time.sleep(0.02)


def ranks_of(job: Job) -> list[int]:
    """Return the processes of the job's ranks, youngest rank last."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "cmdline").read_bytes()
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            is_rank = b"OMPI_COMM_WORLD_RANK=" in environment or b"PMI_RANK=" in environment
            if b"train_digits" in text and is_rank and str(job.folder).encode() in environment:
                found.append(int(entry.name))
    return sorted(found)


@pytest.mark.parametrize("launcher", ULFM)
def test_training_goes_on_with_a_spare_in_place_of_a_rank_that_was_killed(launcher: str, tmp_path: Path) -> None:
    arguments = ["--elastic", "--epochs", "15", "--spares", "1", "--checkpoint", str(tmp_path)]
    with Job(launcher, 4, arguments, TRAINING) as job:
        wait_for_epochs(job, 2)
        os.kill(ranks_of(job)[2], signal.SIGKILL)
        assert job.finish(200) == 0
        text = job.output.read_text()
    assert "a rank has died, going on with 3" in text, job.stderr()
    reached = re.search(r"held-out accuracy ([\d.]+) after 15 epochs on 3 ranks", text)
    assert reached is not None, text
    assert float(reached.group(1)) >= 0.96
    assert (tmp_path / "15-1" / ".metadata").exists(), "the state was being written when the rank died, and since"


@pytest.mark.parametrize("launcher", FIRST)
def test_training_stops_with_its_checkpoint_and_is_taken_up_again(launcher: str, tmp_path: Path) -> None:
    state = ["--checkpoint", str(tmp_path / "states")]
    with Job(launcher, 2, ["--epochs", "2000", *state], TRAINING) as job:
        wait_for_epochs(job, 2)
        os.kill(ranks_of(job)[1], signal.SIGUSR1)
        assert job.finish(120) == 0, job.stderr()
        text = job.output.read_text()
    done = re.search(r"after (\d+) epochs", text)
    assert "stopped by a signal" in text
    assert done is not None
    epochs = int(done.group(1))
    with Job(launcher, 2, ["--epochs", str(epochs + 1), "--resume", *state], TRAINING) as job:
        assert job.finish(150) == 0, job.stderr()
        assert f"\n{epochs + 1:5d} " in job.output.read_text()
