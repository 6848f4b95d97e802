"""What hpcdist has beyond c10d, on several hosts: repeatable sums, and a job that is seen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster import launch
from tests.cluster.hosts import Cluster
from tests.faults.launch import LIBRARY

pytestmark = pytest.mark.skipif(LIBRARY == "none", reason="this environment has no mpirun")
SMOKE = pytest.param((2, 2), marks=pytest.mark.smoke)
HERE = Path(__file__).parent
# of the job's sums, on every MPI
DIGEST = "rank order: 46cf4ed77ef134ad\n"


def told(cluster: Cluster, slots: tuple[int, ...], job: str, **environment: str) -> str:
    """Return what a job's ranks printed."""
    done = launch.run(cluster, slots, [sys.executable, str(HERE / job)], OMP_NUM_THREADS="1", **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("slots", [SMOKE, (4,), (1, 1, 1, 1)], ids=str)
def test_sums_have_the_same_bits_wherever_ranks_run(cluster: Cluster, slots: tuple[int, ...]) -> None:
    assert told(cluster, slots, "reproducible_job.py") == DIGEST


@pytest.mark.parametrize("slots", [SMOKE], ids=str)
def test_a_late_rank_is_seen_from_another_host(cluster: Cluster, slots: tuple[int, ...]) -> None:
    shown = told(cluster, slots, "seen_job.py", HPCDIST_DEBUG_SECRET="5ec2e7").splitlines()
    assert shown[0] == "rank 3 on n2 made the others wait"
    assert sorted(shown[1:]) == ["0 n1 in", "1 n1 in", "2 n2 in", "3 n2 LATE"]
