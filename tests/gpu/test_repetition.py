"""Calls that repeat: the library's call at once, with the streams and lifetimes of the first call."""

import time

import pytest
import torch

import hpcdist as dist
from hpcdist.core import issue
from hpcdist.core.call_cache import LOOKS

COUNT = 3000
ROUNDS = 4 * LOOKS  # a group has prepared after two looks, whatever else is called meanwhile

SLEEP_CYCLES = 20_000_000
NAMES = ("all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single")


def call(name, value, rank, size, device, is_async):
    """Make a call on new tensors; return its Work, its output and what that must be."""
    mine = torch.full((COUNT,), float(value + rank), device=device)
    total = float(sum(value + each for each in range(size)))
    if name == "all_reduce":
        return dist.all_reduce(mine, async_op=is_async), mine.view(1, -1), [total]
    if name == "broadcast":
        return dist.broadcast(mine, size - 1, async_op=is_async), mine.view(1, -1), [float(value + size - 1)]
    if name == "all_gather_single":
        output = torch.empty(size * COUNT, device=device)
        work = dist.all_gather_single(output, mine, async_op=is_async)
        return work, output.view(size, COUNT), [float(value + each) for each in range(size)]
    output = torch.empty(COUNT, device=device)
    return dist.reduce_scatter_single(output, mine.repeat(size), async_op=is_async), output.view(1, -1), [total]


@pytest.fixture
def long_way(monkeypatch):
    """Return the rows of the calls that were checked anew."""
    rows = []
    check_anew = issue.issue_any

    def note(made, group, async_op):
        rows.append(made.row.name)
        return check_anew(made, group, async_op)

    monkeypatch.setattr(issue, "issue_any", note)
    return rows


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_again_and_again(name, is_async, long_way, rank, size, device):
    for value in range(ROUNDS):
        work, output, expected = call(name, value, rank, size, device, is_async)
        if is_async:
            work.wait()
        assert [row.unique().tolist() for row in output] == [[each] for each in expected]
    long_way.clear()
    call(name, 0, rank, size, device, False)
    assert not long_way, "the call was checked anew"


@pytest.mark.parametrize("name", NAMES)
def test_what_was_dropped_lives_as_long_as_the_call(name, rank, size, device):
    for value in range(ROUNDS):
        work, output, expected = call(name, value, rank, size, device, True)
        others = [torch.full((COUNT,), -7.0, device=device) for _ in range(12)]
        work.wait()
        del work, others
    assert [row.unique().tolist() for row in output] == [[each] for each in expected]


def test_in_a_coalescing_manager_and_a_capture(rank, size, device):
    tensor = torch.ones(COUNT, device=device)
    for _ in range(ROUNDS):
        dist.all_reduce(tensor.fill_(1.0))
    one, other = torch.ones(COUNT, device=device), torch.ones(COUNT, device=device)
    with dist._coalescing_manager():
        dist.all_reduce(one)
        dist.all_reduce(other)
    assert one.unique().tolist() == other.unique().tolist() == [float(size)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(tensor.fill_(1.0), async_op=True).wait()
    for _ in range(3):
        graph.replay()
    assert tensor.unique().tolist() == [float(size)]


def test_of_another_op_root_and_device(rank, size, device):
    for value in range(ROUNDS):
        tensor = torch.full((COUNT,), float(value + rank), device=device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX if value % 7 == 0 else dist.ReduceOp.SUM)
        expected = value + size - 1 if value % 7 == 0 else sum(value + each for each in range(size))
        assert tensor.unique().tolist() == [float(expected)]
        dist.broadcast(tensor.fill_(float(rank)), value % size)
        assert tensor.unique().tolist() == [float(value % size)]
        on_host = torch.full((COUNT,), float(rank))
        dist.all_reduce(on_host)
        assert on_host.unique().tolist() == [float(sum(range(size)))]


@pytest.mark.parametrize("is_async", [False, True])
def test_through_host_memory_each_call_keeps_its_place_among_streams(is_async, connect, rank, size, device):
    group = connect(backend="mpi")
    with torch.cuda.stream(torch.cuda.Stream()):
        for value in range(ROUNDS):
            tensor = torch.full((COUNT,), float(value), device=device)
            torch.cuda._sleep(SLEEP_CYCLES)
            tensor += rank  # what the call has to wait for
            work = dist.all_reduce(tensor, group=group, async_op=is_async)
            if is_async:
                time.sleep(0.003)  # the worker thread carries it out
                work.wait()
            assert tensor.unique().tolist() == [float(sum(value + each for each in range(size)))]
