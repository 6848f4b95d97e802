"""Elastic jobs over several hosts: they go on when ranks die, and when a whole host does."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster
from tests.cluster.launch import Job
from tests.cluster.test_faults import GONE_SECONDS, START_SECONDS, ULFM, assert_gone
from tests.faults.test_elastic_job import ends

SCRIPT = Path(__file__).parents[1] / "faults" / "elastic_job.py"
pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.mark.smoke
@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize("by", ["mpi", "window"])
def test_spares_take_the_places_of_the_ranks_of_a_dead_host(cluster: Cluster, launcher: str, by: str) -> None:
    """All ranks of the second host die, at any moment; those of the third one wait."""
    plan = {"spares": 2, "steps": 200, "pause": 0.02, "by": by}
    with Job(cluster, launcher, (2, 2, 2), SCRIPT, [json.dumps(plan)]) as job:
        job.wait("resumed", 4, START_SECONDS)
        time.sleep(0.5)
        for rank in (2, 3):
            job.signal(rank, signal.SIGKILL)
        died = time.time()
        assert job.finish(START_SECONDS) == 0, job.stderr()
        assert_gone(job, GONE_SECONDS)
        events = [*job.events(), *({"rank": rank, "event": "dies", "time": died} for rank in (2, 3))]
        assert [each["rank"] for each in ends(events, job.stderr())] == [0, 1, 4, 5]


@pytest.mark.parametrize("launcher", ULFM)
def test_the_death_of_a_launchers_daemon_ends_the_job(cluster: Cluster, launcher: str) -> None:
    """PRRTE 3, which Open MPI 5 brings along, gives the job up: nothing that MPI could survive."""
    with Job(cluster, launcher, (2, 2, 2), SCRIPT, [json.dumps({"spares": 2, "steps": 2000})]) as job:
        job.wait("resumed", 4, START_SECONDS)
        cluster.hosts[1].end_processes()
        job.finish(20)  # mostly with 0
        assert "PRTE has lost communication with a remote daemon" in job.stderr()
        assert_gone(job, GONE_SECONDS)
