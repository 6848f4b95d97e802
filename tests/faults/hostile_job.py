"""Job that reduces while strangers write to its sockets, and tells what became of its threads and memory."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import hpcdist as dist
from hpcdist.watch.watchdog import RUNNING
from tests.faults.telling import tell
from tests.programs import resident


def state() -> dict[str, Any]:
    passing = ("Dummy", "hpcdist-trace")  # the last writes a trace, and ends
    threads = sorted(each.name for each in threading.enumerate() if not each.name.startswith(passing))
    return {"threads": threads, "memory": resident(), "descriptors": len(os.listdir("/proc/self/fd"))}


dist.init_process_group()
group = dist.new_group()
end = Path(sys.argv[1])
channel = RUNNING[0].channel
tell("ready", own=channel.own)
count, is_over, before = 0, torch.zeros(1), {}
while not is_over:
    tensor = torch.full((100,), float(dist.get_rank()))
    dist.all_reduce(tensor, group=group)
    assert tensor.eq(sum(range(dist.get_world_size()))).all()
    count += 1
    if not before and Path(f"{end}.half").exists():
        before = state()
    is_over.fill_(end.exists() and bool(before))
    dist.all_reduce(is_over, dist.ReduceOp.MIN)
    time.sleep(0.001)
tell("over", count=count, before=before, after=state(), waits=str(dist.get_world_size()))
dist.destroy_process_group()
