"""Checkpoints under srun: written while the job goes on, and after a kill in mid-save taken up by other ranks."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster
from tests.cluster.slurm import PMI, Slurm, why_not
from tests.faults.launch import LIBRARY, Started

SCRIPT = Path(__file__).parents[1] / "faults" / "checkpoint_job.py"
SECONDS = 150.0
pytestmark = [
    pytest.mark.faults,
    pytest.mark.slurm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


@pytest.mark.parametrize("variant", ["THREAD", "PROCESS"])
def test_a_job_that_was_killed_in_a_save_goes_on_from_the_last_whole_one(cluster: Cluster, variant: str) -> None:
    """On another number of ranks each time, without MASTER_ADDR."""
    folder = Path(tempfile.mkdtemp(dir=cluster.shared))
    chance, steps = random.Random(0), [0]
    with Slurm(cluster, 2) as slurm:
        settings = {**slurm.environment, "CHECKPOINT_BY": variant, "OMPI_MCA_mpi_yield_when_idle": "1"}
        for ranks in (4, 2, 3):
            words = ["srun", "--nodes=2", f"--ntasks={ranks}", f"--mpi={PMI[LIBRARY]}"]
            command = slurm.hosts[0].command([*words, sys.executable, "-u", str(SCRIPT), str(folder)])
            with Started(command, settings, Path(tempfile.mkdtemp(dir=cluster.shared))) as job:
                begun = job.wait("begins", ranks, SECONDS)
                assert [each["step"] for each in begun] == [steps[-1]] * ranks, job.stderr()
                saved = job.wait("saved", 2 * ranks, SECONDS)
                assert any(each["meanwhile"] > 1 for each in saved), saved  # steps that were made while it was written
                time.sleep(chance.uniform(0.0, 0.2))
                for host in slurm.hosts:
                    own = [str(pid) for pid, text in host.processes().items() if text.startswith(sys.executable)]
                    host.run(["kill", "-KILL", *own])  # Slurm may have been faster
                job.finish(SECONDS)
            steps.append(max(int(each.parent.name) for each in folder.glob("*/.metadata")))
    assert steps == sorted(set(steps)), steps
