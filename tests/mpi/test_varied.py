"""Collectives of varied sizes: values, gradients, ranks that differ, and input that does not fit."""

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

import hpcdist as dist
from hpcdist.core.buffers import as_bytes
from hpcdist.core.reduction import AVG, MAX, SUM
from tests.ranks import of_all_ranks

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool,
          torch.complex64, torch.float8_e4m3fn]  # fmt: skip
# sizes of each rank: all differ, some empty, all empty, all the same
SIZES = {
    "growing": lambda rank: rank + 1,
    "falling": lambda rank: 5 - rank,
    "odd": lambda rank: 3 * (rank % 2),
    "none": lambda rank: 0,
    "same": lambda rank: 2,
}
PAIRS = {"triangle": lambda a, b: a + 2 * b, "one way": lambda a, b: 2 * (a < b), "none": lambda a, b: 0}


def rows(size, source, dtype=torch.float64, target=0):
    """What one rank gives: (size, 2, 3), telling whose it is."""
    values = torch.arange(size * 6, dtype=torch.float64) % 5 + 7 * source + 31 * target
    return (values % 64).view(size, 2, 3).to(dtype)


def across(tensor, dim):
    """The same rows along another dimension."""
    return tensor.movedim(0, dim)


def laid_out(tensor, rank):
    """The same values in memory of another layout on each rank."""
    if rank % 3 == 1:
        return torch.stack([tensor, tensor], dim=-1)[..., 0]
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0) if rank % 3 == 2 else tensor.clone()


def equal(one, other):
    """Equal bits, for dtypes too that torch cannot compare."""
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert one.is_contiguous()
    return torch.equal(as_bytes(one), as_bytes(other.contiguous()))


@pytest.mark.parametrize("pattern", SIZES)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather(rank, size, pattern, dim):
    counts = [SIZES[pattern](each) for each in range(size)]
    for dtype in DTYPES:
        given = laid_out(across(rows(counts[rank], rank, dtype), dim), rank)
        gathered, sizes = dist.all_gather_varied(given, dim)
        assert sizes == counts
        assert equal(gathered, across(torch.cat([rows(n, r, dtype) for r, n in enumerate(counts)]), dim))


@pytest.mark.parametrize("pattern", SIZES)
@pytest.mark.parametrize("dim", [0, -1])
def test_reduce_scatter(rank, size, pattern, dim):
    counts = [SIZES[pattern](each) for each in range(size)]
    first, total = sum(counts[:rank]), sum(counts)
    for op, dtype in ((SUM, torch.float32), (SUM, torch.bfloat16), (MAX, torch.int64), (AVG, torch.float64)):
        whole = torch.stack([rows(total, each, torch.float64) for each in range(size)])
        combined = {SUM: whole.sum(0), MAX: whole.amax(0), AVG: whole.mean(0)}[op]
        given = laid_out(across(rows(total, rank, dtype), dim), rank)
        found = dist.reduce_scatter_varied(given, counts[rank], dim, op)
        assert equal(found, across(combined[first : first + counts[rank]].to(dtype), dim))


@pytest.mark.parametrize("pattern", PAIRS)
@pytest.mark.parametrize("dim", [0, 1])
def test_all_to_all(rank, size, pattern, dim):
    count = PAIRS[pattern]
    for dtype in DTYPES:
        given = [laid_out(across(rows(count(rank, to), rank, dtype, to), dim), rank) for to in range(size)]
        received = dist.all_to_all_varied(given, dim)
        assert len(received) == size
        for source, tensor in enumerate(received):
            assert equal(tensor, across(rows(count(source, rank), source, dtype, rank), dim))


@pytest.mark.parametrize("is_even", [True, False])
def test_calls_that_come_again(rank, size, is_even):
    """The same sizes in a row, which the group prepares for, and others after them."""
    for turn in range(100):
        rows = 2 if is_even else turn // 50 + 1 + rank
        gathered, sizes = dist.all_gather_varied(torch.full((rows, 2), float(rank)))
        assert [part.mean().item() for part in gathered.split(sizes)] == list(range(size))
        sent = [torch.full((2 if is_even else to + 1, 3), float(rank)) for to in range(size)]
        received = dist.all_to_all_varied(sent)
        assert [len(each) for each in received] == [2 if is_even else rank + 1] * size
        assert all(bool((each == peer).all()) for peer, each in enumerate(received))
        mine = dist.reduce_scatter_varied(torch.ones(sum(sizes), 2), rows)
        assert mine.tolist() == [[size, size]] * rows


def test_sizes_that_jump(rank, size):
    """The rows are in the slots of the first exchange, or too large for these, or none, on some ranks or on all."""
    for turn, base in enumerate([1, 1, 30, 30, 5000, 2, 0, 0, 200, 7, 7, 100_000, 1, 1]):
        counts = [base * (each + turn) % (3 * base + 1) for each in range(size)]
        given = laid_out(rows(counts[rank], rank), rank + turn).requires_grad_(turn % 3 == 2)
        gathered, sizes = dist.all_gather_varied(given)
        assert sizes == counts
        assert equal(gathered.detach(), torch.cat([rows(n, r) for r, n in enumerate(counts)]))
        kept = gathered.detach().clone()
        sent = [laid_out(rows(base * (rank + to) % 5, rank, target=to), to) for to in range(size)]
        received = dist.all_to_all_varied(sent)
        for source, tensor in enumerate(received):
            assert equal(tensor, rows(base * (source + rank) % 5, source, target=rank))
        dist.all_gather_varied(torch.ones(counts[rank] + 1))
        assert equal(gathered.detach(), kept)


@pytest.mark.parametrize("base", [1, 30_000])
def test_inside_a_coalescing_manager(rank, size, base):
    """These calls are not held back: their results, here columns, are copied before the manager's block ends."""
    counts = [base * (each + 1) for each in range(size)]
    with dist._coalescing_manager():
        gathered, sizes = dist.all_gather_varied(across(rows(counts[rank], rank), 1), 1)
        mine = dist.reduce_scatter_varied(torch.ones(2, sum(counts)), counts[rank], 1)
        received = dist.all_to_all_varied([across(rows(counts[rank], rank, target=to), 1) for to in range(size)], 1)
    assert sizes == counts
    assert equal(gathered, across(torch.cat([rows(n, each) for each, n in enumerate(counts)]), 1))
    assert equal(mine, torch.full((2, counts[rank]), float(size)))
    for source, tensor in enumerate(received):
        assert equal(tensor, across(rows(counts[source], source, target=rank), 1))


def test_numpy(rank, size):
    gathered, _ = dist.all_gather_varied(np.full((rank, 2), rank))
    assert isinstance(gathered, np.ndarray)
    np.testing.assert_array_equal(gathered, np.concatenate([np.full((each, 2), each) for each in range(size)]))
    shares = dist.reduce_scatter_varied(gathered, rank)
    np.testing.assert_array_equal(shares, np.full((rank, 2), rank * size))
    received = dist.all_to_all_varied([np.full(rank, to) for to in range(size)])
    assert [each.tolist() for each in received] == [[rank] * source for source in range(size)]


def test_groups(rank, size):
    even = dist.new_group(range(0, size, 2))
    if rank % 2:
        with pytest.warns(UserWarning, match="all_gather_varied"):
            assert dist.all_gather_varied(torch.ones(rank), group=even) is None
    else:
        _, sizes = dist.all_gather_varied(torch.ones(rank), group=even)
        assert sizes == list(range(0, size, 2))
        dist.destroy_process_group(even)


class Everyones(torch.autograd.Function):
    """Inputs that all ranks have, so that all check one function: their gradient is the mean of the ranks'."""

    @staticmethod
    def forward(ctx, *given):
        return tuple(each.clone() for each in given)

    @staticmethod
    def backward(ctx, *gradients):
        gradients = [each.clone() for each in gradients]
        for each in gradients:
            dist.all_reduce(each, dist.ReduceOp.AVG)
        return tuple(gradients)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients(rank, size, dtype):
    """Against those that autograd finds in one process, which has the inputs of all ranks."""
    counts = [SIZES["odd"](each) + 1 for each in range(size)]
    leaves = [rows(n, r, dtype).requires_grad_() for r, n in enumerate(counts)]
    sum((torch.cat(leaves).square() * (1 + r)).real.sum() for r in range(size)).backward()
    own = rows(counts[rank], rank, dtype).requires_grad_()
    (dist.all_gather_varied(own)[0].square() * (1 + rank)).real.sum().backward()
    assert torch.allclose(own.grad, leaves[rank].grad)

    for op, share in ((SUM, 1), (AVG, size)):
        wide = [rows(sum(counts), r, dtype).requires_grad_() for r in range(size)]
        parts = (sum(wide) / share).split(counts)
        sum((part.square() * (1 + r)).real.sum() for r, part in enumerate(parts)).backward()
        own = rows(sum(counts), rank, dtype).requires_grad_()
        (dist.reduce_scatter_varied(own, counts[rank], op=op).square() * (1 + rank)).real.sum().backward()
        assert torch.allclose(own.grad, wide[rank].grad)


def test_gradients_of_all_to_all(rank, size):
    def count(a, b):
        return (a + b) % 3

    def weight(a, b):
        return rows(count(a, b), a + 1, target=b)

    leaves = [rows(count(rank, to), rank, target=to).requires_grad_() for to in range(size)]
    received = dist.all_to_all_varied(leaves)
    sum((part.square() * weight(source, rank)).sum() for source, part in enumerate(received)).backward()
    for to, leaf in enumerate(leaves):
        assert torch.allclose(leaf.grad, 2 * leaf.detach() * weight(rank, to))


def test_gradcheck(rank, size):
    inputs = [rows(each % 2 + 1, each)[:, :1, :1].clone().requires_grad_() for each in range(size)]
    total = sum(each.size(0) for each in inputs)
    factors = torch.arange(1.0 + rank, 1.0 + rank + total).view(-1, 1, 1)

    def function(*given):
        gathered, sizes = dist.all_gather_varied(Everyones.apply(*given)[rank].sin())
        mixed = dist.reduce_scatter_varied(gathered * factors, sizes[rank])
        back = dist.all_to_all_varied([mixed * (to + 1) for to in range(size)])
        return dist.all_gather_varied(torch.cat(back).cos())[0]

    assert gradcheck(function, inputs)


def test_gradients_when_one_rank_needs_them(rank, size):
    """Only the last rank's input requires grad: all take part in its gradient."""
    given = torch.full((rank + 1,), float(rank), requires_grad=rank == size - 1)
    gathered, _ = dist.all_gather_varied(given)
    assert gathered.requires_grad
    gathered.sum().backward()
    if rank == size - 1:
        assert given.grad.tolist() == [float(size)] * size
    else:
        assert given.grad is None


def test_no_grad(rank):
    given = torch.ones(rank + 1, requires_grad=True)
    with torch.no_grad():
        gathered, _ = dist.all_gather_varied(given)
    assert not gathered.requires_grad
    assert not dist.all_gather_varied(given.detach())[0].requires_grad
    assert not dist.all_gather_varied(torch.ones(rank, dtype=torch.int64))[0].requires_grad


WRONG = {
    "dtype": (lambda rank: torch.zeros(2, 3, dtype=torch.int32 if rank else torch.int64), "torch.int64 ['any', 3]"),
    "width": (lambda rank: torch.zeros(2, 3 + bool(rank)), "torch.float32 ['any', 3]"),
    "dimensions": (lambda rank: torch.zeros(2, 3) if rank else torch.zeros(2), "torch.float32 ['any']"),
    "scalar on rank 0": (lambda rank: torch.zeros(2) if rank else torch.tensor(1.0), "torch.float32 []"),
    "scalars": (lambda rank: torch.tensor(1.0), "torch.float32 []"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_one_error_on_every_rank(rank, size, what):
    make, shown = WRONG[what]
    if size == 1 and what != "scalars" and "scalar" not in what:
        pytest.skip("one rank agrees with itself")
    messages = []
    for call in (
        lambda: dist.all_gather_varied(make(rank)),
        lambda: dist.reduce_scatter_varied(make(rank), 1),
        lambda: dist.all_to_all_varied([make(rank) for _ in range(size)]),
    ):
        with pytest.raises((ValueError, RuntimeError), match="do not fit") as raised:
            call()
        messages.append(str(raised.value))
    everyone = of_all_ranks(messages)
    assert all(each == messages for each in everyone)
    assert shown in messages[0]
    dist.barrier()


def test_wrong_numbers(rank, size):
    with pytest.raises(ValueError, match="add up to 7"):
        dist.reduce_scatter_varied(torch.zeros(7), 8)
    for wrong in (-1, -(1 << 70), 1 << 70):
        with pytest.raises(ValueError, match="add up to"):
            dist.reduce_scatter_varied(torch.zeros(3), wrong if rank == 0 else 3)
    with pytest.raises(ValueError, match="one for each rank"):
        dist.all_to_all_varied([torch.zeros(1)] * (size + (rank == size - 1)))
    with pytest.raises(RuntimeError, match="no gradient"):
        dist.reduce_scatter_varied(torch.zeros(size, requires_grad=rank == 0), 1, op=MAX)
    with pytest.raises(ValueError, match="expected a dimension 2"):
        dist.all_gather_varied(torch.zeros(3, 2), dim=2)
    for wrong in (None, [torch.zeros(1)], torch.zeros(2).to_sparse()):
        with pytest.raises(TypeError):
            dist.all_gather_varied(wrong)
    with pytest.raises(TypeError):
        dist.reduce_scatter_varied(torch.zeros(size), 1.5)


def test_a_dimension_or_op_of_its_own_is_an_error_on_every_rank(two_ranks, rank, size):
    rows = torch.ones(size, size)
    with pytest.raises(ValueError, match="do not fit"):
        dist.reduce_scatter_varied(rows, 1, dim=min(rank, 1))
    with pytest.raises(ValueError, match="do not fit"):
        dist.reduce_scatter_varied(rows, 1, op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
    with pytest.raises(ValueError, match="do not fit"):
        dist.all_gather_varied(rows, dim=min(rank, 1))
    with pytest.raises(ValueError, match="do not fit"):
        dist.all_to_all_varied([rows] * size, dim=min(rank, 1))
    assert dist.reduce_scatter_varied(rows, 1, dim=-2 if rank else 0).tolist() == [[size] * size]
