"""torch's own C++ backend by the name "torch": over a store that is opened over MPI, with groups, meshes and an end."""

from __future__ import annotations

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


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "dtype",
    [*(torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool)],
    ids=str,
)
def test_collectives(group, dtype, is_async, rank, size, device):
    """Those that torch's library makes, and what is made of several."""
    mine = (torch.arange(6, device=device) % 2 + rank).to(dtype)
    ranks = [(torch.arange(6, device=device) % 2 + each).to(dtype) for each in range(size)]
    gathered, parts = torch.zeros(6 * size, device=device).to(dtype), [torch.empty_like(mine) for _ in range(size)]
    one, root = mine.clone(), size - 1
    strided = torch.zeros(6, 2, device=device).to(dtype)[:, 1]
    scattered, exchanged = torch.empty_like(mine), torch.empty_like(gathered)
    received, uneven = (
        [torch.empty_like(mine) for _ in ranks],
        [torch.empty_like(mine[: each % 3 + 1]) for each in range(size)],
    )
    works = [
        dist.all_reduce(one, dist.ReduceOp.MAX, group, is_async),
        dist.all_gather_into_tensor(gathered, mine, group, is_async),
        dist.all_gather(parts, mine, group, is_async),
        dist.broadcast(strided.copy_(mine), root, group, is_async),
        dist.scatter(scattered, ranks if rank == root else None, root, group, is_async),
        dist.gather(mine, received if rank == root else None, root, group, is_async),
        dist.all_to_all(uneven, [mine[: rank % 3 + 1]] * size, group, is_async),
        dist.all_to_all_single(exchanged, torch.cat([mine] * size), group=group, async_op=is_async),
        dist.barrier(group, is_async),
    ]
    for work in works:
        assert (work is not None) == is_async
        if is_async:
            work.wait()
    assert one.tolist() == torch.stack([each.cpu().to(torch.float32) for each in ranks]).amax(0).to(dtype).tolist()
    whole = torch.cat([each.cpu().view(torch.uint8) for each in ranks]).view(dtype)
    assert gathered.tolist() == whole.tolist() == exchanged.tolist()
    assert [each.tolist() for each in parts] == [each.tolist() for each in ranks]
    assert rank != root or [each.tolist() for each in received] == [each.tolist() for each in ranks]
    assert [each.tolist() for each in uneven] == [each[: peer % 3 + 1].tolist() for peer, each in enumerate(ranks)]
    assert strided.tolist() == ranks[root].tolist()
    assert scattered.tolist() == mine.tolist()


@pytest.mark.parametrize("name", ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM"])
def test_reductions(group, name, rank, size, device):
    op = c10d._make_nccl_premul_sum(0.5) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)
    whole = torch.arange(4.0 * size, device=device) + rank
    on_cpu, out, expected = whole.cpu(), torch.zeros(4, device=device), torch.zeros(4)
    dist.reduce_scatter_tensor(out, whole, op, group)
    dist.reduce_scatter_tensor(expected, on_cpu, op)
    torch.testing.assert_close(out.cpu(), expected)
    dist.reduce(whole, size - 1, op, group)
    dist.reduce(on_cpu, size - 1, op)
    torch.testing.assert_close(whole.cpu(), on_cpu)  # on other ranks it is as it was


def test_messages_together_and_one_by_one(group, rank, size, device):
    right, left = (rank + 1) % size, (rank - 1) % size
    mine, out = torch.full((5,), rank + 1.0, device=device), torch.zeros(5, 2, device=device)[:, 0]
    ops = [dist.P2POp(dist.isend, mine, right, group), dist.P2POp(dist.irecv, out, left, group)]
    for _ in range(3):
        out.zero_()
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert out.tolist() == [left + 1.0] * 5
    if size > 1:
        out.zero_()
        dist.send(mine, right, group) if rank % 2 == 0 else dist.recv(out, left, group)
        dist.recv(out, left, group) if rank % 2 == 0 else dist.send(mine, right, group)
        assert out.tolist() == [left + 1.0] * 5


def test_a_coalescing_manager(group, rank, size, device):
    first, second, out = torch.ones(3, device=device), torch.ones(4, device=device), torch.zeros(size, device=device)
    odd = torch.ones(2, device=device).to(torch.uint16)
    with c10d._coalescing_manager(group, device, async_ops=True) as manager:
        c10d.all_reduce(first, group=group)
        c10d.all_reduce(second, group=group)
    manager.wait()
    with group.grouped():
        works = [
            dist.all_gather_into_tensor(out, torch.full((1,), float(rank), device=device), group, async_op=True),
            dist.all_reduce(odd, group=group, async_op=True),
        ]
    for work in works:
        work.wait()
    assert first.tolist() + second.tolist() == [size] * 7
    assert out.tolist() == list(range(size))
    assert odd.tolist() == [size] * 2


def test_objects_and_cpu_tensors(group, rank, size, device):
    out = [None] * size
    dist.all_gather_object(out, {"rank": rank}, group)
    assert out == [{"rank": each} for each in range(size)]
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [size] * 2


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


def test_nothing_but_gpus(world, rank, size, device):
    made = dist.new_group(backend="cuda:torch")
    tensor = torch.ones(2, device=device)
    dist.all_reduce(tensor, group=made)
    assert tensor.tolist() == [size] * 2
    dist.destroy_process_group(made)


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
