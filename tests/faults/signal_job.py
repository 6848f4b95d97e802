"""The ranks that test_signals.py sends signals to."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import torch

import hpcdist as dist
from tests.faults.telling import tell

HELD = 5


def stop() -> None:
    tell("ready")
    values = torch.ones(64)
    for step in range(100_000):
        dist.all_reduce(values)
        time.sleep(0.001 * dist.get_rank())
        if dist.stop_requested():
            tell("stopped", step=step)
            return


def block(path: str) -> None:
    """Keep all ranks but 0 inside MPI until a file is there, at the step HELD."""
    values = torch.ones(64)
    for step in range(2 * HELD):
        if dist.get_rank() == 0 and step == HELD:
            tell("held")
            while not os.path.exists(path):
                time.sleep(0.01)
        if step == HELD:
            tell("blocks")
        dist.all_reduce(values)
        if dist.stop_requested():
            tell("stopped", step=step)
            return


def wait() -> None:
    values = torch.ones(3, 4)
    dist.all_reduce(values)
    if dist.get_rank() == 0:
        dist.send(values, 1)
    elif dist.get_rank() == 1:
        dist.recv(values, 0)
    dist.broadcast(values, 0)
    tell("ready")
    if dist.get_rank() == 0:
        time.sleep(60)
    dist.barrier()
    tell("passed")


def interrupt() -> None:
    """Have rank 1 wait twice for a message that does not come, and then in an all_reduce that rank 0 does not join."""
    values = torch.ones(3)

    async def receive() -> None:
        tell("in a loop")
        dist.recv(values, 0)

    if dist.get_rank() == 1:
        try:
            tell("ready")
            dist.recv(values, 0)
        except KeyboardInterrupt:
            tell("interrupted")
        try:
            asyncio.run(receive())
        except (KeyboardInterrupt, dist.DistBackendError):
            tell("interrupted in a loop")
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(60)
    tell("again")
    dist.all_reduce(values)


def leave() -> None:
    """Have rank 1 leave the program, and the other one much later."""
    tell("ready")
    if dist.get_rank() == 0:
        time.sleep(60)
    sys.exit()


if __name__ == "__main__":
    dist.init_process_group()
    {"stop": stop, "block": block, "wait": wait, "interrupt": interrupt, "leave": leave}[sys.argv[1]](*sys.argv[2:])
    dist.destroy_process_group()
