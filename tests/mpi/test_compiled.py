"""Our calls work in a function that torch.compile takes."""

import pytest
import torch

import hpcdist as dist
from hpcdist.core.call_cache import LOOKS

MANY = 3 * LOOKS  # enough for a call to be known as a repetition


def test_calls_between_compiled_parts(rank, size):
    def step(value):
        value = value * 2
        dist.all_reduce(value)
        work = dist.all_reduce(value, async_op=True)
        work.wait()
        if dist.is_initialized() and dist.get_rank() >= 0:
            value = value + dist.get_world_size()
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": dist.get_rank()})
        dist.barrier()
        gathered = torch.empty(4 * size)
        dist.all_gather_single(gathered, value)
        return value + 1, gathered * 1, objects

    compiled = torch.compile(step, backend="eager")
    for _ in range(MANY):
        value, gathered, objects = compiled(torch.ones(4))
        assert value.tolist() == [2 * size**2 + size + 1] * 4
        assert gathered.tolist() == [2 * size**2 + size] * 4 * size
        assert objects == [{"rank": each} for each in range(size)]


def test_gradients_of_a_compiled_step(rank, size):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)

    def step(inputs):
        model(inputs).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        dist.all_reduce_coalesced([parameter.grad for parameter in model.parameters()])

    torch.compile(step, backend="eager")(torch.full((3, 4), float(rank)))
    mean = (size - 1) / 2
    torch.testing.assert_close(model.weight.grad, torch.full((2, 4), 3 * mean * size))
    torch.testing.assert_close(model.bias.grad, torch.full((2,), 3.0 * size))


def test_a_whole_graph_says_why_not():
    @torch.compile(backend="eager", fullgraph=True)
    def step(value):
        dist.all_reduce(value)
        return value

    with pytest.raises(Exception, match="it communicates"):
        step(torch.ones(3))
