"""Whole programs on several hosts: the demo, an HPC code that owns MPI, and a job of many ranks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.cluster import launch
from tests.cluster.hosts import Cluster
from tests.faults.launch import LIBRARY
from tests.programs import ROOT

pytestmark = [
    pytest.mark.skipif(LIBRARY == "none", reason="this environment has no mpirun"),
    pytest.mark.timeout(600),
]
JOBS = ROOT / "slurm/jobs"
QUIET = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}


@pytest.mark.smoke
@pytest.mark.parametrize("slots", [(2, 2), (1, 2)], ids=str)
def test_demo(cluster: Cluster, slots: tuple[int, ...]) -> None:
    command = [sys.executable, str(JOBS / "train_digits.py"), "--epochs", "5", "--global-batch", str(16 * sum(slots))]
    done = launch.run(cluster, slots, command, seconds=200, **QUIET)
    assert done.returncode == 0, done.stderr
    found = re.search(r"held-out accuracy (\d\.\d+) after 5 epochs", done.stdout)
    assert found, done.stdout
    assert float(found[1]) > 0.9


@pytest.mark.parametrize("slots", [(2, 2), (1, 1, 1)], ids=str)
def test_a_code_that_owns_mpi(cluster: Cluster, slots: tuple[int, ...]) -> None:
    command = [sys.executable, str(JOBS / "heat2d.py"), "--check", "--steps", "200"]
    done = launch.run(cluster, slots, command, seconds=200, **QUIET)
    assert done.returncode == 0, done.stderr
    found = re.search(r"largest difference to the serial result (\S+)", done.stdout)
    assert found, done.stdout
    assert float(found[1]) < 1e-9


@pytest.mark.parametrize("each", [4, 8])
def test_many_ranks_start_work_shrink_and_end(each: int) -> None:
    """32 and 64 ranks on 8 hosts; the figures are on the docs' page on scaling."""
    with Cluster(8) as cluster:
        command = [sys.executable, str(Path(__file__).with_name("scale_job.py")), "shrink"]
        done = launch.run(cluster, (each,) * 8, command, seconds=500, SCALE_TIMEOUT="500", **QUIET)
        assert done.returncode == 0, done.stderr
        steps = [json.loads(line)["step"] for line in done.stdout.splitlines()]
        assert "shrink_group" in steps
        assert steps[-1] == "all, from the start of Python"


def test_the_report_of_many_ranks_names_the_missing_one() -> None:
    with Cluster(8) as cluster:
        command = [sys.executable, str(Path(__file__).with_name("scale_job.py")), "report"]
        done = launch.run(cluster, (4,) * 8, command, seconds=500, SCALE_TIMEOUT="60", **QUIET)
        assert done.returncode != 0
        assert (
            len(re.findall(r"\[rank \d+ of 32\] hpcdist: .*\n  rank 31 has not entered all_reduce", done.stderr)) == 1
        )
        assert "ranks 0 to 30 are in it" in done.stderr
