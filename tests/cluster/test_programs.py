"""Whole programs on several hosts: the demo, an HPC code, what is beyond c10d, and a job of many ranks."""

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

pytestmark = [pytest.mark.skipif(LIBRARY == "none", reason="this environment has no mpirun"), pytest.mark.timeout(600)]
HERE = Path(__file__).parent
JOBS = ROOT / "slurm/jobs"
QUIET = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
SMOKE, MPICH = pytest.mark.smoke, pytest.mark.mpich
DEMO = (JOBS / "train_digits.py", "--epochs", "5", "--global-batch")
HEAT = (JOBS / "heat2d.py", "--check", "--steps", "200")
ACCURATE = [r"held-out accuracy (0\.9\d*|1\.0*) after 5 epochs"]
ALIKE = [r"largest difference to the serial result (0\.0e\+00|\d\.\de-[1-9]\d)$"]
SUMS = ["^rank order: 46cf4ed77ef134ad$"]  # on every MPI, wherever the ranks run
SEEN = ["^rank 3 on n2 made the others wait$", "^0 n1 in$", "^1 n1 in$", "^2 n2 in$", "^3 n2 LATE$"]

# the program, how many ranks each host has, and what is printed
PROGRAMS = [
    pytest.param((*DEMO, "64"), (2, 2), ACCURATE, marks=SMOKE),
    pytest.param((*DEMO, "48"), (1, 2), ACCURATE, marks=SMOKE),
    (HEAT, (2, 2), ALIKE),
    (HEAT, (1, 1, 1), ALIKE),
    pytest.param((HERE / "reproducible_job.py",), (2, 2), SUMS, marks=SMOKE),
    ((HERE / "reproducible_job.py",), (4,), SUMS),
    ((HERE / "reproducible_job.py",), (1, 1, 1, 1), SUMS),
    pytest.param((HERE / "seen_job.py",), (2, 2), SEEN, marks=SMOKE),
    pytest.param((HERE / "node_shared_job.py",), (2, 2), ["all see their node's"], marks=SMOKE),
    pytest.param((HERE / "window_job.py",), (2, 2), ["all written"], marks=[SMOKE, MPICH]),
]


@pytest.mark.parametrize(("program", "slots", "printed"), PROGRAMS, ids=lambda each: getattr(each[0], "stem", ""))
def test_a_program(cluster: Cluster, program: tuple[object, ...], slots: tuple[int, ...], printed: list[str]) -> None:
    command = [sys.executable, *map(str, program)]
    done = launch.run(cluster, slots, command, seconds=200, HPCDIST_DEBUG_SECRET="5ec2e7", **QUIET)
    assert done.returncode == 0, done.stderr
    assert not [each for each in printed if re.search(each, done.stdout, re.MULTILINE) is None], done.stdout


@pytest.mark.parametrize("each", [4, 8])
def test_many_ranks_start_work_shrink_and_end(each: int) -> None:
    """32 and 64 ranks on 8 hosts; the figures are on the docs' page on scaling."""
    with Cluster(8) as cluster:
        command = [sys.executable, str(HERE / "scale_job.py"), "shrink"]
        done = launch.run(cluster, (each,) * 8, command, seconds=500, SCALE_TIMEOUT="500", **QUIET)
        assert done.returncode == 0, done.stderr
        steps = [json.loads(line)["step"] for line in done.stdout.splitlines()]
        assert "shrink_group" in steps
        assert steps[-1] == "all, from the start of Python"


def test_the_report_of_many_ranks_names_the_missing_one() -> None:
    with Cluster(8) as cluster:
        command = [sys.executable, str(HERE / "scale_job.py"), "report"]
        done = launch.run(cluster, (4,) * 8, command, seconds=500, SCALE_TIMEOUT="60", **QUIET)
        assert done.returncode != 0
        assert (
            len(re.findall(r"\[rank \d+ of 32\] hpcdist: .*\n  rank 31 has not entered all_reduce", done.stderr)) == 1
        )
        assert "ranks 0 to 30 are in it" in done.stderr
