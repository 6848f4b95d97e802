"""Slurm with one slurmd a host: srun starts ranks on several hosts, which meet over MPI and without it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Cluster
from tests.cluster.slurm import Slurm, why_not
from tests.faults.launch import LIBRARY

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.mpich,
    pytest.mark.slurm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
PROGRAM = """
import os, sys, torch
import hpcdist as dist
dist.init_process_group(init_method=sys.argv[1] or None)
values = torch.full((1 << 18,), float(dist.get_rank()))
dist.all_reduce(values)
print(f"<{values[0].item():g} of {dist.get_world_size()} on {os.uname().nodename} by {dist.get_backend()}>", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def slurm(cluster: Cluster) -> Iterator[Slurm]:
    with Slurm(cluster, 2) as started:
        yield started


@pytest.mark.parametrize(
    ("init_method", "backend"),
    [
        pytest.param("", "mpi", marks=pytest.mark.skipif(LIBRARY == "none", reason="this environment has no MPI")),
        ("slurm://", "gloo"),
    ],
)
def test_ranks_of_two_hosts_meet(slurm: Slurm, init_method: str, backend: str) -> None:
    done = slurm.srun("-c", PROGRAM, init_method)
    told = sorted(re.findall("<.*?>", done.stdout))
    assert told == [f"<6 of 4 on n{host} by {backend}>" for host in (1, 1, 2, 2)], done.stderr
    assert done.returncode == 0, done.stderr
    done = slurm.srun("-c", PROGRAM.replace("dist.destroy_process_group()", ""), init_method)
    assert done.returncode == 0, done.stderr
