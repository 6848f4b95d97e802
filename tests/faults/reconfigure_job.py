"""A job whose default group is reconfigured, by torch's names; on hpcdist, or on torch's own gloo as the model.

    mpirun -n 4 python reconfigure_job.py FOLDER [hpcdist|torch|gloo] [train] [lose]

Each rank tells what it has seen, which is to be the same on hpcdist, by its own names and through torch.distributed, as
on gloo. With "train" a DDP module stays wrapped throughout; with "lose" two ranks are killed, one after the other.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist

folder, door = sys.argv[1:3]
trains, loses = "train" in sys.argv, "lose" in sys.argv
me = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or os.environ["RANK"])
SIZE = 4
store = torch_dist.FileStore(f"{folder}/store", SIZE)
dist: Any
if door == "hpcdist":
    import hpcdist as dist

    dist.init_process_group("mpi", enable_reconfigure=True, timeout=timedelta(seconds=20))
else:
    dist = torch_dist
    backend = "gloo" if door == "gloo" else "hpcdist"
    if door == "torch":
        import hpcdist  # noqa: F401  # registers the backend
    pg_store = torch_dist.FileStore(f"{folder}/group", SIZE) if door == "gloo" else None
    where = {"store": pg_store, "rank": me, "world_size": SIZE} if pg_store is not None else {}
    dist.init_process_group(backend, enable_reconfigure=True, timeout=timedelta(seconds=20), **where)


def tell(event: str, *values: Any) -> None:
    line = json.dumps({"rank": me, "pid": os.getpid(), "event": event, "values": values})
    os.write(1, f"{line}\n".encode())  # whole: print's end of line comes apart from it


def refused(event: str, *arguments: Any, **more: Any) -> None:
    """Tell the class of the error of a reconfiguration, and its text."""
    try:
        dist._reconfigure(*arguments, **more).wait()
    except RuntimeError as error:
        tell(event, isinstance(error, dist.DistError), str(error).partition("\n")[0])
    else:
        raise AssertionError(event)


def collected(key: str, living: list[int]) -> dict[int, str]:
    """Return the handles of some processes."""
    store.set(f"{key}-{me}", dist._get_reconfigure_handle())
    return {each: store.get(f"{key}-{each}").decode() for each in living}


def use(event: str) -> None:
    """Use the group in many ways, and tell what came of it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    small, large = torch.full((3,), rank + 1.0), torch.full((1 << 19,), rank + 1.0)
    dist.all_reduce(small)
    dist.all_reduce(large)
    begun = dist.all_reduce(torch.ones(4), async_op=True)
    begun.wait()
    seen: list[Any] = [None] * size
    dist.all_gather_object(seen, me)
    dist.broadcast(small, 0)
    if size > 1:
        received = torch.zeros(2)
        sent = dist.isend(torch.full((2,), float(rank)), (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        sent.wait()
        assert received.tolist() == [(rank - 1) % size] * 2
    part = dist.new_group(list(range((size + 1) // 2)))
    in_part = rank < (size + 1) // 2
    if in_part:
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=part)
        assert tensor.item() == (size + 1) // 2
    assert large.unique().tolist() == small.unique().tolist()
    tell(event, rank, size, small[0].item(), seen)


def train(event: str) -> None:
    """Make a step with the module that was wrapped when the group had other ranks, and tell its gradient."""
    if trains:
        ddp.zero_grad()
        inputs = torch.full((1, 1), 1.0 + dist.get_rank())
        ddp(inputs).sum().backward()
        tell(event, ddp.module.weight.grad.item())


assert dist._supports_reconfigure()
handles = collected("first", list(range(SIZE)))
assert dist._reconfigure(1, list(handles.values())).wait()
use("four")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)) if trains else None
train("trained four")

if loses:
    living, uuid = list(range(SIZE)), 1
    for victim in (2, 0):
        uuid += 1
        if me == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        living.remove(victim)
        try:
            for _ in range(100000):
                dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            tell("lost", str(error))
        fresh = collected(f"left-{uuid}", living)
        if victim == 2:
            refused("dead", 100, [fresh[3], fresh[0], handles[2], fresh[1]])
        dist._reconfigure(uuid, [fresh[each] for each in reversed(living)]).wait()
        use(f"without {victim}")
        train(f"trained without {victim}")
    tell("end")
    sys.exit()

refused("old", 2, list(handles.values()))
handles = collected("second", list(range(SIZE)))
refused("none", 3, [])
refused("twice", 4, [handles[me], handles[me]])
refused("unreadable", 5, ["xxx", handles[me]])
half = [3, 1] if me % 2 else [0, 2]
assert dist._reconfigure(6 + me % 2, [handles[each] for each in half]).wait()
use("two")
train("trained two")
alone = dist._get_reconfigure_handle()
dist._reconfigure(10 + me, [alone]).wait()
use("one")
if me == 0 and door != "gloo":
    dist.new_group([0])  # counted by this rank only
refused("used", 10 + me, [dist._get_reconfigure_handle()])
handles = collected("third", list(range(SIZE)))
dist._reconfigure(20, set(handles.values())).wait()
tell("again", dist.get_world_size())
if door != "gloo":
    use("four again")
    train("trained four again")
    tell("name", dist.new_group().group_name)
    handles = collected("fourth", list(range(SIZE)))
    if me == 3:  # nobody but one comes
        refused("absent", 30, [handles[3], handles[1]], timeout=timedelta(seconds=0.5))
    if me in (0, 2):  # not the same order
        refused("different", 31, [handles[0], handles[2]] if me else [handles[0], handles[2], handles[1]])
    use("four at last")
dist.destroy_process_group()
tell("end")
