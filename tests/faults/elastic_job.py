"""A job that loses ranks on purpose, and whose result shows any step that was lost, made twice or made by halves.

    mpirun --with-ft ulfm -n 6 python elastic_job.py '{"spares": 1, "die": {"2": {"step": 5}}}'

The plan says which processes die, and when: in a step ("step", between its two sums), some seconds after the first step
("seconds", wherever they are then), in a recovery ("setup", at their so-manieth call of it), in their so-manieth
meeting ("meeting"), or while the state is written after a step ("saving", into the folder "save"). Others come some
seconds later to the job ("late"), or all ranks take some seconds for each recovery ("slow"). All values are whole
numbers, so that their sums do not depend on the order: the result equals that of one process that knows only how many
ranks made each step (``expected``).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import hpcdist as dist
from hpcdist.beyond import elastic as machinery
from hpcdist.watch import job_end
from tests.faults.telling import ME, tell

PRIME = 1_000_003
COUNTS = {"mpi": 16, "window": 1 << 17}  # elements of a sum: 128 B, and 1 MiB through node-shared memory


def share(step: int, rank: int, size: int, count: int) -> torch.Tensor:
    """Return what a rank adds in a step."""
    return (torch.arange(count, dtype=torch.float64) * (step + 1) + 7 * rank + size) % 101


def first_half(weights: torch.Tensor, total: torch.Tensor) -> None:
    weights.mul_(3).add_(total).remainder_(PRIME)


def second_half(weights: torch.Tensor, total: torch.Tensor) -> None:
    weights.mul_(5).sub_(total).remainder_(PRIME)


def expected(sizes: list[int], count: int) -> torch.Tensor:
    """Return the weights after steps made by so many ranks each, without a failure."""
    weights = torch.zeros(count, dtype=torch.float64)
    for step, size in enumerate(sizes):
        total = torch.zeros(count, dtype=torch.float64)
        for rank in range(size):
            total += share(step, rank, size, count)
        first_half(weights, total)
        second_half(weights, total)
    return weights


class Training:
    """Weights, and how many ranks made each step."""

    def __init__(self, count: int, seed: int) -> None:
        self.weights = torch.full((count,), float(seed), dtype=torch.float64)  # rank 0's count
        self.sizes: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "sizes": self.sizes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights.copy_(state["weights"])
        self.sizes = list(state["sizes"])


class Saves:
    """States written in the background, every fourth step, into folders ``steps-change``."""

    def __init__(self, folder: Path, training: Training) -> None:
        self.folder, self.training = folder, training
        self.group: Any = None
        self.written: Any = None

    def regroup(self) -> None:
        self.group, self.written = dist.new_group(), None

    def save(self, steps: int, change: int) -> None:
        self.wait()
        state = {"weights": self.training.weights, "sizes": torch.tensor(self.training.sizes)}
        self.written = dcp.async_save(state, checkpoint_id=self.folder / f"{steps}-{change}", process_group=self.group)

    def wait(self) -> None:
        try:
            if self.written is not None:
                self.written.result()
        except CheckpointException as error:
            raise dist.DistBackendError("the state could not be written") from error

    def are_right(self, count: int) -> bool:
        """Tell whether every state that looks whole is: DCP writes .metadata last."""
        for each in self.folder.glob("*/.metadata"):
            steps = int(each.parent.name.split("-")[0])
            state = {"weights": torch.empty(count, dtype=torch.float64), "sizes": torch.zeros(steps, dtype=torch.int64)}
            dcp.load(state, checkpoint_id=each.parent, no_dist=True)
            if not torch.equal(state["weights"], expected(state["sizes"].tolist(), count)):
                return False
        return True


def die() -> None:
    tell("dies")
    os.kill(os.getpid(), getattr(signal, PLAN.get("signal", "SIGKILL")))


def main() -> None:
    count, steps, pause = COUNTS[PLAN.get("by", "mpi")], PLAN.get("steps", 30), PLAN.get("pause", 0.01)
    training = Training(count, 0 if ME == 0 else 1 + ME)
    own = PLAN.get("die", {}).get(str(ME), {})
    saves = Saves(Path(PLAN["save"]), training) if "save" in PLAN else None
    setups = meetings = 0
    report = machinery.Report

    def reporting(*values: int) -> machinery.Report:
        nonlocal meetings
        meetings += 1
        return die() if meetings == own.get("meeting") else report(*values)

    machinery.Report = reporting

    def setup() -> None:
        nonlocal setups
        setups += 1
        if setups == own.get("setup"):
            die()  # while the others make groups
        if setups > 1:
            time.sleep(PLAN.get("slow", 0))
        half, _ = dist.new_subgroups(1)
        assert half.size() == 1
        if saves:
            saves.regroup()
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == job.size
        tell("setup", size=job.size)

    time.sleep(own.get("late", 0))
    job_end.UNKNOWN_SECONDS = PLAN.get("unknown", job_end.UNKNOWN_SECONDS)
    with dist.elastic(PLAN.get("spares", 0), PLAN.get("min_size", 1), PLAN.get("limit", 20)) as job:
        started = setups_seen = 0
        if job.rank is None and "spare" in own:
            threading.Timer(own["spare"], die).start()
        for step in job.steps({"training": training}, steps, setup=setup, snapshot_every=PLAN.get("every", 1)):
            with step as number:
                if not started and "seconds" in own:
                    threading.Timer(own["seconds"], die).start()
                started = 1
                total = share(number, job.rank, job.size, count)
                if PLAN.get("async"):
                    dist.all_reduce(total, async_op=True).wait()
                else:
                    dist.all_reduce(total)
                first_half(training.weights, total)
                if number == own.get("step"):
                    die()
                total = share(number, job.rank, job.size, count)
                if PLAN.get("async"):
                    work = dist.all_reduce(total, async_op=True)
                    time.sleep(pause)
                    work.wait()
                else:
                    time.sleep(pause)
                    dist.all_reduce(total)
                second_half(training.weights, total)
                training.sizes.append(job.size)
                if saves and number % 4 == 3:
                    saves.save(number + 1, job.changes)
                    if number == own.get("saving"):
                        die()
                    if number == steps - 1:
                        saves.wait()  # in a step, which is made again if a rank dies meanwhile
                if setups_seen != setups:
                    setups_seen = setups
                    tell("resumed", step=number, size=job.size)
        if job.rank is not None:
            dist.all_reduce(torch.ones(1))  # the group is there until all have left the block
        right = torch.equal(training.weights, expected(training.sizes, count)) if job.rank is not None else None
        if saves and job.rank == 0:
            right = right and saves.are_right(count)
        tell("end", now=job.rank, size=job.size, changes=job.changes, sizes=training.sizes, right=right)


if __name__ == "__main__":
    PLAN: dict[str, Any] = json.loads(sys.argv[1])
    dist.init_process_group(timeout=timedelta(seconds=PLAN.get("timeout", 30)))
    tell("begins")
    main()
