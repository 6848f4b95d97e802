"""Job that reduces while strangers write to its sockets, and tells what became of its threads and memory."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import hpcdist as dist
from hpcdist.watch.watchdog import RUNNING


def tell(event: str, **more: Any) -> None:
    line = json.dumps({"rank": dist.get_rank(), "event": event, "pid": os.getpid(), **more})
    os.write(1, f"\n{line}\n".encode())


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def state() -> dict[str, Any]:
    passing = ("Dummy", "hpcdist-trace")  # the last writes a trace, and ends
    threads = sorted(each.name for each in threading.enumerate() if not each.name.startswith(passing))
    return {"threads": threads, "memory": resident(), "descriptors": len(os.listdir("/proc/self/fd"))}


def shown(shape: Any) -> Any:
    """Return a shape of ``channel.fits`` as JSON."""
    if isinstance(shape, type):
        return {"type": shape.__name__}
    if isinstance(shape, dict):
        return {"values": shown(shape[str])} if str in shape else {"keys": {key: shown(shape[key]) for key in shape}}
    if isinstance(shape, (list, tuple)):
        return {"list" if isinstance(shape, list) else "choice": [shown(each) for each in shape]}
    return {"type": "None"}


dist.init_process_group()
group = dist.new_group()
end = Path(sys.argv[1])
channel = RUNNING[0].channel
kinds = {kind: shown(shape) for kind, (_, shape) in channel._handlers.items()}
tell("ready", own=channel.own, kinds=kinds)
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
