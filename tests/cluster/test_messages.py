"""Messages between hosts: receives from any rank end, whoever came first."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster import launch
from tests.cluster.hosts import Cluster
from tests.faults.launch import LIBRARY

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.mpich,
    pytest.mark.skipif(LIBRARY == "none", reason="this environment has no mpirun"),
]
JOB = Path(__file__).with_name("any_source_job.py")


@pytest.mark.parametrize("slots", [(1, 2), (2, 2)], ids=str)
def test_a_receive_from_any_rank_ends_for_a_message_that_was_there_before_it(
    cluster: Cluster, slots: tuple[int, ...]
) -> None:
    done = launch.run(cluster, slots, [sys.executable, str(JOB)], OMP_NUM_THREADS="1")
    assert done.stdout == "all received\n", done.stderr
    assert done.returncode == 0
