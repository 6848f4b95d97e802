"""torch's own ProcessGroupNCCL on the same GPUs, as torch makes it and by the name "torch".

Code that is not ours shows whether the GPUs are faithful.

On a real GPU this holds by itself. On emulated ones it is what makes the results of the other tests worth something:
the same scenarios, through torch's C++ and its own rules for streams and memory, with no rule of CUDA broken. Its
collectives, dtypes and ops are in ``test_collectives``.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as c10d
from torch.nn.parallel import DistributedDataParallel

import hpcdist as dist

SLEEP_CYCLES = 100_000_000


@pytest.fixture(scope="module", params=["nccl", "cpu:mpi,cuda:torch"])
def theirs(world, request):
    made_by = c10d if request.param == "nccl" else dist
    group = made_by.new_group(backend=request.param)
    yield group
    made_by.destroy_process_group(group)


def test_it_is_torchs(theirs, device):
    is_ours = isinstance(theirs, dist.ProcessGroup)
    backend = theirs.backends["cuda"].inner if is_ours else theirs._get_backend(device)
    assert type(backend) is c10d.ProcessGroupNCCL


@pytest.mark.parametrize("is_async", [False, True])
def test_order_with_the_kernels_around(theirs, is_async, rank, size, device):
    tensor = torch.zeros(1 << 18, device=device)
    torch.cuda._sleep(SLEEP_CYCLES)
    tensor += 1
    work = c10d.all_reduce(tensor, group=theirs, async_op=is_async)
    if is_async:
        work.wait()
    tensor *= 2
    assert bool((tensor == 2 * size).all())


def test_dropped_tensors_and_another_streams_wait(theirs, rank, size, device):
    other = torch.cuda.Stream()
    for _ in range(5):
        torch.cuda._sleep(SLEEP_CYCLES // 10)
        work = c10d.all_reduce(torch.ones(5000, device=device), group=theirs, async_op=True)
        torch.full((5000,), -1.0, device=device)
        work.wait()
        tensor = torch.ones(5000, device=device)
        work = c10d.all_reduce(tensor, group=theirs, async_op=True)
        with torch.cuda.stream(other):
            work.wait()
            doubled = tensor * 2
        other.synchronize()
        assert bool((doubled == 2 * size).all())


def test_a_graph(theirs, rank, size, device):
    tensor = torch.ones(64, device=device)
    c10d.all_reduce(tensor, group=theirs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        c10d.all_reduce(tensor, group=theirs)
    tensor.fill_(1)
    for _ in range(2):
        graph.replay()
    assert tensor.tolist() == [size**2] * 64


def test_data_parallel(theirs, rank, size, device):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).to(device)
    parallel = DistributedDataParallel(model, device_ids=[device.index], process_group=theirs)
    torch.manual_seed(rank)
    parallel(torch.randn(16, 8).to(device)).sum().backward()
    gradient = model.weight.grad.cpu()
    mean = gradient.clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert torch.allclose(gradient, mean)
