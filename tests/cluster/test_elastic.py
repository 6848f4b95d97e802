"""Elastic jobs over several hosts: they go on when ranks die, and when a whole host does."""

from __future__ import annotations

import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Cluster, Host
from tests.cluster.launch import Job
from tests.cluster.slurm import Slurm, why_not
from tests.cluster.test_addresses import run_on_each
from tests.cluster.test_faults import GONE_SECONDS, START_SECONDS, ULFM, assert_gone
from tests.faults.test_elastic_job import ends

SCRIPT = Path(__file__).parents[1] / "faults" / "elastic_job.py"
TEMPLATE = Path(__file__).parents[2] / "slurm" / "elastic.sbatch"
HOST_SECONDS = 30  # until the connections to a silent host are broken, and the job goes on
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


@pytest.mark.slurm
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize(
    ("lose", "kept"),
    [
        (lambda hosts, pids: hosts[1].signal(pids[2], signal.SIGKILL), [0, 1, 3, 4, 5]),
        (lambda hosts, pids: [hosts[each // 2].signal(pids[each], signal.SIGKILL) for each in (0, 2, 3, 4)], [1, 5]),
        (lambda hosts, _: hosts[1].end_processes(), [0, 1, 4, 5]),
        (lambda hosts, _: hosts[1].set_port(False), [0, 1, 4, 5]),
    ],
    ids=["rank", "most", "processes", "link"],
)
def test_a_host_that_is_lost_is_survived_under_srun(
    cluster: Cluster, launcher: str, lose: Callable[[list[Host], dict[int, int]], None], kept: list[int]
) -> None:
    """The template's own job: Slurm's daemons die with the host, or its cable is cut."""
    folder = tempfile.mkdtemp(dir=cluster.shared)
    output = Path(folder, "job.out")
    plan = {"spares": 2, "steps": 200, "pause": 0.02, "timeout": 60}
    options = ["--nodes=3", "--ntasks-per-node=2", f"--output={output}", f"--chdir={folder}"]
    with Slurm(cluster, 3) as slurm:
        slurm.environment |= {"HPCDIST_PYTHON": sys.executable, "HPCDIST_MPI": "pmix"}
        done = slurm.run("sbatch", *options, str(TEMPLATE), str(SCRIPT), json.dumps(plan))
        assert done.returncode == 0, done.stderr

        def wait_for(event: str, count: int, seconds: float) -> list[dict[str, Any]]:
            deadline = time.monotonic() + seconds
            while True:
                text = output.read_text() if output.exists() else ""
                told = [json.loads(each) for each in re.findall(r"^{.*}$", text, re.MULTILINE)]
                if len([each for each in told if each["event"] == event]) >= count:
                    return told
                assert time.monotonic() < deadline, text
                time.sleep(0.1)

        told = wait_for("resumed", 4, START_SECONDS)
        time.sleep(0.5)
        lose(cluster.hosts, {each["rank"]: each["pid"] for each in told if each["event"] == "begins"})
        lost = [rank for rank in range(6) if rank not in kept]
        died = [{"rank": rank, "event": "dies", "time": time.time()} for rank in lost]
        wait_for("resumed", 4 + min(4, len(kept)), HOST_SECONDS)
        told = wait_for("end", len(kept), START_SECONDS)
        ends([*told, *died], output.read_text())
        deadline = time.monotonic() + START_SECONDS
        while "ended" not in output.read_text():
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
        assert re.search(r"^job \d+ ended .* with status 0$", output.read_text(), re.MULTILINE), output.read_text()
        assert not [text for text in cluster.hosts[1].processes().values() if text.startswith(sys.executable)]


SLOW = """
import time, torch
import hpcdist as dist
dist.init_process_group()
with dist.elastic() as job:
    for step in job.steps({}, 3):
        with step as number:
            if number == 1 and job.rank == 0:  # 36 MB, more than the kernels keep
                for work in [dist.isend(torch.full((15000,), float(each)), 2) for each in range(600)]:
                    work.wait()
            if number == 1 and job.rank == 2:
                time.sleep(32)
                for each in range(600):
                    got = torch.empty(15000)
                    dist.recv(got, 0)
                    assert got.eq(each).all()
            dist.barrier()
    print("ends", job.size, job.changes, flush=True)
"""


@pytest.mark.slurm
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("launcher", ULFM)
def test_a_rank_that_computes_for_long_while_others_send_to_it_is_not_lost(cluster: Cluster, launcher: str) -> None:
    """Its kernel answers, but the window of its connection is closed for longer than a host may be silent."""
    script = Path(tempfile.mkdtemp(dir=cluster.shared), "slow.py")
    script.write_text(SLOW)
    with Slurm(cluster, 2) as slurm:
        slurm.environment |= {"OMPI_MCA_mpi_ft_enable": "1", "OMPI_MCA_mpi_ft_propagator_with_rbcast": "1"}
        slurm.environment |= {"OMPI_MCA_mpi_yield_when_idle": "1", "OPAL_PREFIX": sys.prefix}
        done = slurm.srun(str(script), seconds=240)
        assert done.stdout.count("ends 4 0") == 4, done.stdout + done.stderr


RESTARTED = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import hpcdist as dist
dist.init_process_group(timeout=timedelta(seconds=20))
dist.all_reduce(total := torch.ones(1))
died = Path(sys.argv[1])
if not died.exists():
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        died.touch()
        os.kill(os.getpid(), 9)
    time.sleep(60)
print("ends", int(total), flush=True)
"""


def test_torchruns_agents_restart_the_ranks_of_all_hosts(cluster: Cluster) -> None:
    """Each agent has a number of restarts of its own: that of a host without a failure stays 0."""
    script = Path(tempfile.mkdtemp(dir=cluster.shared), "restarted.py")
    script.write_text(RESTARTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "n1:29504", str(script), str(script.with_name("died"))]
    told = "".join(run_on_each(cluster, 2, command)).splitlines()
    assert told == ["ends 4"] * 4
