"""torch's own ProcessGroupNCCL on the same GPUs, as torch makes it and by the name "torch".

Code that is not ours shows whether the GPUs are faithful.

On a real GPU this holds by itself. On emulated ones it is what makes the results of the other tests worth something:
the same scenarios, through torch's C++ and its own rules for streams and memory, with no rule of CUDA broken.
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


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16])
def test_dtypes(theirs, dtype, rank, size, device):
    tensor = torch.full((37,), rank + 1, dtype=dtype, device=device)
    c10d.all_reduce(tensor, group=theirs)
    assert tensor.tolist() == [size * (size + 1) // 2] * 37


@pytest.mark.parametrize("name", ["MAX", "MIN", "AVG", "PRODUCT", "PREMUL_SUM"])
def test_ops(theirs, name, rank, size, device):
    tensor = torch.full((5,), float(rank % 2 + 1), device=device)
    expected = torch.full((5,), float(rank % 2 + 1))
    op = c10d._make_nccl_premul_sum(0.5) if name == "PREMUL_SUM" else getattr(c10d.ReduceOp, name)
    c10d.all_reduce(tensor, op, group=theirs)
    dist.all_reduce(expected, op)
    assert torch.allclose(tensor.cpu(), expected)


def test_moving_collectives(theirs, rank, size, device):
    mine = torch.full((4,), float(rank), device=device)
    for root in range(size):
        tensor = mine.clone()
        c10d.broadcast(tensor, group=theirs, group_src=root)
        assert tensor.tolist() == [root] * 4
        parts = [torch.full((4,), float(each), device=device) for each in range(size)] if rank == root else None
        c10d.scatter(tensor, parts, group=theirs, group_src=root)
        assert tensor.tolist() == [rank] * 4
        gathered = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
        c10d.gather(mine, gathered, group=theirs, group_dst=root)
        assert gathered is None or [each[0].item() for each in gathered] == list(range(size))
    flat = torch.empty(4 * size, device=device)
    c10d.all_gather_into_tensor(flat, mine, group=theirs)
    assert flat.view(size, 4)[:, 0].tolist() == list(range(size))
    share = torch.empty(4, device=device)
    c10d.reduce_scatter_tensor(share, flat, group=theirs)
    assert share.tolist() == [rank * size] * 4
    sent = [torch.full((rank + peer + 1,), float(rank), device=device) for peer in range(size)]
    received = [torch.empty(rank + peer + 1, device=device) for peer in range(size)]
    c10d.all_to_all(received, sent, group=theirs)
    assert all(bool((each == peer).all()) for peer, each in enumerate(received))


def test_messages(theirs, rank, size, device):
    received = torch.empty(5, device=device)
    operations = [
        c10d.P2POp(
            c10d.isend, torch.full((5,), float(rank), device=device), group=theirs, group_peer=(rank + 1) % size
        ),
        c10d.P2POp(c10d.irecv, received, group=theirs, group_peer=(rank - 1) % size),
    ]
    for work in c10d.batch_isend_irecv(operations):
        work.wait()
    assert received.tolist() == [(rank - 1) % size] * 5


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
