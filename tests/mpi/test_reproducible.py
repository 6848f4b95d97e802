"""Reductions that repeat bit for bit, in rank order, whatever the size, layout and form of the call."""

import numpy as np
import pytest
import torch

import hpcdist as dist
from hpcdist.core.reduction import fold
from tests.ranks import sum_of_ranks

# elements around what is gathered at once, small and large
SIZES = [1, 7, 1000, 5000, 100_003]


def contribution(rank, count, dtype):
    """Values of very different size, whose sum depends on the order in which they are added."""
    made = np.random.default_rng(rank)
    values = np.ldexp(made.standard_normal(count), made.integers(-12, 13, count))
    return torch.from_numpy(values).to(dtype)


def everyones(size, count, dtype):
    return [contribution(rank, count, dtype) for rank in range(size)]


def in_order(values, op=dist.ReduceOp.SUM):
    dtype = values[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return fold([each.to(wide) for each in values], op).to(dtype)


def bits(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@pytest.fixture
def _off():
    yield
    dist.reproducible(False)


pytestmark = pytest.mark.usefixtures("_off")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", SIZES)
def test_sums_in_rank_order(count, dtype, rank, size):
    expected = in_order(everyones(size, count, dtype))
    with dist.reproducible():
        for turn in range(3):
            tensor = contribution(rank, count, dtype)
            if (rank + turn) % 2:  # on some ranks strided, on some asynchronous
                tensor = torch.stack([tensor, tensor], dim=1)[:, 0]
            work = dist.all_reduce(tensor, async_op=bool((rank + turn) % 3))
            assert work is None or work.wait()
            assert torch.equal(bits(tensor), bits(expected)), turn
        tensor = contribution(rank, count, dtype)
        dist.reduce(tensor, size - 1)
        assert rank != size - 1 or torch.equal(bits(tensor), bits(expected))


def test_parts_of_a_message_have_the_bits_of_the_whole(rank, size):
    count = 20_000
    dist.reproducible()
    whole = contribution(rank, count, torch.float32)
    pieces = list(whole.clone().split(777))
    one_by_one = [piece.clone() for piece in pieces]
    dist.all_reduce(whole)
    dist.all_reduce_coalesced(pieces)
    for piece in one_by_one:
        dist.all_reduce(piece)
    assert torch.equal(bits(torch.cat(pieces)), bits(whole))
    assert torch.equal(bits(torch.cat(one_by_one)), bits(whole))


def test_scattered_sums_have_the_bits_of_all_reduce(rank, size):
    dist.reproducible()
    lengths = [3 + 2 * r for r in range(size)]
    mine = contribution(rank, sum(lengths), torch.float32)
    total = mine.clone()
    dist.all_reduce(total)
    ragged = torch.empty(lengths[rank])
    dist.reduce_scatter(ragged, list(mine.split(lengths)))
    assert torch.equal(bits(ragged), bits(total.split(lengths)[rank]))
    even = contribution(rank, 500 * size, torch.float64)
    total, share = even.clone(), torch.empty(500, dtype=torch.float64)
    dist.all_reduce(total)
    dist.reduce_scatter_single(share, even)
    assert torch.equal(bits(share), bits(total[500 * rank : 500 * rank + 500]))


@pytest.mark.parametrize("name", ["AVG", "PRODUCT", "PREMUL_SUM"])
def test_other_ops(name, rank, size):
    values = everyones(size, 4000, torch.float64)
    op = dist._make_nccl_premul_sum(0.3) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)
    if name == "PREMUL_SUM":
        values = [each * 0.3 for each in values]
    expected = in_order(values, dist.ReduceOp.PRODUCT if name == "PRODUCT" else dist.ReduceOp.SUM)
    if name == "AVG":
        expected = expected / size
    dist.reproducible()
    tensor = contribution(rank, 4000, torch.float64)
    dist.all_reduce(tensor, op)
    assert torch.equal(bits(tensor), bits(expected))


def test_what_no_order_changes_is_the_librarys(rank, size):
    dist.reproducible()
    tensor = torch.tensor([rank, -rank])
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size * (size - 1) // 2, -size * (size - 1) // 2]
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    assert tensor.item() == size - 1
    both = torch.tensor([rank + 1j], dtype=torch.complex64)
    dist.all_reduce(both)
    assert both.item() == size * (size - 1) / 2 + size * 1j


def test_what_only_moves_is_as_always(rank, size):
    dist.reproducible()
    dist.barrier()
    dist.barrier(async_op=True).wait()
    tensor = torch.tensor([float(rank)])
    gathered = torch.empty(size)
    dist.all_gather_single(gathered, tensor)
    assert gathered.tolist() == list(range(size))
    dist.broadcast(tensor, size - 1)
    assert tensor.item() == size - 1
    outputs = list(torch.empty(size).split(1))
    dist.all_to_all(outputs, list((torch.arange(float(size)) + 10 * rank).split(1)))
    assert [each.item() for each in outputs] == [10 * r + rank for r in range(size)]
    assert dist.get_world_size() == size


def test_ranks_that_differ_are_told(two_ranks, rank, size):
    with pytest.raises(dist.DistBackendError, match=r"reproducible: ranks have different settings"):
        dist.reproducible(rank == 0)
    assert sum_of_ranks() == size


def test_blocks_bring_back_what_was_before(rank, size):
    from hpcdist.core import hooks

    with dist.reproducible():
        with dist.reproducible(False):
            assert not hooks.reproducible
        assert hooks.reproducible
        with pytest.raises(KeyError), dist.reproducible(False):
            raise KeyError
        assert hooks.reproducible
    assert not hooks.reproducible


def test_the_product_of_complex_numbers_is_refused(world, rank, size):
    dist.reproducible()
    before = world.journal.sequence
    with pytest.raises(RuntimeError, match="has no reproducible form"):
        dist.all_reduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.PRODUCT)
    assert world.journal.sequence == before
