"""Coalesced calls give what single calls give."""

import numpy as np
import pytest
import torch

import hpcdist as dist
from hpcdist.core.call_cache import LOOKS
from tests.ranks import sum_of_ranks

from .expected import same
from .refused import freed


def test_all_reduce_coalesced(rank, size):
    shapes = [(3,), (), (0,), (2, 5), (400_000,), (17,)]
    tensors = [torch.full(shape, float(rank + i)) for i, shape in enumerate(shapes)]
    tensors.append(torch.full((4, 6), float(rank)).t())
    work = dist.all_reduce_coalesced(tensors, async_op=True)
    assert work.wait()
    assert list(map(id, work.get_future().wait())) == list(map(id, tensors))
    for i, tensor in enumerate(tensors[:-1]):
        assert same(tensor, torch.full(shapes[i], float(sum(r + i for r in range(size)))))
    assert bool((tensors[-1] == sum(range(size))).all())
    with pytest.raises(ValueError, match="dtypes"):
        dist.all_reduce_coalesced([torch.ones(1), torch.ones(1, dtype=torch.int32)])
    with pytest.raises(TypeError, match="op is 'sum'"):
        dist.all_reduce_coalesced([torch.ones(2)], op="sum")
    dist.all_reduce_coalesced([])


def test_the_result_is_the_tensors_of_the_list(world, rank, size):
    for begin in (lambda given: dist.all_reduce_coalesced(given, async_op=True), world.allreduce_coalesced):
        for given in ([torch.ones(2), torch.ones(3)], [np.ones(2), np.ones(3)], [torch.ones(1 << 20), torch.ones(1)]):
            for shown in (begin(given).get_future().wait(), begin(given).result()):
                assert [each.shape for each in shown] == [each.shape for each in given]
                assert [each.data_ptr() for each in shown] == [torch.as_tensor(each).data_ptr() for each in given]


def test_tensors_that_require_grad_or_were_made_in_inference_mode(world, rank, size):
    def made():
        with torch.inference_mode():
            inferred = [torch.ones(3, 2)[:, 0], torch.ones(3)]
        tensors = [torch.ones(3, requires_grad=True), *inferred, torch.ones(3)]
        return tensors[rank % 4 :] + tensors[: rank % 4]

    for call in (
        lambda tensors: world.allreduce_coalesced(tensors).wait(),
        lambda tensors: dist.all_reduce_coalesced(tensors),
        lambda tensors: [dist.all_reduce(each) for each in tensors],
    ):
        tensors = made()
        call(tensors)
        assert all(each.tolist() == [size] * 3 for each in tensors)
        assert all(each.grad_fn is None for each in tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_narrow_types_under_autocast_to_another(dtype, size):
    tensors = [torch.ones(3, 2).to(dtype)[:, 0], torch.ones(3).to(dtype)]
    with torch.autocast("cpu", torch.bfloat16):
        dist.all_reduce_coalesced(tensors)
        received = dist.all_to_all_varied([torch.ones(5000).to(dtype)] * size)  # too many for the slots
    assert all(each.tolist() == [size] * 3 for each in tensors)
    assert all(each.dtype is dtype for each in (*tensors, *received))


def sparse(rank, size):
    indices, values = torch.tensor([[rank, rank + 1]]), torch.tensor([1.0, 2.0])
    return torch.sparse_coo_tensor(indices, values, (size + 1,), check_invariants=False)


def test_sparse_tensors_among_dense_ones(world, rank, size):
    expected = sum(sparse(r, size).to_dense() for r in range(size))
    for call in (
        lambda tensors: dist.all_reduce_coalesced(tensors),
        lambda tensors: dist.all_reduce_coalesced(tensors, async_op=True).wait(),
        lambda tensors: world.allreduce_coalesced(tensors).wait(),
        coalesced,
    ):
        tensors = [sparse(rank, size), torch.ones(3), sparse(rank, size).requires_grad_(rank == 0)]
        call(tensors)
        assert all(torch.equal(each.detach().to_dense(), expected) for each in tensors[::2])
        assert tensors[1].tolist() == [size] * 3


def coalesced(tensors):
    with dist._coalescing_manager():
        for each in tensors:
            dist.all_reduce(each)


@pytest.mark.parametrize("is_async", [False, True])
def test_arrays_with_strides_below_zero(is_async, rank, size):
    def backward(value):
        return np.full(3, float(value))[::-1]

    arrays, outputs = [backward(rank) for _ in range(3)], [[backward(-1)] for _ in range(size)]
    with dist._coalescing_manager(async_ops=is_async) as manager:
        for each in arrays:
            dist.all_reduce(each)
    manager.wait()
    assert all(each.tolist() == [sum(range(size))] * 3 for each in arrays)
    work = dist.all_gather_coalesced(outputs, [np.full(3, float(rank))], async_op=is_async)
    assert work is None or work.wait()
    assert [each.tolist() for (each,) in outputs] == [[r] * 3 for r in range(size)]
    arrays = [backward(rank), backward(rank)]
    dist.group.WORLD.allreduce(arrays).wait()  # contributions to one
    assert all(each.tolist() == [2 * sum(range(size))] * 3 for each in arrays)
    arrays = [backward(rank + 1), backward(rank)]
    dist.group.WORLD.broadcast(arrays).wait()
    assert all(each.tolist() == [1] * 3 for each in arrays)


@pytest.mark.parametrize("is_async", [False, True])
def test_coalescing_manager(is_async, rank, size):
    small = [torch.full((5,), float(rank)) for _ in range(10)]
    other = torch.full((2,), rank, dtype=torch.int64)
    flat = torch.empty(size)
    output = torch.empty(1)
    with dist._coalescing_manager(async_ops=is_async) as manager:
        for tensor in small:
            assert dist.all_reduce(tensor) is None
        dist.all_reduce(other, dist.ReduceOp.MAX)
        dist.all_gather_into_tensor(flat, torch.tensor([float(rank)]))
        dist.reduce_scatter_tensor(output, torch.ones(size))
    if is_async:
        manager.wait()
    assert all(same(tensor, torch.full((5,), float(sum(range(size))))) for tensor in small)
    assert other.tolist() == [size - 1] * 2
    assert same(flat, torch.arange(float(size)))
    assert output.item() == size


def test_a_manager_keeps_the_order_of_its_calls(rank, size):
    tensor, flat = torch.full((3,), float(rank)), torch.empty(3 * size)
    with dist._coalescing_manager():
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(flat, tensor)
    assert flat.tolist() == [sum(range(size))] * 3 * size


def test_a_manager_that_fails_leaves_the_group_usable(rank, size):
    def fail():
        with dist._coalescing_manager():
            dist.all_reduce(torch.ones(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    waits = []

    def hold_back():
        with dist._coalescing_manager(async_ops=True):
            waits.append(dist.all_reduce(torch.ones(1), async_op=True).wait)
            waits.append(dist.all_reduce(torch.ones(1), async_op=True).get_future().wait)
            dist.all_gather_into_tensor(torch.ones(2 * size + 1), torch.ones(2), async_op=True)

    with pytest.raises(ValueError, match="do not fit"):
        hold_back()
    for wait in waits:
        with pytest.raises(RuntimeError, match=r"its group call was left by an error: .* do not fit"):
            wait()
    assert sum_of_ranks() == size
    with pytest.raises(ValueError, match="nest"), dist._coalescing_manager(), dist._coalescing_manager():
        pass


def test_a_call_that_is_held_back_has_not_ended(rank, size):
    """Its Work is that of the call that the manager begins at its end."""
    first, second, third = torch.ones(3), torch.ones(2), torch.ones(4)
    with dist._coalescing_manager(async_ops=True) as manager:
        listed = dist.all_reduce_coalesced([first, second], async_op=True)
        single = dist.all_reduce(third, async_op=True)
        method = dist.group.WORLD.broadcast([torch.ones(1)])
        works = (listed, single, method)
        assert not any(work.is_completed() for work in works)
        with pytest.raises(ValueError, match="held back by a coalescing manager"):
            single.wait()
        future = listed.get_future()
    for work in works:
        assert work.wait()
        assert work.is_completed()
    future.wait()
    manager.wait()
    for tensor in (first, second, third):
        assert tensor.tolist() == [float(size)] * tensor.numel()


def test_premultiplied_sums_in_a_manager_are_told_apart_on_all_ranks_alike(rank, size):
    for turn in range(3):
        tensors = [torch.ones(5), torch.ones(7)]
        one = dist._make_nccl_premul_sum(2.0)
        other = one if (rank + turn) % 2 else dist._make_nccl_premul_sum(2.0)  # the same object, or its like
        with dist._coalescing_manager():
            dist.all_reduce(tensors[0], one)
            dist.all_reduce(tensors[1], other)
        assert [each[0].item() for each in tensors] == [2.0 * size] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_list_that_comes_again_may_change_once_the_call_has_begun(dtype, rank, size):
    """Ranks whose tensors are strided take part in the same calls, however often these come."""

    def made(lengths):
        tensors = [torch.full((length,), rank + 1.0).to(dtype) for length in lengths]
        return [torch.stack([each, each], 1)[:, 0] for each in tensors] if rank == size - 1 else tensors

    for lengths in [[3, 4]] * 3 * LOOKS + [[3, 4, 5], [4, 3]] * LOOKS:
        first, second = made(lengths), made(lengths)
        listed = [*first]
        begun = dist.all_reduce_coalesced(listed, async_op=True)
        listed.clear()
        dist.all_reduce_coalesced(second)
        assert begun.wait()
        for each in (*first, *second):
            assert bool((each == size * (size + 1) / 2).all())


def test_calls_that_came_again_are_checked_before_the_first_is_sent(world, rank, size):
    def gather(outputs, inputs):
        world.all_gather_single_coalesced(outputs, inputs).wait()

    def gather_in_manager(outputs, inputs):
        with dist._coalescing_manager():
            for output, given in zip(outputs, inputs, strict=True):
                dist.all_gather_into_tensor(output, given)

    def gather_lists(outputs, inputs):
        lists = [list(shares) for shares in zip(*(output.chunk(size) for output in outputs), strict=True)]
        dist.all_gather_coalesced(lists, inputs)

    for call in (gather, gather_in_manager, gather_lists):
        inputs = [torch.full((2,), float(rank)), torch.full((2,), rank + 10.0)]
        for _ in range(2 * LOOKS):
            outputs = [torch.full((2 * size,), -1.0) for _ in inputs]
            call(outputs, inputs)
            assert [each[::2].tolist() for each in outputs] == [list(range(size)), list(range(10, 10 + size))]
        outputs = [torch.full((2 * size,), -1.0) for _ in inputs]
        with pytest.raises(ValueError, match="has no memory"):
            call(outputs, [inputs[0], freed(2)])
        with pytest.raises(ValueError, match=r"expected|do not fit"):
            call(outputs, [inputs[0], torch.ones(3)])
        assert all(each.tolist() == [-1.0] * 2 * size for each in outputs)


def test_a_list_that_is_held_back_may_change(rank, size):
    reduced = [torch.ones(2), torch.ones(3)]
    gathered = [torch.empty(1) for _ in range(size)]
    listed, outputs = [*reduced], [*gathered]
    with dist._coalescing_manager():
        dist.all_reduce_coalesced(listed)
        listed.clear()
        dist.all_gather(outputs, torch.tensor([float(rank)]))
        outputs[:] = [torch.empty(1) for _ in range(size)]
    assert [each.tolist() for each in reduced] == [[size] * 2, [size] * 3]
    assert [each.item() for each in gathered] == list(range(size))
