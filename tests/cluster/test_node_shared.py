"""Memory that ranks share, on several hosts: a copy of each host's own, and windows to memory of other hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster import launch
from tests.cluster.hosts import Cluster
from tests.faults.launch import LIBRARY

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(LIBRARY == "none", reason="this environment has no mpirun"),
]
HERE = Path(__file__).parent


@pytest.mark.parametrize("slots", [(2, 2)], ids=str)
def test_each_host_has_a_copy_of_its_own(cluster: Cluster, slots: tuple[int, ...]) -> None:
    done = launch.run(cluster, slots, [sys.executable, str(HERE / "node_shared_job.py")], OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all see their node's\n", done.stdout


@pytest.mark.mpich
@pytest.mark.parametrize("slots", [(2, 2)], ids=str)
def test_windows_reach_memory_of_other_hosts(cluster: Cluster, slots: tuple[int, ...]) -> None:
    done = launch.run(cluster, slots, [sys.executable, str(HERE / "window_job.py")], OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all written\n"), done.stdout
