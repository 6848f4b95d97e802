"""Collectives in graphs of torch.compile, and those with gradients; each operator is in ``test_operators``."""

import os

import pytest
import torch
import torch.distributed as torch_dist
import torch.distributed._functional_collectives as functional
from torch.distributed.nn import functional as with_gradients

import hpcdist as dist


@pytest.fixture
def group(world):
    return dist.group.WORLD


@pytest.mark.parametrize("is_functional", [True, False])
def test_a_compiled_function(rank, size, group, is_functional):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(value):
        value = value * 2
        if is_functional:
            return functional.all_reduce(value, "sum", group) + 1
        torch_dist.all_reduce(value)
        return value + 1

    given = torch.full((4,), rank + 1.0)
    torch.testing.assert_close(step(given), torch.full((4,), size * (size + 1) + 1.0))


@pytest.mark.skipif("HPCDIST_TEST_INDUCTOR" not in os.environ, reason="a minute and a half of the C++ compiler")
def test_inductor(rank, size, group, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / f"rank{rank}"))

    @torch.compile(fullgraph=True)
    def step(value):
        return functional.all_reduce(value.sin(), "sum", group).cos()

    given = torch.linspace(0, 1, 8) + rank
    expected = sum((torch.linspace(0, 1, 8) + each).sin() for each in range(size)).cos()
    torch.testing.assert_close(step(given), expected)


def given_by(source, to=0):
    return torch.arange(4.0, dtype=torch.float64) + 10 * source + 100 * to


# name -> (what a rank's call returns, what it returns for the inputs of all ranks); each rank gives a list, one a rank
WITH_GRADIENTS = {
    "all_reduce": (
        lambda own, rank, size: with_gradients.all_reduce(own[0]),
        lambda all_, rank, size: sum(each[0] for each in all_),
    ),
    "broadcast": (
        lambda own, rank, size: with_gradients.broadcast(own[0], size - 1),
        lambda all_, rank, size: all_[-1][0] + 0,
    ),
    "reduce": (
        lambda own, rank, size: with_gradients.reduce(own[0], 0) * (rank == 0),
        lambda all_, rank, size: sum(each[0] for each in all_) * (rank == 0),
    ),
    "gather": (
        lambda own, rank, size: torch.cat(with_gradients.gather(own[0], size - 1)),
        lambda all_, rank, size: torch.cat([each[0] * (rank == size - 1) for each in all_]),
    ),
    "scatter": (lambda own, rank, size: with_gradients.scatter(own, 0), lambda all_, rank, size: all_[0][rank] + 0),
    "all_gather": (
        lambda own, rank, size: torch.cat(with_gradients.all_gather(own[0])),
        lambda all_, rank, size: torch.cat([each[0] for each in all_]),
    ),
    "reduce_scatter": (
        lambda own, rank, size: with_gradients.reduce_scatter(torch.empty_like(own[0]), own),
        lambda all_, rank, size: sum(each[rank] for each in all_),
    ),
    "all_to_all": (
        lambda own, rank, size: torch.cat(with_gradients.all_to_all([torch.empty_like(each) for each in own], own)),
        lambda all_, rank, size: torch.cat([each[rank] for each in all_]),
    ),
    "all_to_all_single": (
        lambda own, rank, size: with_gradients.all_to_all_single(own[0].new_empty(4 * size), torch.cat(own)),
        lambda all_, rank, size: torch.cat([each[rank] for each in all_]),
    ),
    "all_to_all_single with splits": (
        lambda own, rank, size: with_gradients.all_to_all_single(
            own[0].new_empty(size * (1 + rank % 2)),
            torch.cat([each[: 1 + to % 2] for to, each in enumerate(own)]),
            [1 + rank % 2] * size,
            [1 + to % 2 for to in range(size)],
        ),
        lambda all_, rank, size: torch.cat([each[rank][: 1 + rank % 2] for each in all_]),
    ),
}


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_calls_with_gradients(rank, size, name):
    """Values and gradients, beside one process that has the inputs of all ranks."""
    call, expected = WITH_GRADIENTS[name]
    own = [given_by(rank, to).requires_grad_() for to in range(size)]
    everyone = [[given_by(source, to).requires_grad_() for to in range(size)] for source in range(size)]
    result = call(own, rank, size)
    torch.testing.assert_close(result, expected(everyone, rank, size))
    (result.square() * (rank + 1)).sum().backward()
    sum((expected(everyone, each, size).square() * (each + 1)).sum() for each in range(size)).backward()
    for mine, other in zip(own, everyone[rank], strict=True):
        zeros = torch.zeros(4, dtype=torch.float64)
        torch.testing.assert_close(
            zeros if mine.grad is None else mine.grad, zeros if other.grad is None else other.grad
        )


def test_a_compiled_function_with_what_has_no_functional_form(rank, size):
    @torch.compile(backend="aot_eager")
    def step(value):
        value = value * 2
        torch_dist.broadcast(value, src=size - 1)
        torch_dist.barrier()
        return value + 1

    torch.testing.assert_close(step(torch.full((4,), rank + 1.0)), torch.full((4,), 2 * size + 1.0))
