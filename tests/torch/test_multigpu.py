"""The names of PyTorch 1.6 for one tensor a device; two tensors of the CPU stand for two devices."""

import pytest
import torch

import hpcdist as dist

pytestmark = pytest.mark.filterwarnings("ignore:torch dropped:FutureWarning")
DEVICES = 2


def pair(first, second):
    return [torch.full((3,), float(first)), torch.full((3,), float(second))]


def test_they_say_that_they_are_gone():
    with pytest.warns(FutureWarning, match="use one process a device and `all_reduce`"):
        dist.all_reduce_multigpu(pair(1, 2))


@pytest.mark.parametrize("async_op", [False, True])
def test_all_reduce(rank, size, async_op):
    given = pair(rank, rank + 10)
    work = dist.all_reduce_multigpu(given, async_op=async_op)
    if async_op:
        work.wait()
    total = sum(2 * each + 10 for each in range(size))
    assert [each[0].item() for each in given] == [total] * DEVICES
    given = pair(rank, rank + 10)
    dist.all_reduce_multigpu(given, dist.ReduceOp.AVG)
    assert given[1][0].item() == pytest.approx(total / (DEVICES * size))


def test_broadcast(rank, size):
    given = pair(rank, rank + 10)
    dist.broadcast_multigpu(given, src=size - 1, src_tensor=1)
    assert [each[0].item() for each in given] == [size + 9.0] * DEVICES


def test_reduce(rank, size):
    given = pair(rank, rank + 10)
    dist.reduce_multigpu(given, dst=0, op=dist.ReduceOp.MAX, dst_tensor=1)
    assert given[0][0].item() == rank
    assert given[1][0].item() == (size + 9 if rank == 0 else rank + 10)


def test_all_gather(rank, size):
    outputs = [[torch.empty(3) for _ in range(DEVICES * size)] for _ in range(DEVICES)]
    dist.all_gather_multigpu(outputs, pair(rank, rank + 10))
    expected = [value for each in range(size) for value in (each, each + 10)]
    for output in outputs:
        assert [each[0].item() for each in output] == expected
    with pytest.raises(ValueError, match="same length"):
        dist.all_gather_multigpu(outputs[:1], pair(0, 0))


def test_reduce_scatter(rank, size):
    outputs = [torch.empty(3) for _ in range(DEVICES)]
    inputs = [[torch.full((3,), float(each)) for each in range(DEVICES * size)] for _ in range(DEVICES)]
    dist.reduce_scatter_multigpu(outputs, inputs)
    assert [each[0].item() for each in outputs] == [DEVICES * size * (DEVICES * rank + j) for j in range(DEVICES)]


@pytest.mark.parametrize("index", [-1, DEVICES, "0"])
def test_tensors_that_are_not_in_the_list(index):
    for call in (
        lambda: dist.reduce_multigpu(pair(0, 0), 0, dst_tensor=index),
        lambda: dist.broadcast_multigpu(pair(0, 0), 0, src_tensor=index),
    ):
        with pytest.raises(TypeError if index == "0" else RuntimeError, match="root"):
            call()


def test_what_are_no_lists():
    for call in (
        lambda: dist.all_reduce_multigpu(5),
        lambda: dist.all_gather_multigpu(5, pair(0, 0)),
        lambda: dist.all_gather_multigpu(pair(0, 0), pair(0, 0)),
        lambda: dist.reduce_scatter_multigpu(pair(0, 0), [5]),
    ):
        with pytest.raises(TypeError, match="Invalid function argument"):
            call()


def test_the_names_of_backends():
    assert dist.dist_backend is dist.Backend
    assert dist.dist_backend.MPI == "mpi"
