"""TORCH_DIST_NAN_CHECK=1: NaN is found before it is sent, on the rank that would send it, and nothing is sent."""

import math
import sys

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
import torch.distributed.nn.functional as functional

import hpcdist as dist
from hpcdist.core import hooks
from tests.ranks import sum_of_ranks

NAN = math.nan


@pytest.fixture
def checked(world, monkeypatch):
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    dist.set_debug_level_from_env()
    yield
    monkeypatch.delenv("TORCH_DIST_NAN_CHECK")
    dist.set_debug_level_from_env()
    assert hooks.compare is hooks.check_message is None


def with_nan(count=6, dtype=torch.float32):
    made = torch.ones(count, dtype=dtype)
    made[2], made[4] = NAN, NAN
    return made


def outputs(size, count=6):
    return [torch.empty(count) for _ in range(size)]


SENDING = {
    "all_reduce": lambda size: dist.all_reduce(with_nan()),
    "all_reduce async": lambda size: dist.all_reduce(with_nan(), async_op=True),
    "torch's all_reduce": lambda size: torch_dist.all_reduce(with_nan()),
    "torch's functional": lambda size: functional.all_reduce(with_nan()),
    "coalesced": lambda size: dist.all_reduce_coalesced([torch.ones(3), with_nan()]),
    "broadcast": lambda size: dist.broadcast(with_nan(), 0),
    "reduce": lambda size: dist.reduce(with_nan(), size - 1),
    "all_gather": lambda size: dist.all_gather(outputs(size), with_nan()),
    "all_gather_single": lambda size: dist.all_gather_single(torch.empty(6 * size), with_nan()),
    "gather": lambda size: dist.gather(with_nan(), outputs(size), dst=0),
    "scatter": lambda size: dist.scatter(torch.empty(6), [with_nan() for _ in range(size)], src=0),
    "reduce_scatter": lambda size: dist.reduce_scatter(torch.empty(6), [with_nan() for _ in range(size)]),
    "all_to_all": lambda size: dist.all_to_all(outputs(size), [with_nan() for _ in range(size)]),
    "all_to_all_single": lambda size: dist.all_to_all_single(torch.empty(6 * size), with_nan(6 * size)),
    "isend": lambda size: dist.isend(with_nan(), 0),
    "exchange": lambda size: dist.exchange({0: with_nan()}, {}),
}


@pytest.mark.parametrize("call", SENDING)
def test_the_rank_that_has_nan_raises_and_the_others_go_on(checked, rank, size, call):
    if rank == 0:
        with pytest.raises(
            RuntimeError, match=r"NaN in what rank 0 was about to send: .* \[python -m hpcdist explain nan"
        ):
            SENDING[call](size)
    dist.barrier()  # not counted: the ranks are in step
    assert sum_of_ranks() == size


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
)
def test_it_says_which_call_line_group_and_element(checked, rank, dtype):
    tensor = with_nan(6, dtype).reshape(2, 3)
    place = sys._getframe().f_lineno + 2
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(tensor)
    name = str(dtype).removeprefix("torch.")
    number = dist.group.WORLD.journal.sequence + 1
    assert str(caught.value) == (
        f"NaN in what rank {rank} was about to send: all_reduce #{number} of group '0', called at test_nan_check.py:"
        f"{place} (test_it_says_which_call_line_group_and_element), has 2 NaN among the 6 elements of {name} [2, 3], "
        "the first at [0, 2]; nothing was sent [python -m hpcdist explain nan]"
    )


def test_numpy_views_and_messages(checked, rank):
    array = np.zeros((3, 4))
    array[1, 1] = NAN
    with pytest.raises(RuntimeError, match=r"1 NaN among the 12 elements of float64 \[3, 4\], the first at \[1, 1\]"):
        dist.all_reduce(array)
    with pytest.raises(RuntimeError, match=r"the first at \[1, 1\]"):
        dist.all_reduce(torch.from_numpy(array).T)
    with pytest.raises(RuntimeError, match=r"isend to rank 0 of group '0', .*the first at \[1, 1\]"):
        dist.isend(array, 0)


def test_float8_where_it_travels(checked):
    tensor = with_nan().to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="2 NaN among the 6 elements of float8_e4m3fn"):
        dist.all_gather_single(torch.empty(6 * dist.get_world_size(), dtype=tensor.dtype), tensor)


def test_what_is_only_received_into_may_hold_nan(checked, rank, size):
    received = with_nan() if rank else torch.ones(6)
    dist.broadcast(received, 0)
    gathered = with_nan(6 * size)
    dist.all_gather_single(gathered, received)
    target = with_nan(6)
    sent = dist.isend(received, (rank + 1) % size)
    dist.irecv(target, (rank - 1) % size).wait()
    sent.wait()
    dist.scatter(with_nan() if rank else torch.empty(6), [torch.ones(6)] * size if rank == 0 else None, src=0)
    assert not gathered.isnan().any()
    assert not target.isnan().any()


def test_other_values_and_types_pass(checked, size):
    for tensor in (torch.tensor([math.inf, 1.0]), torch.ones(2, dtype=torch.int64), torch.empty(0)):
        dist.all_reduce(tensor)
    dist.all_gather_object([None] * size, NAN)


def test_it_is_off_without_the_variable(world, size):
    assert hooks.compare is hooks.check_message is None
    tensor = with_nan()
    dist.all_reduce(tensor)
    assert tensor.isnan().sum() == 2


def test_beside_the_comparison_of_calls(world, rank, monkeypatch):
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with pytest.raises(RuntimeError, match="NaN in what rank"):
            dist.all_reduce(with_nan())
        dist.all_reduce(torch.ones(2))
    finally:
        monkeypatch.delenv("TORCH_DIST_NAN_CHECK")
        dist.set_debug_level(dist.DebugLevel.OFF)
