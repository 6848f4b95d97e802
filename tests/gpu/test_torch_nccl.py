"""torch's own ProcessGroupNCCL on the same GPUs, as torch makes it and by the name "torch", and ours beside it.

Code that is not ours shows whether the GPUs are faithful.

On a real GPU this holds by itself. On emulated ones it is what makes the results of the other tests worth something:
the same scenarios, through torch's C++ and its own rules for streams and memory, with no rule of CUDA broken. Its
collectives, dtypes and ops are in ``test_collectives``.
"""

import pytest
import torch
import torch.distributed as c10d
from torch.nn.parallel import DistributedDataParallel

import hpcdist as dist

SLEEP_CYCLES = 100_000_000


@pytest.fixture(scope="module", params=["nccl", "cpu:mpi,cuda:torch", "cpu:mpi,cuda:nccl"])
def group(world, request):
    made_by = c10d if request.param == "nccl" else dist
    made = made_by.new_group(backend=request.param)
    if request.param == "nccl":
        assert type(made._get_backend(torch.device("cuda"))) is c10d.ProcessGroupNCCL
    yield made
    made_by.destroy_process_group(made)


@pytest.mark.parametrize("is_async", [False, True])
def test_order_with_the_kernels_around(group, is_async, size, device):
    tensor = torch.zeros(1 << 18, device=device)
    torch.cuda._sleep(SLEEP_CYCLES)
    tensor += 1
    work = c10d.all_reduce(tensor, group=group, async_op=is_async)
    if is_async:
        work.wait()
    tensor *= 2
    assert bool((tensor == 2 * size).all())


def test_dropped_tensors_and_another_streams_wait(group, size, device):
    other = torch.cuda.Stream()
    for _ in range(5):
        torch.cuda._sleep(SLEEP_CYCLES // 10)
        work = c10d.all_reduce(torch.ones(5000, device=device), group=group, async_op=True)
        torch.full((5000,), -1.0, device=device)
        work.wait()
        tensor = torch.ones(5000, device=device)
        work = c10d.all_reduce(tensor, group=group, async_op=True)
        with torch.cuda.stream(other):
            work.wait()
            doubled = tensor * 2
        other.synchronize()
        assert bool((doubled == 2 * size).all())


def test_a_graph(group, rank, size, device):
    tensor = torch.ones(64, device=device)
    c10d.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        c10d.all_reduce(tensor, group=group)
    tensor.fill_(1)
    for _ in range(2):
        graph.replay()
    assert tensor.tolist() == [size**2] * 64


def test_data_parallel(group, rank, size, device):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).to(device)
    parallel = DistributedDataParallel(model, device_ids=[device.index], process_group=group)
    torch.manual_seed(rank)
    parallel(torch.randn(16, 8).to(device)).sum().backward()
    gradient = model.weight.grad.cpu()
    mean = gradient.clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert torch.allclose(gradient, mean)
