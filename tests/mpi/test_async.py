"""Asynchronous work ends, in order, with the buffers kept, and tells the truth about itself."""

import gc
import time
from datetime import timedelta

import pytest
import torch

import hpcdist as dist
from hpcdist.core.call_cache import LOOKS

from .expected import OPS, same


def test_work_and_future(rank, size):
    tensor = torch.full((4,), float(rank + 1))
    work = dist.all_reduce(tensor, async_op=True)
    assert isinstance(work, dist.Work)
    assert isinstance(work, torch.distributed.Work)
    assert work.wait()
    assert work.wait(timedelta(seconds=5))
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert same(work.result()[0], tensor)
    assert tensor[0] == size * (size + 1) / 2
    assert same(work.get_future().wait()[0], tensor)
    work.synchronize()
    with pytest.raises(RuntimeError):
        work.source_rank()


def test_future_asked_for_before_the_end(rank, size):
    tensor = torch.ones(1000)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert same(doubled.wait(), torch.full((1000,), 2.0 * size))


@pytest.mark.parametrize("name", ["SUM", "MAX", "AVG"])
def test_dropped_temporaries(name, rank, size):
    works = []
    for i in range(50):
        output = torch.empty(2000)
        work = dist.reduce_scatter_single(output, torch.full((2000 * size,), float(rank + i)), OPS[name], async_op=True)
        works.append((i, output, work))
    gc.collect()
    junk = [torch.full((2000 * size,), -7.0) for _ in range(50)]
    for i, output, work in works:
        work.wait()
        ranks = [r + i for r in range(size)]
        expected = {"SUM": sum(ranks), "MAX": max(ranks), "AVG": sum(ranks) / size}[name]
        assert same(output, torch.full((2000,), float(expected)))
    assert len(junk) == 50


def test_a_list_may_change_once_its_call_has_begun(rank, size):
    for _ in range(3 * LOOKS):
        outputs = [torch.zeros(3) for _ in range(size)]
        inputs = [torch.full((3,), float(rank)) for _ in range(size)]
        work = dist.all_to_all(outputs, inputs, async_op=True)
        outputs.clear()
        inputs.clear()
        work.wait()
        assert [each.tolist() for each in work.result()] == [[float(peer)] * 3 for peer in range(size)]


INTO_INFERENCE_TENSORS = {  # each goes by a copy that is written back when the call has ended
    "a list": lambda size: dist.all_gather([torch.zeros(4) for _ in range(size)], torch.ones(4), async_op=True),
    "strided": lambda size: dist.all_reduce(torch.ones(4, 4).t()[1:], async_op=True),
    "half average": lambda size: dist.all_reduce(torch.ones(4).half(), dist.ReduceOp.AVG, async_op=True),
    "scattered halves": lambda size: dist.reduce_scatter_single(
        torch.zeros(2).bfloat16(), torch.ones(2 * size).bfloat16(), async_op=True
    ),
}


@pytest.mark.parametrize("name", INTO_INFERENCE_TENSORS)
def test_the_modes_of_autograd_go_with_a_call(name, rank, size):
    dist.all_reduce(torch.ones(3), async_op=True).wait()  # the thread has begun outside
    with torch.inference_mode():
        work = INTO_INFERENCE_TENSORS[name](size)
    work.wait()
    expected = size if name in ("strided", "scattered halves") else 1
    assert all(bool((output == expected).all()) for output in work.result())


def test_a_callback_runs_outside_the_modes_of_the_call(rank, size):
    with torch.inference_mode():
        tensor = torch.ones(2, 3).t()
        modes = dist.all_reduce(tensor, async_op=True).get_future().then(lambda _: torch.is_inference_mode_enabled())
        outside = modes.wait()
    queued = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(20)]
    assert tensor[0, 0] == size
    assert outside in (True, False)  # True where the call had ended before the callback was added, on this thread
    for work in queued:
        work.wait()


def test_a_message_into_an_inference_tensor(rank, size):
    with torch.inference_mode():
        target = torch.zeros(3, 2).t()
        works = [dist.irecv(target, (rank - 1) % size), dist.isend(torch.full((2, 3), rank + 1.0), (rank + 1) % size)]
    for work in works:
        work.wait()
    assert target.tolist() == [[(rank - 1) % size + 1.0] * 3] * 2


def reduced_list(given, size):
    output = torch.empty(3)
    dist.reduce_scatter(output, [given] * size)
    return output / size


def exchanged_list(given, size):
    outputs = [torch.empty(3) for _ in range(size)]
    dist.all_to_all(outputs, [given] * size)
    return outputs[-1]


def strided(given, size):
    output = torch.empty(2 * size)
    dist.all_gather_single(output, given[::2])
    return output


def coalesced(given, size):
    part = given[::2]
    dist.all_reduce_coalesced([part, torch.ones(2)])
    return part / size


def several(given, size):
    options = torch.distributed.AllreduceOptions()
    options.asyncOp = False
    dist.group.WORLD.allreduce([given, torch.ones(3)], options)  # which sums over its list too
    return given / (size + 1)


# what reads its inputs to other memory before anything is sent
COPYING = [reduced_list, exchanged_list, strided, coalesced, several]


@pytest.mark.parametrize("call", COPYING, ids=lambda call: call.__name__)
def test_what_an_asynchronous_call_writes_is_read_after_it(call, rank, size):
    for _ in range(10):
        large, given = torch.ones(1 << 20), torch.ones(3)
        works = [dist.all_reduce(each, async_op=True) for each in (large, given)]
        assert call(given, size).eq(size).all()
        for work in works:
            work.wait()


MOVES = {
    "broadcast": lambda tensor, group, is_async: dist.broadcast(tensor, group_src=0, group=group, async_op=is_async),
    "reduce": lambda tensor, group, is_async: dist.reduce(tensor, group_dst=0, group=group, async_op=is_async),
    "all_reduce": lambda tensor, group, is_async: dist.all_reduce(tensor, group=group, async_op=is_async),
}


@pytest.mark.parametrize("numel", [1, 256, 4096, 65_536, 1_000_000])
@pytest.mark.parametrize("name", MOVES)
def test_groups_do_not_wait_for_each_other(name, numel, rank, size):
    # rank 0 begins on the first group and goes on to the second; the others come to the second first
    call = MOVES[name]
    first, second = dist.new_group(), dist.new_group()
    for _ in range(5):
        tensors = [torch.full((numel,), rank + 1.0) for _ in range(2)]
        work = call(tensors[0], first, True) if rank == 0 else None
        call(tensors[1], second, False)
        if work is None:
            call(tensors[0], first, False)
        else:
            work.wait()
        total = 1.0 if name == "broadcast" else size * (size + 1) / 2
        if rank == 0 or name != "reduce":
            assert all(same(tensor, torch.full((numel,), total)) for tensor in tensors)
    dist.destroy_process_group(first)
    dist.destroy_process_group(second)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_group_is_destroyed_with_calls_queued(is_large, rank, size):
    for _ in range(20):
        group = dist.new_group()
        tensors = [torch.full((40_000 if is_large else 3,), float(number)) for number in range(10)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        if rank % 2:
            time.sleep(1e-4)
            works[4].wait()
        dist.destroy_process_group(group)
        assert all(work.is_completed() and work.wait() for work in works)
        assert all(bool(tensor.eq(number * size).all()) for number, tensor in enumerate(tensors))


def test_the_first_large_calls_of_several_groups_at_once(size):
    """Each group makes its shared memory then, on a thread of its own: neither the GIL nor MPI may get in their way."""
    for _ in range(3):
        groups = [dist.new_group() for _ in range(6)]
        tensors = [torch.full((40_000,), float(number)) for number in range(6)]
        works = [
            dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, groups, strict=True)
        ]
        assert all(work.wait() for work in works)
        assert all(bool(tensor.eq(number * size).all()) for number, tensor in enumerate(tensors))
        for group in groups:
            dist.destroy_process_group(group)
