"""A GPU that waits for a rank which comes late, or never: mpirun -n 3 python device_job.py KIND. That is rank 1.

No GPU is needed: the NCCL backend, its streams and the watchdog are the real ones, and what the device would be
doing is told by the files that the ranks leave in FOLDER when they make the call. The host never waits for it, as
with CUDA.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import torch

import hpcdist as dist
from hpcdist.backends.nccl.backend import NCCLBackend
from hpcdist.core import registry
from hpcdist.core.backend import Bootstrap
from hpcdist.core.world import WORLD
from tests.fakes import fake_nccl as fake
from tests.faults.telling import tell

SECONDS = 2.0
FOLDER = Path(os.environ["FOLDER"])
SIZE = 3


class Event(fake.Event):
    """An event on a device that is through with a call once every rank has made it."""

    def query(self) -> bool:
        return self.recorded_on is None or len(list(FOLDER.glob("came-*"))) == SIZE


class Cuda(fake.FakeCuda):
    Event = Event


class Device(NCCLBackend):
    """The NCCL backend on a device that carries no data."""

    name: ClassVar[str] = "device"
    device = torch.device("cpu")

    @classmethod
    def connect(cls, bootstrap: Bootstrap) -> Device:
        backend = cls(bootstrap.rank, bootstrap.size, fake.library(), None, Cuda())
        backend.peer = backend._owned_peer = registry.connect("mpi", bootstrap)
        backend.objects = backend.peer.objects  # the device carries nothing
        backend.communicators.make(cls.device, bootstrap.size, bootstrap.rank, [fake.get_unique_id()])
        return backend


registry.ENTRIES["device"] = registry.Entry("__main__", "Device", "")


def wait_for_the_device(seconds: float) -> None:
    """Do what torch.cuda.synchronize() would: nothing of hpcdist."""
    limit = time.monotonic() + seconds
    while backend.communicators.ended is None and backend.outstanding() is not None and time.monotonic() < limit:
        time.sleep(0.01)


kind = sys.argv[1]
dist.init_process_group(backend="cpu:device", timeout=timedelta(seconds=SECONDS))
rank = dist.get_rank()
backend = WORLD.default.backend("cpu")
tensor = torch.zeros(8)
if rank == 1:
    tell("fault")
    time.sleep(SECONDS / 2 if kind == "late" else SECONDS + 4)
(FOLDER / f"came-{rank}").touch()
if rank == 1 and kind != "late":
    os._exit(0)
work = dist.all_reduce(tensor, async_op=kind == "async")
wait_for_the_device(SECONDS + 3)
try:
    if work is not None:
        work.wait()
    for _ in range(2):
        dist.all_reduce(tensor)
except dist.DistBackendError as error:
    tell("raised", text=str(error))
    time.sleep(SECONDS)  # the other tells what it met, before the job ends
    os._exit(0)
tell("done")
dist.destroy_process_group()
