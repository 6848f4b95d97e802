"""Subject ``ddp``: time of a step of DistributedDataParallel, beside stock gloo.

``mpirun -n 2 python -m hpcdist bench ddp``. The same model and batch take a step in three ways in turn: gradients over
hpcdist's group, over a group of torch's own gloo, and not exchanged (``no_sync``), which shows the time of the
computation. Communication has its largest share with a batch of one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hpcdist as dist
from hpcdist.cli.job_arguments import JobParser, count, described

LAYERS = 4


def parser() -> JobParser:
    """Return the parser of the command line."""
    made = JobParser(prog="python -m hpcdist bench ddp", description=described(__doc__).partition("\n")[0])
    made.add_argument(
        "--parameters", type=float, default=10e6, help="number of the model's parameters (default 10 million)"
    )
    made.add_argument(
        "--batch", type=count, default=1, help="samples a rank (default 1: the step is bound by communication)"
    )
    made.add_argument("--steps", type=count, default=20, help="timed steps of each kind")
    made.add_argument("--warmup", type=int, default=3, help="untimed steps before them")
    made.add_argument("--bucket-mb", type=float, default=25, help="DDP's bucket_cap_mb")
    made.add_argument("--json", type=Path, help="write the figures to this file")
    return made


def perceptron(parameters: float) -> nn.Module:
    """Return a stack of square linear layers with about this many parameters, equal on all ranks."""
    torch.manual_seed(0)
    width = max(1, round((parameters / LAYERS) ** 0.5))
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers)


def stepper(given: argparse.Namespace, group: Any, is_synced: bool) -> tuple[Callable[[], None], nn.Module]:
    """Return a training step of the model on a group, and the model."""
    model = DistributedDataParallel(
        perceptron(given.parameters), process_group=group, bucket_cap_mb=given.bucket_mb, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    width = next(model.parameters()).size(1)
    batch = torch.randn(given.batch, width, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        with nullcontext() if is_synced else model.no_sync():
            optimizer.zero_grad()
            model(batch).square().mean().backward()
        optimizer.step()

    return step, model


def measure(steps: dict[str, Callable[[], None]], given: argparse.Namespace) -> dict[str, float]:
    """Return the median seconds of a step of each kind; the slowest rank counts."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(given.warmup + given.steps):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            if turn >= given.warmup:
                times[name].append(time.perf_counter() - start)
    medians = {}
    for name, taken in times.items():
        slowest = torch.tensor(taken, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        medians[name] = statistics.median(slowest.tolist())
    return medians


def run(args: list[str]) -> int:
    """Measure and print; every rank calls this."""
    given = parser().parse_args(args)
    dist.init_process_group()
    gloo = torch.distributed.new_group(backend="gloo")
    kinds = {"hpcdist": (None, True), "gloo": (gloo, True), "no exchange": (None, False)}
    made = {name: stepper(given, group, is_synced) for name, (group, is_synced) in kinds.items()}
    seconds = measure({name: step for name, (step, _) in made.items()}, given)
    distance = max(
        float((one - other).abs().max().detach())
        for one, other in zip(made["hpcdist"][1].parameters(), made["gloo"][1].parameters(), strict=True)
    )
    count = sum(each.numel() for each in made["gloo"][1].parameters())
    figures = {
        "ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
        "parameters": count,
        "batch": given.batch,
        "milliseconds": {name: round(1e3 * value, 3) for name, value in seconds.items()},
        "of gloo's step": round(seconds["hpcdist"] / seconds["gloo"], 3),
        "largest difference of a parameter": distance,
    }
    if dist.get_rank() == 0:
        print(f"DDP, {count / 1e6:.1f} M parameters, {figures['ranks']} ranks, batch {given.batch}")
        for name, value in seconds.items():
            print(f"  {name:12} {1e3 * value:9.2f} ms a step")
        print(f"  hpcdist / gloo {seconds['hpcdist'] / seconds['gloo']:.2f}")
        if given.json:
            given.json.write_text(json.dumps(figures, indent=1) + "\n")
    dist.destroy_process_group()
    return 0
