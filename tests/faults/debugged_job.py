"""The ranks that test_breakpoint.py sits down at: mpirun -n 2 python debugged_job.py RANK KIND"""

from __future__ import annotations

import sys
from datetime import timedelta

import hpcdist as dist
from tests.faults.telling import tell


def stop_once(stopping: int) -> None:
    secret = 40 + dist.get_rank()
    tell("ready")
    dist.breakpoint(stopping)
    secret += 100
    tell("next", secret=secret)


def stop_in_the_third_round(stopping: int) -> None:
    for step in range(4):
        tell("step", step=step)
        dist.breakpoint(stopping, skip=2)


def stop_too_long(stopping: int) -> None:
    tell("ready")
    dist.breakpoint(stopping, timeout_s=4)


if __name__ == "__main__":
    dist.init_process_group(timeout=timedelta(seconds=1))
    {"once": stop_once, "skip": stop_in_the_third_round, "long": stop_too_long}[sys.argv[2]](int(sys.argv[1]))
    dist.barrier()
    tell("over")
    dist.destroy_process_group()
