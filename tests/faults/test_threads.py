"""Calls that several threads of a rank block in, on one group, time out each for itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.launch import FIRST, Job

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
PROGRAM = """
import json, os, threading, time
from datetime import timedelta
import torch
import hpcdist as dist

def tell(event, **more):
    line = json.dumps({"rank": dist.get_rank(), "event": event, "pid": os.getpid(), **more})
    os.write(1, f"\\n{line}\\n".encode())

def receive(tag, how):
    try:
        how(torch.ones(3), 0, tag=tag)
    except dist.DistBackendError as error:
        tell("raised", tag=tag, text=str(error))

def irecv(*args, **more):
    dist.irecv(*args, **more).wait()

dist.init_process_group(timeout=timedelta(seconds=60))
dist.barrier()
dist.group.WORLD.timeout = timedelta(seconds=2)
if dist.get_rank() == 1:
    for tag, how in enumerate((dist.recv, dist.recv, irecv), 1):
        threading.Thread(target=receive, args=(tag, how)).start()
        time.sleep(0.5)
values = torch.ones(3)
for step in range(20):
    if dist.get_rank() == 1:
        dist.send(values, 0)
        dist.recv(values, 0)
        time.sleep(0.2)
    else:
        dist.recv(values, 1)
        dist.send(values, 1)
tell("passed")
time.sleep(60)
"""


@pytest.mark.parametrize("launcher", FIRST)
def test_receives_of_three_threads_beside_calls_that_end(launcher: str, program: Path) -> None:
    with Job(launcher, 2, [], program) as job:
        raised = job.wait("raised", 3, 80)
        assert sorted(each["tag"] for each in raised) == [1, 2, 3], job.stderr()
        assert all("from rank 0 of float32 [3] on group '0' has not ended" in each["text"] for each in raised), raised
        assert all("(receive)" in each["text"] for each in raised[:2]), raised
        assert len(job.wait("passed", 2, 20)) == 2, job.stderr()
