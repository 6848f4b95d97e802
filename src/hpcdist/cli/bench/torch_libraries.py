"""Subjects ``torch`` and ``ddp``: time of a step of torch's own distributed libraries, on our group and on stock gloo.

Each row does the same work on both: a training step of DDP, of FSDP2, of a tensor-parallel block and of a pipeline, a
redistribution of a DTensor, and a save of a sharded state by ``torch.distributed.checkpoint``. The side "torch's part"
is the same step with nothing sent: on torch's "fake" group, for DDP under ``no_sync``, for a save each rank by itself;
where peers have to answer, as in a pipeline, there is none. The files of a save go to the folder for temporary files.
Communication has its largest share with a batch of one.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hpcdist as dist
from hpcdist.cli.bench.timing import Bench
from hpcdist.torch_bridge import private_names

LAYERS = 4
WIDTH = 256  # of a layer of the tensor-parallel block and of a pipeline's stage
BATCH = 8
MICROBATCHES = 4

mesh_of = partial(DeviceMesh.from_group, device_type="cpu")
checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")  # it declares no exports

Step = Callable[[], Any]


def measure(bench: Bench) -> None:
    """Time each library's step on both groups, or the one of DDP; every rank calls this."""
    options = bench.options
    ours, gloo = torch.distributed.group.WORLD, torch.distributed.new_group(backend="gloo")
    fake = private_names.fake_group()
    parent = bench.comm.bcast(tempfile.mkdtemp() if bench.rank == 0 else None)
    count = options.parameters
    ddp, fsdp, saving = (partial(make, options) for make in (ddp_step, fsdp_step, save))
    rows: list[tuple[str, float, Callable[..., Step], Callable[[], Step] | None]] = [
        ("DDP step", count, ddp, lambda: ddp(ours, is_synced=False)),
        ("FSDP2 step", count, fsdp, lambda: fsdp(fake)),
        ("DTensor redistribute", WIDTH * WIDTH, redistribution, lambda: redistribution(fake)),
        ("tensor-parallel block", BATCH * WIDTH, tensor_parallel_step, lambda: tensor_parallel_step(fake)),
        ("pipeline step", BATCH * WIDTH, pipeline_step, None),
        ("checkpoint save", count, partial(saving, parent), lambda: saving(f"{parent}/{bench.rank}", None)),
    ]
    try:
        for what, elements, make, alone in rows[:1] if options.subject == "ddp" else rows:
            sides = {"hpcdist": make(ours), "gloo": make(gloo), **({"torch's part": alone()} if alone else {})}
            bench.compare(what, "float32", int(4 * elements), sides)
    finally:
        dist.barrier()
        if bench.rank == 0:
            shutil.rmtree(parent)


def perceptron(parameters: float) -> nn.Sequential:
    """Return a stack of square linear layers with about this number of parameters, equal on all ranks."""
    torch.manual_seed(0)
    width = max(1, round((parameters / LAYERS) ** 0.5))
    layers = [nn.Linear(width, width) for _ in range(LAYERS)]
    return nn.Sequential(*(each for layer in layers for each in (layer, nn.ReLU())))


def ddp_step(options: Namespace, group: Any, is_synced: bool = True) -> Step:
    """Return a training step of DistributedDataParallel, with or without the exchange of gradients."""
    model: Any = perceptron(options.parameters)
    parallel = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=options.bucket_mb, gradient_as_bucket_view=True
    )
    step = trainer(parallel, model[0].in_features, options.batch, fused=True)

    def step_alone() -> None:
        with parallel.no_sync():
            step()

    return step if is_synced else step_alone


def trainer(model: nn.Module, width: int, batch: int = BATCH, **options: Any) -> Step:
    """Return a training step of a model on random samples."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, **options)
    samples = torch.randn(batch, width, generator=torch.Generator().manual_seed(0))

    def step() -> None:
        optimizer.zero_grad()
        model(samples).square().mean().backward()
        optimizer.step()

    return step


def fsdp_step(options: Namespace, group: Any) -> Step:
    """Return a training step of a model sharded by FSDP2, layer by layer, with clipped gradients."""
    model: Any = perceptron(options.parameters)
    mesh = mesh_of(group)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    step = trainer(model, model[0].in_features)

    def step_and_clip() -> None:
        step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return step_and_clip


def redistribution(group: Any) -> Step:
    """Return a redistribution of a DTensor from rows to replicas, to columns, and back to rows."""
    mesh = mesh_of(group)
    rows = distribute_tensor(torch.ones(WIDTH, WIDTH), mesh, [Shard(0)])

    def redistribute() -> None:
        rows.redistribute(mesh, [Replicate()]).redistribute(mesh, [Shard(1)]).redistribute(mesh, [Shard(0)])

    return redistribute


def tensor_parallel_step(group: Any) -> Step:
    """Return a training step of two layers, the first cut by columns and the second by rows."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
    return trainer(parallelize_module(block, mesh_of(group), {"0": ColwiseParallel(), "2": RowwiseParallel()}), WIDTH)


def pipeline_step(group: Any) -> Step:
    """Return a training step of a pipeline with one stage for each rank, by the schedule GPipe."""
    torch.manual_seed(0)
    rank, size = group.rank(), group.size()
    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), rank, size, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    samples = torch.randn(BATCH, WIDTH)
    inputs = (samples,) if rank == 0 else ()
    target = samples if rank == size - 1 else None
    return lambda: schedule.step(*inputs, target=target)


def save(options: Namespace, parent: str, group: Any) -> Step:
    """Return a save of a sharded state, over the previous one; without a group, of this rank's shard only."""
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")
    weights = torch.ones(dist.get_world_size(), int(options.parameters) // dist.get_world_size())
    state = {
        "weights": weights[:1].clone() if group is None else distribute_tensor(weights, mesh_of(group), [Shard(0)])
    }
    return partial(checkpoint.save, state, checkpoint_id=parent, process_group=group, no_dist=group is None)
