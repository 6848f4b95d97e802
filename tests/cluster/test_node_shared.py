"""Node-shared tensors on several hosts: each host has one copy, and lack of room on one is an error on all."""

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
JOB = Path(__file__).with_name("node_shared_job.py")


@pytest.mark.parametrize("slots", [(2, 2)], ids=str)
def test_each_host_has_a_copy_of_its_own(cluster: Cluster, slots: tuple[int, ...]) -> None:
    done = launch.run(cluster, slots, [sys.executable, str(JOB)], OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all see their node's\n", done.stdout
