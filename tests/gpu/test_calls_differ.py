"""Ranks whose calls on CUDA tensors differ: nothing is silent, and the error names both calls."""

import pytest
import torch

import hpcdist as dist
from hpcdist.core.errors import CallsDifferError
from hpcdist.core.waiting import wait_until
from tests.ranks import of_all_ranks

SECONDS = 10.0
BACKENDS = ["cpu:mpi,cuda:nccl", "cpu:mpi,cuda:torch"]


@pytest.fixture(params=BACKENDS)
def group(request, device):
    if dist.get_world_size() < 2:
        pytest.skip("needs 2 ranks")
    made = dist.new_group(backend=request.param)
    dist.all_reduce(torch.ones(2, device=device), group=made)
    torch.cuda.synchronize()
    return made


@pytest.fixture
def log(group):
    return group.backend("cuda").call_log()


def end(group, emulation):
    """End a group whose communicator may hang, and forget what the emulation says of its calls."""
    group.abort()
    if emulation is not None:
        emulation.take_violations()


@pytest.mark.parametrize("calls", [1, 100], ids=["first", "repeated"])
def test_roots_that_differ(group, log, calls, device, rank, emulation):
    tensor = torch.ones(4, device=device)
    for _ in range(calls):
        dist.broadcast(tensor, 0, group=group)
    dist.broadcast(tensor, rank % 2, group=group, async_op=True)
    assert wait_until(lambda: log.failure is not None, SECONDS)
    with pytest.raises((CallsDifferError, dist.DistBackendError), match="broadcast of 4 elements, float32, root 1"):
        dist.broadcast(tensor, 0, group=group)
    end(group, emulation)


def test_the_end_of_a_group_is_compared_too(group, log, rank):
    log.add(0 if rank == 0 else 1 << 20, 0)  # a call that differs, and ends on both
    with pytest.raises(CallsDifferError, match="do not make the same call"):
        dist.destroy_process_group(group)


def test_calls_that_are_one(group, log, device, rank):
    """Whatever only one rank knows of its tensors, its words are the others'."""
    size = group.size()
    strided = torch.ones(4, 4, device=device).t() if rank == 0 else torch.ones(4, 4, device=device)
    for _ in range(70):
        dist.all_reduce(strided, group=group)
        dist.all_reduce(torch.ones(3, device=device), group=group, async_op=rank == 0)
        dist.all_gather([torch.empty(2, device=device) for _ in range(size)], strided[:2, 0].contiguous(), group=group)
        out = torch.empty(size, dtype=torch.complex64, device=device)
        dist.all_to_all_single(out, torch.ones_like(out), group=group)
        shares = [1 + (rank + peer) % 2 for peer in range(size)]
        everything = torch.empty(sum(shares), device=device)
        dist.all_to_all_single(everything, torch.ones_like(everything), shares, shares, group=group)
        dist.reduce(strided[0].contiguous(), 1, group=group)
    torch.cuda.synchronize()
    assert len(set(of_all_ranks(log.number))) == 1
    assert log.number >= 6 * 70
    dist.destroy_process_group(group)
    assert log.failure is None


def test_a_rank_whose_graph_repeats_calls_unseen(group, device, rank):
    tensor = torch.ones(4, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(tensor, group=group)
    graph.replay()
    torch.cuda.synchronize()
    assert group.backend("cuda").call_log() is None
    dist.destroy_process_group(group)
