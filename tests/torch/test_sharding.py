"""FSDP2, DTensor, tensor parallel and checkpoints: sharded over the ranks, equal to one process."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import hpcdist as dist
from hpcdist.core.journal import RING


def perceptron(width=16):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4))


def inputs(size):
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(3, 8, generator=generator) for _ in range(size)]


def train(model, batches, steps=3):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batches).square().mean().backward()
        optimizer.step()
    return model


def whole(model):
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in model.named_parameters()}


@pytest.mark.parametrize("reshard", [True, False])
def test_fully_shard_equals_one_process(rank, size, reshard):
    expected = train(perceptron(), torch.cat(inputs(size)))
    model = perceptron()
    mesh = dist.init_device_mesh("cpu", (size,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    assert all(isinstance(each, DTensor) for each in model.parameters())
    train(model, inputs(size)[rank])
    for name, each in expected.named_parameters():
        torch.testing.assert_close(whole(model)[name], each)


def test_a_sharded_tensor_is_gathered_on_a_device_that_the_group_carries(world, rank, size):
    """torch takes the first of the backend's devices that is not the CPU, in a CUDA build without a GPU too."""
    assert {*torch.distributed.BackendConfig("hpcdist").get_device_backend_map()} == {*world.backends}
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{each}/cpu" for each in range(size)])
    out = torch.empty(2 * size, 3, device="cpu") if rank == 0 else None
    sharded_tensor.full(spec, (2 * size, 3), 7.0).gather(0, out)
    assert out is None or torch.equal(out, torch.full_like(out, 7.0))


IS_LATER = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


@pytest.mark.parametrize(
    ("given", "reduced"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        # in the dtype of the computation; from 2.15 on in the gradient's, which is the parameter's
        (None, torch.float32 if IS_LATER else torch.bfloat16),
    ],
)
def test_mixed_precision_equals_gloo(given, reduced, rank, size, gloo):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=given)
    trained = []
    for mesh in (DeviceMesh.from_group(gloo, "cpu"), dist.init_device_mesh("cpu", (size,))):
        RING.calls.clear()
        model = perceptron()
        fully_shard(model[0], mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        trained.append(whole(train(model, inputs(size)[rank])))
    assert {each[4] for each in RING.calls if str(each[2]).startswith("reduce_scatter")} == {reduced}
    theirs, ours = trained
    near = {"rtol": 1e-3, "atol": 1e-4} if reduced is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], **near)


def test_hybrid_shards(rank, size):
    if size != 4:
        pytest.skip("two by two ranks")
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = perceptron()
    fully_shard(model, mesh=mesh)
    train(model, inputs(size)[rank])
    expected = train(perceptron(), torch.cat(inputs(size)))
    for name, each in expected.named_parameters():
        torch.testing.assert_close(whole(model)[name], each)


PLACEMENTS = [Replicate(), Shard(0), Shard(1)]


@pytest.mark.parametrize("source", PLACEMENTS, ids=str)
@pytest.mark.parametrize("target", PLACEMENTS, ids=str)
@pytest.mark.parametrize("shape", [(8, 4), (5, 3)], ids=str)
def test_redistribute(size, source, target, shape):
    mesh = dist.init_device_mesh("cpu", (size,))
    value = torch.arange(float(torch.Size(shape).numel())).view(shape)
    moved = distribute_tensor(value, mesh, [source]).redistribute(mesh, [target])
    torch.testing.assert_close(moved.full_tensor(), value)
    torch.testing.assert_close(moved.to_local(), distribute_tensor(value, mesh, [target]).to_local())


@pytest.mark.parametrize("target", PLACEMENTS, ids=str)
def test_partial_sums_are_combined(rank, size, target):
    mesh = dist.init_device_mesh("cpu", (size,))
    mine = torch.full((6, 4), float(rank + 1))
    partial = DTensor.from_local(mine, mesh, [Partial()])
    expected = torch.full((6, 4), size * (size + 1) / 2)
    torch.testing.assert_close(partial.redistribute(mesh, [target]).full_tensor(), expected)


def test_redistribute_on_a_grid(size):
    if size != 4:
        pytest.skip("two by two ranks")
    mesh = dist.init_device_mesh("cpu", (2, 2))
    value = torch.arange(64.0).view(8, 8)
    sharded = distribute_tensor(value, mesh, [Shard(0), Shard(1)])
    for target in ([Shard(1), Shard(0)], [Replicate(), Shard(0)], [Shard(0), Shard(0)]):
        torch.testing.assert_close(sharded.redistribute(mesh, target).full_tensor(), value)


def test_sharded_product(size):
    mesh = dist.init_device_mesh("cpu", (size,))
    torch.manual_seed(4)
    left, right = torch.randn(8, 8), torch.randn(8, 8)
    product = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
    torch.testing.assert_close(product.full_tensor(), left @ right)


@pytest.mark.parametrize("is_sequential", [False, True])
def test_tensor_parallel_equals_one_process(rank, size, is_sequential):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.up = nn.Linear(8, 24)  # which 1 to 4 ranks can share evenly, as torch wants it
            self.down = nn.Linear(24, 8)

        def forward(self, value):
            return self.down(torch.relu(self.up(self.norm(value))))

    torch.manual_seed(6)
    model = Block()
    expected = copy.deepcopy(model)
    mesh = dist.init_device_mesh("cpu", (size,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if is_sequential:
        plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    batch = torch.randn(2, 12, 8)
    mine = batch.chunk(size, dim=1)[rank] if is_sequential else batch
    torch.testing.assert_close(model(mine), expected(batch))
    model(mine).square().mean().backward()
    expected(batch).square().mean().backward()
    for each, other in zip(model.parameters(), expected.parameters(), strict=True):
        grad = each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
        torch.testing.assert_close(grad, other.grad)


def test_a_checkpoint_is_saved_and_loaded(rank, size, shared_path):
    mesh = dist.init_device_mesh("cpu", (size,))
    model = perceptron()
    fully_shard(model, mesh=mesh)
    train(model, inputs(size)[rank])
    before = {name: each.clone() for name, each in whole(model).items()}
    dcp.save(get_model_state_dict(model), checkpoint_id=str(shared_path))
    dist.barrier()
    other = perceptron()
    fully_shard(other, mesh=mesh)
    for each in other.parameters():
        nn.init.zeros_(each)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=str(shared_path))
    set_model_state_dict(other, state)
    for name, each in whole(other).items():
        torch.testing.assert_close(each, before[name], rtol=0, atol=0)
    alone = {name: torch.zeros_like(each) for name, each in perceptron().state_dict().items()}
    dcp.load(alone, checkpoint_id=str(shared_path))  # unsharded from sharded
    for name, each in alone.items():
        torch.testing.assert_close(each, before[name].detach(), rtol=0, atol=0)


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_an_asynchronous_checkpoint(rank, size, shared_path, backend):
    model = perceptron()
    group = None if backend is None else torch.distributed.new_group(backend=backend)
    saved = dcp.async_save(model.state_dict(), checkpoint_id=str(shared_path), process_group=group)
    saved.result()
    dist.barrier()
    state = {name: torch.zeros_like(each) for name, each in model.state_dict().items()}
    dcp.load(state, checkpoint_id=str(shared_path))
    for name, each in model.state_dict().items():
        torch.testing.assert_close(state[name], each, rtol=0, atol=0)


def test_a_file_of_torch_save_is_read_by_one_rank(rank, size, shared_path):
    before = {"weight": torch.arange(12.0).view(3, 4)}
    if rank == 0:
        torch.save(before, shared_path / "model.pt")
    dist.barrier()
    state = {"weight": torch.zeros(3, 4)}
    dcp.load(
        state,
        storage_reader=BroadcastingTorchSaveReader(),
        planner=DynamicMetaLoadPlanner(),
        checkpoint_id=str(shared_path / "model.pt"),
    )
    torch.testing.assert_close(state["weight"], before["weight"], rtol=0, atol=0)


def test_the_device_types_of_a_group(world):
    group = dist.new_group()
    for each in (world, group):
        assert distributed_c10d._device_capability(each) == list(each.backends)
        assert distributed_c10d._get_pg_default_device(each) == torch.device("cpu")
        assert distributed_c10d._get_object_coll_device(each) == "cpu"
        assert each.get_backend(torch.device("cpu")).name() == each.backends["cpu"].name
    dist.destroy_process_group(group)
