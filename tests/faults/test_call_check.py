"""A rank that waits in the check of calls, for others that have not begun theirs, is ended like one that MPI blocks."""

from __future__ import annotations

import re

import pytest

from tests.faults.launch import FIRST, LAUNCHERS, PLAIN, Job
from tests.forked import python
from tests.ports import free_port
from tests.programs import output, start

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]
PROGRAM = """
dist.init_process_group()
revoked, late, dead = (dist.new_group(timeout=timedelta(seconds=limit)) for limit in (60, 2, 60))
values = torch.ones(8)
for name, group in (("late", late), ("revoked", revoked), ("dead", dead)):
    dist.barrier(group=group)
    text = ""
    if ME == 0:
        try:
            for _ in range(1000):  # MPI takes them on the root, whether or not the others come
                dist.broadcast(values, 0, group=group)
        except dist.DistBackendError as error:
            text = str(error)
    elif ME == 1:
        time.sleep(0.5)
        if name == "revoked":
            dist.revoke_process_group(group)
        elif name == "dead":
            os.kill(os.getpid(), 9)
    if name != "dead":
        dist.barrier()
    tell(name, text=text)
if ME:
    time.sleep(100)
os._exit(0)
"""
SAID = {"late": "has not ended after 2", "revoked": "gave the group up", "dead": "rank 1 of the group died"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_root_that_is_ahead_of_the_others(launcher: str) -> None:
    with Job(launcher, 3, script=PROGRAM) as job:
        if launcher in PLAIN:  # the first group's timeout ends the job
            assert job.finish(90) != 0
            assert "not ended after 2" in job.stderr()
            return
        job.wait("dead", 2)
        told = {each["event"]: each["text"] for each in job.events() if each["rank"] == 0}
        assert told.keys() == SAID.keys(), job.stderr()
        assert all(words in told[name] for name, words in SAID.items()), told


QUIET = """
case = sys.argv[1]
imitate_nodes()
dist.init_process_group()
if case == "lists":
    dist.new_group([0, 1] if ME == 0 else [0, 1, 2], use_local_synchronization=True)
dist.new_group()  # a later one is not the first of its kind
for _ in range(3 if ME == 2 else 4):
    dist.broadcast(torch.ones(3), 0)  # its root waits for nobody
if "new group" in case:
    dist.new_group()
"""
NAMED = {
    "one node": r"ranks 0, 1: broadcast of 3 elements.*rank 2: destroy_process_group",
    "several nodes": r"rank [01]: broadcast of 3 elements.*rank 2: destroy_process_group",
    "several nodes, a new group": r"rank [01]: broadcast of 3 elements.*rank 2: new_group",
    "lists": r"new_group: rank \d gave the ranks \[0, 1(, 2)?\], and rank \d gave \[0, 1(, 2)?\]",
}


@pytest.mark.parametrize("launcher", FIRST)
@pytest.mark.parametrize("case", NAMED)
def test_what_blocks_nobody_and_what_mpi_does_not_know(case: str, launcher: str) -> None:
    """A program ends though a rank has made fewer calls; members of a group make it of different ranks."""
    with Job(launcher, 3, [case], QUIET, FAULT_NODES="a,b,c" if "several nodes" in case else "") as job:
        assert job.finish(60) != 0
        assert re.search(NAMED[case], job.stderr()), job.stderr()


ON_GLOO = """
import sys, time
from datetime import timedelta
import torch
import hpcdist as dist

case, limit = sys.argv[1], time.monotonic() + 20
dist.init_process_group("gloo", timeout=timedelta(seconds=6))
rank, values = dist.get_rank(), torch.ones(3)
for _ in range(50):
    dist.all_reduce(values)
try:
    if case == "roots":  # nobody waits
        dist.broadcast(values, rank)
        while time.monotonic() < limit and dist.group.WORLD.backend("cpu").call_log().failure is None:
            time.sleep(0.1)
        dist.all_reduce(values)
    elif case == "objects":
        dist.all_gather_object([None] * 2, 0) if rank else dist.all_reduce(values)
    elif rank == 0:
        dist.all_reduce(values, async_op=True).wait()
    if case != "end":
        raise SystemExit(3)
    dist.destroy_process_group()
except ValueError as error:
    print(type(error).__name__, error)
"""
SAID_ON_GLOO = {
    "roots": "rank 0: broadcast of 3 elements, float32, root 0; rank 1: broadcast of 3 elements, float32, root 1",
    "objects": "rank 0: all_reduce of 3 elements, float32, SUM; rank 1: all_gather_object",
    "end": "rank 0: all_reduce of 3 elements, float32, SUM; rank 1: destroy_process_group",
}


@pytest.mark.parametrize("case", SAID_ON_GLOO)
def test_calls_that_differ_on_gloo(case: str) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [start([*python(), "-c", ON_GLOO, case], RANK=rank, **address) for rank in "01"]
    for each in ranks:
        said, errors = output(each, 90)
        assert each.returncode == 0, errors
        assert f"CallsDifferError the ranks of a group of 2 do not make the same call. {SAID_ON_GLOO[case]}" in said
