"""Dispatch modes and tensor subclasses see the calls of our groups, as they see those of c10d's own groups."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as c10d
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import hpcdist as dist

OPERATORS = torch.ops.c10d


class Recorder(TorchDispatchMode):
    """A mode that keeps the names of the operators of c10d."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def calls(rank: int, size: int) -> dict[str, Any]:
    """Return by the name of c10d's operator a call of torch.distributed, whose output must hold what it returns."""
    one, many = torch.full((2,), rank + 1.0), torch.arange(2.0 * size)
    total = size * (size + 1) / 2
    ranks = [torch.full((2,), each + 1.0) for each in range(size)]
    out = [torch.zeros(2) for _ in range(size)]
    flat = torch.zeros(2 * size)
    share = torch.zeros(2)
    return {
        "allreduce_": (lambda: c10d.all_reduce(one), one, torch.full((2,), total)),
        "broadcast_": (lambda: c10d.broadcast(one, 0), one, ranks[0]),
        "allgather_": (lambda: c10d.all_gather(out, one), out[-1], ranks[-1]),
        "_allgather_base_": (lambda: c10d.all_gather_into_tensor(flat, one), flat, torch.cat(ranks)),
        "_reduce_scatter_base_": (
            lambda: c10d.reduce_scatter_tensor(share, many),
            share,
            size * torch.arange(2.0 * rank, 2.0 * rank + 2),
        ),
        "reduce_scatter_": (
            lambda: c10d.reduce_scatter(share, list(many.split(2))),
            share,
            size * torch.arange(2.0 * rank, 2.0 * rank + 2),
        ),
        "scatter_": (lambda: c10d.scatter(share, ranks if rank == 0 else None, 0), share, ranks[rank]),
        "alltoall_base_": (
            lambda: c10d.all_to_all_single(flat, many),
            flat,
            torch.arange(2.0 * rank, 2.0 * rank + 2).repeat(size),
        ),
    }


@pytest.mark.parametrize("name", list(calls(0, 2)))
def test_a_mode_sees_each_call_once_and_the_result_is_right(name, world, rank, size):
    call, output, expected = calls(rank, size)[name]
    with Recorder() as mode:
        call()
    assert mode.seen == [name]
    torch.testing.assert_close(output, expected)


def test_gather_and_messages_and_a_barrier_too(world, rank, size):
    out = [torch.zeros(1) for _ in range(size)]
    with Recorder() as mode:
        c10d.gather(torch.tensor([float(rank)]), out if rank == 0 else None, 0)
        c10d.barrier()
        if size > 1 and rank < 2:
            c10d.send(torch.ones(1), 1) if rank == 0 else c10d.recv(out[0], 0)
    assert mode.seen[:2] == ["gather_", "barrier"]
    assert len(mode.seen) == (3 if size > 1 and rank < 2 else 2)
    if rank == 0:
        assert [each.item() for each in out] == list(range(size))


def test_an_asynchronous_call_too(world, rank, size):
    tensor = torch.ones(3)
    with Recorder() as mode:
        work = c10d.all_reduce(tensor, async_op=True)
        assert isinstance(work, dist.Work)
        work.wait()
    assert mode.seen == ["allreduce_"]
    assert tensor.tolist() == [size] * 3


def test_comm_debug_mode_counts_calls_of_both_doors(world, rank, size):
    tensor, gathered = torch.ones(2), torch.zeros(2 * size)
    for _ in range(100):  # until the group knows this call by heart
        dist.all_reduce(tensor)
    tensor.fill_(1)
    with CommDebugMode() as mode:
        c10d.all_reduce(tensor)
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(gathered, tensor)
        dist.broadcast(tensor, 0)
        dist.all_gather([torch.zeros(2) for _ in range(size)], tensor)
    counts = Counter({str(key): value for key, value in mode.get_comm_counts().items()})
    assert counts["c10d.allreduce_"] == 2
    assert counts["c10d.broadcast_"] == 1
    assert counts["c10d._allgather_base_"] == counts["c10d.allgather_"] == 1
    assert mode.get_total_counts() == 5
    assert tensor.tolist() == [size**2] * 2
    assert gathered.tolist() == [size**2] * 2 * size


def test_modes_stay_as_they_were(world, rank, size):
    outer, inner = Recorder(), Recorder()
    with outer, inner:
        c10d.all_reduce(torch.ones(1))
        with pytest.raises((ValueError, RuntimeError)):
            c10d.reduce_scatter_tensor(torch.ones(3), torch.ones(3 * size + 1))
        c10d.all_reduce(torch.ones(1))
    assert outer.seen == inner.seen
    assert [each for each in outer.seen if each == "allreduce_"] == ["allreduce_"] * 2
    c10d.all_reduce(torch.ones(1))
    assert len(outer.seen) == len(inner.seen)


def test_arrays_of_numpy_too(world, rank, size):
    arrays = [np.ones(3), np.ones(3)[::-1]]
    for _ in range(100):  # until the group knows this call by heart
        dist.all_reduce(arrays[0].copy())
    with Recorder() as mode:
        for each in arrays:
            dist.all_reduce(each)
    assert mode.seen == ["allreduce_"] * 2
    assert [each.tolist() for each in arrays] == [[size] * 3] * 2
    lists = [[*np.zeros((size - 1, 2)), np.zeros(2)[::-1]] for _ in range(2)]
    with Recorder() as mode:
        dist.all_gather(lists[0], np.arange(2.0) + rank)
        dist.all_to_all(lists[1], [np.arange(2.0)[::-1] + rank] * size)
    assert mode.seen == ["allgather_", "alltoall_"]
    assert [each.tolist() for each in lists[0]] == [[r, 1 + r] for r in range(size)]
    assert [each.tolist() for each in lists[1]] == [[1 + r, r] for r in range(size)]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_gather_into_a_tensor_with_gaps_and_a_backward_array(is_async, world, rank, size):
    for out in (torch.zeros(4 * size)[::2], np.zeros(2 * size, np.float32)[::-1]):
        with Recorder():
            work = dist.gather_single(torch.full((2,), float(rank)), out if rank == 0 else None, async_op=is_async)
        assert work is None or work.wait()
        assert rank or out.tolist() == [each for each in range(size) for _ in range(2)]


@pytest.mark.parametrize("mode", [nullcontext, Recorder], ids=["plain", "mode"])
def test_a_gather_into_a_tensor_by_its_methods_earlier_name(mode, world, rank, size):
    out = torch.zeros(size)
    with mode():
        world.gather_into_tensor(out, torch.full((1,), float(rank))).wait()
    assert rank or out.tolist() == [*range(size)]


@pytest.mark.parametrize("door", [c10d, dist], ids=["torch", "facade"])
def test_a_wrapper_is_unwrapped_by_its_class(door, world, rank, size):
    tensor = TwoTensor(torch.full((2,), 1.0 + rank), torch.full((2,), 10.0 + rank))
    door.all_reduce(tensor)
    assert tensor.a.tolist() == [size * (size + 1) / 2] * 2
    assert tensor.b.tolist() == [10.0 * size + size * (size - 1) / 2] * 2
    gathered = TwoTensor(torch.zeros(2 * size), torch.zeros(2 * size))
    given = TwoTensor(torch.full((2,), float(rank)), torch.full((2,), -float(rank)))
    door.all_gather_into_tensor(gathered, given)
    assert gathered.a.tolist() == [each for each in range(size) for _ in range(2)]
    assert gathered.b.tolist() == [-each for each in range(size) for _ in range(2)]


@pytest.mark.parametrize("door", [c10d, dist], ids=["torch", "facade"])
def test_wrappers_in_lists_are_unwrapped_too(door, world, rank, size):
    given = TwoTensor(torch.full((2,), float(rank)), torch.full((2,), -float(rank)))
    gathered = [TwoTensor(torch.zeros(2), torch.zeros(2)) for _ in range(size)]
    door.all_gather(gathered, given)
    assert [(each.a.tolist(), each.b.tolist()) for each in gathered] == [([r, r], [-r, -r]) for r in range(size)]
    summed = [TwoTensor(torch.ones(count), torch.full((count,), 2.0)) for count in (1, 2)]
    door.all_reduce_coalesced(summed)
    assert [(each.a.tolist(), each.b.tolist()) for each in summed] == [([size] * n, [2 * size] * n) for n in (1, 2)]


@pytest.mark.parametrize("door", [c10d, dist], ids=["torch", "facade"])
def test_transforms_of_torch_func_see_a_call(door, world, rank, size):
    for _ in range(100):  # until the group knows this call by heart
        door.all_reduce(torch.ones(3))

    def twice_over_all_ranks(x):
        y = x * 2
        door.all_reduce(y)
        gathered = [torch.empty(3) for _ in range(size)]
        door.all_gather(gathered, y.detach())
        return y + sum(gathered) / size - gathered[0]

    assert torch.func.functionalize(twice_over_all_ranks)(torch.ones(3)).tolist() == [2.0 * size] * 3
    gradient, value = torch.func.grad_and_value(lambda x: twice_over_all_ranks(x).sum())(torch.ones(3))
    assert (gradient.tolist(), value.item()) == ([2.0] * 3, 6.0 * size)  # c10d's collectives have no derivative
    value, tangent = torch.func.jvp(twice_over_all_ranks, (torch.ones(3),), (torch.ones(3),))
    assert (value.tolist(), tangent.tolist()) == ([2.0 * size] * 3, [2.0] * 3)


@pytest.mark.parametrize("door", [c10d, dist], ids=["torch", "facade"])
def test_a_mode_or_transform_that_is_disabled_sees_no_call(door, world, rank, size):
    """As ``torch.utils._mode_utils.no_dispatch`` does; both stay on their stacks."""

    def call():
        summed, gathered = torch.ones(3), [torch.zeros(1) for _ in range(size)]
        door.all_reduce(summed)
        door.all_gather(gathered, torch.ones(1))
        assert (summed.tolist(), sum(gathered).item()) == ([size] * 3, size)

    with Recorder() as mode, torch._C._DisableTorchDispatch():
        call()
    assert mode.seen == []

    def twice(x):
        with torch._C._DisableFuncTorch():
            call()
        return (x * 2).sum()

    assert torch.func.grad(twice)(torch.ones(3)).tolist() == [2.0] * 3


@pytest.mark.parametrize("call", ["send", "recv", "isend", "irecv"])
def test_a_message_of_a_wrapper_says_what_to_send(two_ranks, call, world, rank, size):
    with pytest.raises(TypeError, match="TwoTensor, which wraps others"):
        getattr(dist, call)(TwoTensor(torch.ones(2), torch.ones(2)), (rank + 1) % size)


def test_fake_tensors_never_reach_a_library(world, rank, size):
    before = world.journal.sequence
    with FakeTensorMode():
        fake = torch.ones(4)
        c10d.all_reduce(fake)
        dist.all_reduce(fake)
        assert fake.shape == (4,)
        for door in (c10d, dist):
            door.all_gather([torch.empty(4) for _ in range(size)], fake)
            door.gather(fake, [torch.empty(4) for _ in range(size)] if rank == 0 else None)
            door.scatter(fake, [torch.empty(4) for _ in range(size)] if rank == 0 else None)
            door.reduce_scatter(fake, [torch.empty(4) for _ in range(size)])
            door.all_to_all([torch.empty(4) for _ in range(size)], [torch.empty(4) for _ in range(size)])
    assert world.journal.sequence == before
    real = torch.ones(1)
    c10d.all_reduce(real)
    assert real.item() == size
