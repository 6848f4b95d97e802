"""torch's own C++ backend by the name "torch": over a store that is opened over MPI, with groups, meshes and an end."""

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import hpcdist as dist
from hpcdist.backends.torch_gpu import TorchBackend

CONFIG = "cpu:mpi,cuda:torch"


@pytest.fixture(scope="module")
def group(world):
    made = dist.new_group(backend=CONFIG)
    yield made
    dist.destroy_process_group(made)


def test_it_is_torchs(group, device):
    backend = group.backends["cuda"]
    assert type(backend) is TorchBackend
    assert type(backend.inner) is c10d.ProcessGroupNCCL
    assert dist.get_backend(group) == CONFIG


def test_subgroups(group, rank, size, device):
    halves = [list(range(0, size, 2)), list(range(1, size, 2))]
    for _ in range(2):
        mine, _ = dist.new_subgroups_by_enumeration([each for each in halves if each], backend=CONFIG)
        own = halves[rank % 2]
        split = dist.split_group(group, [each for each in halves if each])
        for each in (mine, split):
            tensor = torch.full((3,), rank + 1.0, device=device)
            dist.all_reduce(tensor, group=each)
            assert tensor.tolist() == [sum(other + 1.0 for other in own)] * 3
            dist.destroy_process_group(each)


def test_a_mesh_with_fsdp2_and_dtensor(group, rank, size, device):
    mesh = DeviceMesh.from_group(group, "cuda")
    whole = torch.arange(8.0 * size, device=device).view(2 * size, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert sharded.to_local().tolist() == whole[2 * rank : 2 * rank + 2].tolist()
    assert (sharded * 2).redistribute(placements=[Replicate()]).to_local().tolist() == (2 * whole).tolist()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)).to(device)
    single = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)).to(device)
    single.load_state_dict(model.state_dict())
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        for each in (model, single):
            given = torch.stack([torch.arange(4.0, device=device) + other for other in range(size)])
            (each(given[rank : rank + 1]) if each is model else each(given)).mean().backward()
            torch.optim.SGD(each.parameters(), 0.1).step()
    for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)


def test_an_abort(world, rank, size, device):
    made = dist.new_group(backend=CONFIG)
    tensor = torch.ones(2, device=device)
    dist.all_reduce(tensor, group=made)
    if rank == 0 and size > 1:
        work = dist.all_reduce(tensor, group=made, async_op=True)  # which the others do not make
    made.abort()
    if rank == 0 and size > 1:
        with pytest.raises(RuntimeError):
            work.wait()
    dist.all_reduce(tensor)  # the world goes on
    dist.barrier()


def test_the_watchdog_sees_a_synchronous_call(group, gate, device):
    tensor = torch.ones(1, device=device)
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    backend = group.backend("cuda")
    assert backend.outstanding() is None
    gate.close()
    dist.all_reduce(tensor, group=group)
    assert backend.outstanding() is not None
    gate.open()
    torch.cuda.synchronize()
    assert backend.outstanding() is None


@pytest.mark.parametrize("is_told", [False, True])
def test_the_end_raises_the_error_of_a_call_that_nobody_got(world, is_told, device):
    group, tensor = dist.new_group(backend=CONFIG), torch.ones(1, device=device)
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    dist.barrier()
    for reason in ("the first", "the second"):
        group.backend(device).faults.interrupt(reason, 0)
        if is_told and reason == "the first":
            with pytest.raises(dist.DistBackendError) as caught:
                dist.all_reduce(tensor, group=group)
            caught.value.with_traceback(None)  # as unittest's assertRaises does
    with nullcontext() if is_told else pytest.raises(dist.DistBackendError, match="the first"):
        dist.destroy_process_group(group)


def test_torchs_own_watchdog_has_more_time(world):
    group = dist.new_group(backend=CONFIG, timeout=timedelta(hours=1))
    inner = group.backend("cuda").inner
    assert inner.options._timeout > timedelta(hours=1)
    group.set_timeout(timedelta(hours=2))
    assert inner.options._timeout > timedelta(hours=2)
    dist.destroy_process_group(group)


def test_the_end_after_a_timeout_does_not_wait_for_torchs_watchdog(world, rank, size, device):
    group, tensor = dist.new_group(backend=CONFIG, timeout=timedelta(seconds=1)), torch.ones(1, device=device)
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    dist.barrier()
    is_late = rank == 0 and size > 1
    if is_late:
        dist.all_reduce(tensor, group=group)  # which the others do not make
        torch.cuda.synchronize()
    dist.barrier()
    with pytest.raises(dist.DistBackendError, match="has not ended after") if is_late else nullcontext():
        dist.destroy_process_group(group)
    dist.all_reduce(tensor)  # the world goes on
    dist.barrier()
