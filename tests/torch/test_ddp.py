"""DistributedDataParallel: the gradients of all ranks' batches are those of one process on the whole batch."""

import copy
import gc
import time

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import hpcdist as dist
from tests.ranks import of_all_ranks

BATCH = 4


def perceptron():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(size, features=8):
    """Return every rank's batch."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(BATCH, features, generator=generator) for _ in range(size)]


def alone(model, size, steps=1, lr=0.1):
    """Train on the batches of all ranks in one process."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.cat(batches(size))).square().mean().backward()
        optimizer.step()
    return model


def train(model, rank, size, steps=1, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batches(size)[rank]).square().mean().backward()
        optimizer.step()
    return model


def same(one, other, **tolerance):
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


OPTIONS = {
    "one bucket": {},
    "many buckets": {"bucket_cap_mb": 0.001},
    "views": {"gradient_as_bucket_view": True},
    "views of many buckets": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
    "static graph": {"static_graph": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_training_equals_one_process(rank, size, name):
    group = dist.new_group(list(range(size)))  # of the facade
    parallel = DDP(perceptron(), process_group=group, **OPTIONS[name])
    same(train(parallel, rank, size, steps=3), alone(perceptron(), size, steps=3))
    dist.destroy_process_group(group)


def test_reproducible_gradients_have_the_same_bits_whatever_the_buckets(rank, size):
    found = []
    with dist.reproducible():
        for bucket_mb in (25, 0.001, 0.0001):
            parallel = train(DDP(perceptron(), bucket_cap_mb=bucket_mb), rank, size, steps=3)
            found.append(torch.cat([each.detach().reshape(-1) for each in parallel.parameters()]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_parameters_differ_before_the_first_broadcast(rank, size):
    torch.manual_seed(rank)
    parallel = DDP(nn.Linear(4, 4))
    torch.manual_seed(0)
    same(parallel.module, nn.Linear(4, 4), rtol=0, atol=0)


def test_unused_parameters(rank, size):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

        def forward(self, value, which):
            return self.branches[which](value)

    torch.manual_seed(1)
    model = Branches()
    parallel = DDP(copy.deepcopy(model), find_unused_parameters=True)
    parallel(batches(size)[rank], rank % 2).square().mean().backward()
    for each in range(size):
        (model(batches(size)[each], each % 2).square().mean() / size).backward()
    for branch, mine in zip(model.branches, parallel.module.branches, strict=True):
        expected = branch.weight.grad
        if expected is None:
            assert mine.weight.grad is None or not mine.weight.grad.any()
        else:
            torch.testing.assert_close(mine.weight.grad, expected)


@pytest.mark.parametrize("options", [{"static_graph": True}, {"find_unused_parameters": True}])
def test_compiled(rank, size, options):
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32, momentum=None), nn.Linear(32, 3))
    parallel = DDP(copy.deepcopy(model), **options)  # with buffers, which the forward pass broadcasts
    plain = DDP(model, **options)
    train(torch.compile(parallel, backend="aot_eager"), rank, size, steps=3)
    same(parallel, train(plain, rank, size, steps=3))


def test_no_sync_accumulates(rank, size):
    model = perceptron()
    parallel = DDP(copy.deepcopy(model))
    mine = batches(size)[rank]
    with parallel.no_sync():
        parallel(mine).square().mean().backward()
    model(mine).square().mean().backward()
    for one, other in zip(parallel.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    parallel(2 * mine).square().mean().backward()
    model.zero_grad()
    for each in batches(size):
        (model(each).square().mean() / size).backward()
        (model(2 * each).square().mean() / size).backward()
    for one, other in zip(parallel.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_buffers_follow_rank_0(rank, size):
    parallel = DDP(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), broadcast_buffers=True).eval()
    norm = parallel.module[1]
    norm.running_mean.fill_(rank + 1.0)
    norm.num_batches_tracked.fill_(rank + 5)
    parallel(batches(size)[rank])  # the forward pass begins with rank 0's buffers
    torch.testing.assert_close(norm.running_mean, torch.ones(4))
    assert int(norm.num_batches_tracked) == 5


def test_sparse_gradients(rank, size):
    torch.manual_seed(2)
    table = nn.Embedding(10, 4, sparse=True)
    expected = copy.deepcopy(table)
    parallel = DDP(table)
    parallel(torch.tensor([rank, 3, 3])).sum().backward()
    for each in range(size):
        (expected(torch.tensor([each, 3, 3])).sum() / size).backward()
    torch.testing.assert_close(table.weight.grad.to_dense(), expected.weight.grad.to_dense())


HOOKS = {
    "allreduce": (lambda: (None, default_hooks.allreduce_hook), {}),
    "fp16": (lambda: (None, default_hooks.fp16_compress_hook), {"rtol": 2e-2, "atol": 2e-3}),
    "powerSGD": (
        lambda: (powerSGD_hook.PowerSGDState(None, 8, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
        {"rtol": 0.3, "atol": 0.1},
    ),
}


@pytest.mark.parametrize("name", HOOKS)
def test_communication_hooks(rank, size, name):
    make, tolerance = HOOKS[name]
    parallel = DDP(perceptron(), gradient_as_bucket_view=True)
    parallel.register_comm_hook(*make())
    same(train(parallel, rank, size, steps=4), alone(perceptron(), size, steps=4), **tolerance)


@pytest.mark.parametrize(("kind", "like"), [("ALLREDUCE", "allreduce"), ("FP16_COMPRESS", "fp16")])
def test_the_built_in_hooks(rank, size, kind, like):
    parallel = DDP(perceptron())
    parallel._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
    same(train(parallel, rank, size, steps=2), alone(perceptron(), size, steps=2), **HOOKS[like][1])
    with pytest.raises(RuntimeError, match="can only be called once"):
        parallel._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))


def test_join_with_uneven_inputs(rank, size):
    parallel = DDP(perceptron())
    mine = [batches(size)[rank]] * (2 + rank)
    seen = 0
    with parallel.join():
        for batch in mine:
            parallel(batch).square().mean().backward()
            seen += 1
    assert seen == len(mine)
    same(parallel.module, perceptron())


def test_join_divides_by_the_ranks_that_are_left(rank, size):
    """C++ keeps the Work of the call that counts them, which nobody in Python holds."""
    parallel = DDP(nn.Linear(1, 1, bias=False))
    mine = torch.full((1, 1), rank + 1.0)
    with parallel.join(divide_by_initial_world_size=False):
        for step in range(3 if rank == size - 1 else 2):
            parallel.zero_grad()
            parallel(mine).sum().backward()
            gc.collect()
            if step < 2:
                assert parallel.module.weight.grad.item() == pytest.approx((size + 1) / 2)
            else:
                assert parallel.module.weight.grad.item() == pytest.approx(size)


def test_join_of_ddp_and_a_sharded_optimizer(rank, size):
    parallel = DDP(perceptron())
    optimizer = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.SGD, lr=0.1)
    with Join([parallel, optimizer]):
        for _ in range(1 + rank):
            optimizer.zero_grad()
            parallel(batches(size)[rank]).square().mean().backward()
            optimizer.step()
    flat = torch.cat([each.detach().reshape(-1) for each in parallel.parameters()])
    assert len({*of_all_ranks(flat.numpy().tobytes())}) == 1


def test_a_hook_that_calls_from_its_callback(rank, size):
    """Other ranks come late, so the callback runs where our queue is carried out, and calls again from there."""
    buckets = set()

    def hook(state, bucket):
        buckets.add(bucket.index())

        def second(future):
            total = future.value()[0]
            return dist.all_reduce(total.div_(size), dist.ReduceOp.AVG, async_op=True).get_future().wait()[0]

        time.sleep(0.05 * rank)
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(second)

    parallel = DDP(perceptron(), bucket_cap_mb=0.001)
    parallel.register_comm_hook(None, hook)
    same(train(parallel, rank, size, steps=3), alone(perceptron(), size, steps=3))
    assert len(buckets) > 1
