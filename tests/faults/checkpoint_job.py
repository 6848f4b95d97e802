"""A job that saves its state to a folder by DCP's async_save, on a group of its own, while it goes on.

Started again, on any number of ranks, it goes on from the last whole checkpoint; that is a folder with a ``.metadata``,
which DCP writes last. The values of a step follow from its number, so that a checkpoint of two steps mixed would show.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import hpcdist as dist
from tests.faults.telling import tell

COUNT, STEPS = 1 << 18, 10_000
VARIANT = AsyncCheckpointerType[os.environ.get("CHECKPOINT_BY", "THREAD")]


def last_whole(folder: Path) -> Path | None:
    """Return the newest checkpoint that was completed."""
    found = [each.parent for each in folder.glob("*/.metadata")]
    return max(found, key=lambda each: int(each.name), default=None)


def main(folder: Path) -> None:
    dist.init_process_group()
    saving = dist.new_group()  # of the saves alone: they do not wait for the training's calls, nor these for them
    state = {"values": torch.zeros(COUNT, dtype=torch.int64), "step": torch.tensor(0)}
    found = last_whole(folder)
    if found is not None:
        dcp.load(state, checkpoint_id=str(found), process_group=saving)
    first = int(state["step"])
    assert state["values"].eq(first).all(), "a checkpoint of several steps"
    tell("begins", step=first)
    saved, saves, meanwhile = None, 0, 0
    for step in range(first, STEPS):
        part = torch.ones(COUNT, dtype=torch.int64)
        dist.all_reduce(part, dist.ReduceOp.MAX)
        state["values"] += part
        state["step"].fill_(step + 1)
        meanwhile += 1
        is_done = torch.tensor(saved is None or saved.done())
        dist.all_reduce(is_done, dist.ReduceOp.MIN)  # every rank begins a save in the same step
        if is_done:
            if saved is not None:
                saved.result()
                saves += 1
                tell("saved", saves=saves, step=step, meanwhile=meanwhile)
            if saves == int(os.environ.get("CHECKPOINT_SAVES", "1000")):
                break
            place, meanwhile = str(folder / str(step + 1)), 0
            saved = dcp.async_save(state, checkpoint_id=place, process_group=saving, async_checkpointer_type=VARIANT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
