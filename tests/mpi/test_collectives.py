"""Every row of the table computes what the mathematics says, for every dtype, op, root and layout."""

import itertools
import os

import numpy as np
import pytest
import torch

import hpcdist as dist

from .expected import MOVING, OPS, PAIRS, combined, equal, ids, mathematics, same, values, widened

LOSES_NAN = os.environ.get("HPCDIST_TEST_BACKEND") == "gloo"  # its MIN and MAX of NaN and a number may be either


@pytest.mark.parametrize(("dtype", "name"), PAIRS, ids=ids)
def test_reduce_to_every_root(dtype, name, rank, size):
    for root, length in itertools.product(range(size), (5, 2100)):  # MPICH 4.0.2 crashed from 2 KiB on
        tensor = values(rank, length, dtype)
        dist.reduce(tensor, root, OPS[name])
        expected = combined(name, size, length, dtype) if rank == root else values(rank, length, dtype)
        assert equal(tensor, expected), (root, length)


@pytest.mark.parametrize(("dtype", "name"), PAIRS, ids=ids)
def test_reduce_scatter(dtype, name, rank, size):
    share = 3
    whole = combined(name, size, share * size, dtype)
    output = torch.empty(share, dtype=dtype)
    dist.reduce_scatter_single(output, values(rank, share * size, dtype), OPS[name])
    assert equal(output, whole[rank * share : (rank + 1) * share])
    uneven = [1 + r for r in range(size)]
    parts = list(values(rank, sum(uneven), dtype).split(uneven))
    output = torch.empty(uneven[rank], dtype=dtype)
    dist.reduce_scatter(output, parts, OPS[name])
    assert equal(output, combined(name, size, sum(uneven), dtype).split(uneven)[rank])


@pytest.mark.parametrize("dtype", MOVING, ids=ids)
def test_moving_collectives_take_every_dtype(dtype, rank, size):
    mine = values(rank, 4, dtype)
    everyone = [values(r, 4, dtype) for r in range(size)]
    for root in range(size):
        tensor = mine.clone()
        dist.broadcast(tensor, root)
        assert same(tensor, everyone[root])
        gathered = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
        dist.gather(mine, gathered, root)
        assert rank != root or all(same(a, b) for a, b in zip(gathered, everyone, strict=True))
        output = torch.empty_like(mine)
        dist.scatter(output, everyone if rank == root else None, root)
        assert same(output, mine)
    gathered = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(gathered, mine)
    assert all(same(a, b) for a, b in zip(gathered, everyone, strict=True))
    for call in (dist.all_gather_single, dist.all_gather_into_tensor):
        flat = torch.empty(4 * size, dtype=dtype)
        call(flat, mine)
        assert same(flat, torch.cat([e.view(torch.uint8) for e in everyone]).view(dtype))
    to_each = torch.stack([values(rank + 10 * r, 2, dtype).view(torch.uint8) for r in range(size)]).view(dtype)
    output = torch.empty_like(to_each)
    dist.all_to_all_single(output, to_each)
    for r in range(size):
        assert same(output[r].reshape(-1), values(r + 10 * rank, 2, dtype))
    outputs = [torch.empty(2, dtype=dtype) for _ in range(size)]
    dist.all_to_all(outputs, list(to_each))
    assert all(same(out, values(r + 10 * rank, 2, dtype)) for r, out in enumerate(outputs))


def test_shares_of_different_sizes(rank, size):
    uneven = [r % 3 for r in range(size)]
    outputs = [torch.empty(length) for length in uneven]
    dist.all_gather(outputs, values(rank, uneven[rank], torch.float32))
    assert all(same(out, values(r, uneven[r], torch.float32)) for r, out in enumerate(outputs))
    # rank s sends s + d rows of two elements to rank d
    sent, received = [rank + d for d in range(size)], [s + rank for s in range(size)]
    data = torch.cat([torch.full((rank + d, 2), 100.0 * rank + d) for d in range(size)])
    output = torch.empty(sum(received), 2)
    dist.all_to_all_single(output, data, received, sent)
    assert same(output, torch.cat([torch.full((s + rank, 2), 100.0 * s + rank) for s in range(size)]))
    outputs = [torch.empty(n) for n in received]
    dist.all_to_all(outputs, [torch.full((n,), float(rank)) for n in sent])
    assert all(same(out, torch.full((n,), float(s))) for s, (n, out) in enumerate(zip(received, outputs, strict=True)))


LAYOUTS = {
    "transposed": lambda: torch.empty(3, 4).t(),
    "strided": lambda: torch.empty(24)[::2].view(4, 3),
    "zero-dim": lambda: torch.empty(()),
    "empty": lambda: torch.empty(0, 3),
    "requires grad": lambda: torch.empty(4, 3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.empty(4, 3)),
    "negated view": lambda: torch._neg_view(torch.empty(4, 3)),
    "channels last": lambda: torch.empty(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "numpy": lambda: np.empty((4, 3), dtype=np.float32),
    "numpy, strided": lambda: np.empty((4, 6), dtype=np.float32)[:, ::2],
    "numpy, backward": lambda: np.empty((4, 6), dtype=np.float32)[::-1, ::-2],
}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, is_async, rank, size):
    def filled(value):
        data = LAYOUTS[layout]()
        data.detach().fill_(value) if isinstance(data, torch.Tensor) else data.fill(value)
        return data

    def all_equal(data, value):
        return bool((data == value).all())

    def run(call, *args, **kwargs):
        work = call(*args, **kwargs, async_op=is_async)
        if is_async:
            assert work.wait() is True

    tensor = filled(rank + 1.0)
    run(dist.all_reduce, tensor)
    assert all_equal(tensor, size * (size + 1) / 2)
    tensor = filled(rank + 1.0)
    run(dist.broadcast, tensor, size - 1)
    assert all_equal(tensor, size)
    outputs = [filled(-1.0) for _ in range(size)]
    run(dist.all_gather, outputs, filled(rank + 1.0))
    assert all(all_equal(out, r + 1.0) for r, out in enumerate(outputs))
    outputs = tuple(filled(-1.0) for _ in range(size))
    run(dist.all_gather, outputs, torch.full(outputs[0].shape, rank + 1.0))
    assert all(all_equal(out, r + 1.0) for r, out in enumerate(outputs))
    output = filled(-1.0)
    run(dist.scatter, output, [filled(r + 1.0) for r in range(size)] if rank == 0 else None, 0)
    assert all_equal(output, rank + 1.0)
    output = filled(-1.0)
    run(dist.reduce_scatter, output, [filled(float(r)) for r in range(size)])
    assert all_equal(output, size * rank)


def test_an_array_that_may_only_be_read_is_an_input(rank, size):
    given = np.broadcast_to(np.float32(rank), (2,))
    outputs = [np.empty(2, np.float32) for _ in range(size)]
    dist.all_gather(outputs, given)
    assert [each.tolist() for each in outputs] == [[r, r] for r in range(size)]
    output = np.empty(2 * size, np.float32)
    dist.all_gather_single(output, given)
    assert output.tolist() == [r for r in range(size) for _ in range(2)]


def test_conjugated_views(rank, size):
    tensor = torch.full((3,), complex(rank, 1), dtype=torch.complex64).conj()
    dist.all_reduce(tensor)
    assert bool((tensor == complex(sum(range(size)), -size)).all())
    assert tensor.is_conj()


def test_results_are_the_same_bits_on_all_ranks(rank, size):
    generator = torch.Generator().manual_seed(rank)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for length in (3, 5000, 300_000):
            tensor = torch.randn(length, generator=generator).to(dtype)
            dist.all_reduce(tensor)
            everyone = [torch.empty_like(tensor) for _ in range(size)]
            dist.all_gather(everyone, tensor)
            assert all(same(tensor, other) for other in everyone)


def test_half_types_are_rounded_once(rank, size):
    # 1 + 2^-9 rounds to 1 in bfloat16, so that adding in bfloat16 loses every small term
    tensor = torch.tensor([1.0 if rank == 0 else 2.0**-9], dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    assert tensor.item() == torch.tensor(1.0 + (size - 1) * 2.0**-9).bfloat16().item()


def test_sparse_all_reduce(rank, size):
    places = torch.tensor([[0, rank + 1]])
    tensor = torch.sparse_coo_tensor(places, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (size + 1, 2))
    dist.all_reduce(tensor)
    expected = torch.tensor([[1.0 * size, 2.0 * size]] + [[3.0, 4.0]] * size)
    assert same(tensor.to_dense(), expected)
    empty = torch.sparse_coo_tensor(size=(3,))
    assert dist.all_reduce(empty, async_op=True).wait()
    assert same(empty.to_dense(), torch.zeros(3))
    with pytest.raises(RuntimeError, match="SUM"):
        dist.all_reduce(tensor, dist.ReduceOp.MAX)


@pytest.mark.parametrize(
    "of_rank", [lambda rank: torch.eye(3 + rank, 3).to_sparse(), lambda rank: torch.eye(3).to_sparse(1 + (rank > 0))]
)
def test_sparse_tensors_that_differ_are_refused_on_every_rank(two_ranks, rank, size, of_rank):
    with pytest.raises(ValueError, match=r"differ in shape or number of sparse dimensions: rank 0: \(3, 3\)"):
        dist.all_reduce(of_rank(rank))
    dist.all_reduce(torch.ones(1))  # the group stays usable


def test_barrier_waits_for_the_last(rank, size):
    import time

    if rank == size - 1:
        time.sleep(0.2)
    came = time.monotonic()  # a clock of the node
    dist.barrier()
    left = time.monotonic()
    assert dist.barrier(async_op=True).wait()
    times = [None] * size
    dist.all_gather_object(times, (came, left))
    assert min(left for _, left in times) >= max(came for came, _ in times)


def test_the_deprecated_bases(rank, size):
    flat = torch.empty(size)
    with pytest.warns(FutureWarning):
        dist._all_gather_base(flat, torch.tensor([float(rank)]))
    assert same(flat, torch.arange(float(size)))
    output = torch.empty(1)
    with pytest.warns(FutureWarning):
        dist._reduce_scatter_base(output, flat)
    assert output.item() == size * rank


def test_gather_single_of_torch_2_14(world, rank, size):
    for root in range(size):
        output = torch.zeros(size, 3)
        dist.gather_single(torch.full((3,), float(rank)), output if rank == root else None, group_dst=root)
        if rank == root:
            assert output.tolist() == [[float(each)] * 3 for each in range(size)]
    with pytest.raises(ValueError, match="gather_tensor must be specified on the destination rank"):
        dist.gather_single(torch.ones(1), dst=rank)
    output = torch.zeros(size)
    with pytest.warns(FutureWarning, match="gather_single"):
        work = dist.gather_into_tensor(torch.ones(1), output, dst=0, async_op=True)
    work.wait()
    assert output.tolist() == ([1.0] * size if rank == 0 else [0.0] * size)


def ends(dtype, rank, length):
    """A rank's values at the ends of a dtype's range; no rank has the same as another at one place."""
    if dtype is torch.bool:
        return torch.tensor([(place >> rank) % 2 for place in range(length)], dtype=dtype)
    if dtype.is_complex:
        parts = torch.finfo(dtype)
        found = [0.0, -0.0, 1.0, -1.0, parts.max, parts.min, float("inf"), float("nan")]
    elif dtype.is_floating_point:
        found = [0.0, -0.0, 1.0, -1.0, torch.finfo(dtype).max, torch.finfo(dtype).min, float("inf"), float("nan")]
    else:
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        found = [0, 1, least, most, most - 1, most // 2 + 1, 200 % most, 100]
        found[1] = 1 if least == 0 else -1
    chosen = [found[(place // 8**rank) % 8] for place in range(length)]
    if dtype.is_complex:
        return torch.complex(torch.tensor(chosen), torch.tensor(chosen[::-1])).to(dtype)
    return torch.tensor(chosen, dtype=torch.float64 if dtype.is_floating_point else dtype).to(dtype)


def agrees(found, expected):
    """Whether values are equal; a NaN is one whatever its bits, and the sign of a zero is left to the order."""
    if not (found.is_floating_point() or found.is_complex()):
        return same(found, expected)
    return torch.equal(*map(comparable, (found, expected)))


def comparable(values):
    """Values of floating point of which each is equal to itself."""
    wide = torch.complex128 if values.is_complex() else torch.float64
    return torch.nan_to_num(values.to(wide), 12345.0, 1e300, -1e300)


def whose_order_is_free(parts, name):
    """The ranks' values, with ones in the places whose result depends on the order (a node's ranks come first)."""
    results = [comparable(mathematics(list(each), name)) for each in itertools.permutations(parts)]
    are_equal = torch.stack([each == results[0] for each in results]).all(0)
    return [torch.where(are_equal, part, torch.ones_like(part)) for part in parts]


@pytest.mark.parametrize(("dtype", "name"), PAIRS, ids=ids)
@pytest.mark.parametrize("length", [64, 20_000])  # by MPI, and on one node through shared memory
def test_ends_of_the_range(dtype, name, length, rank, size):
    parts = [ends(dtype, each, length * size) for each in range(size)]
    is_inexact = dtype.is_floating_point or dtype.is_complex
    if dtype.is_complex or (is_inexact and name in ("MIN", "MAX") and LOSES_NAN):
        parts = [torch.where(part.to(widened(dtype)).isfinite(), part, torch.ones_like(part)) for part in parts]
    if dtype.is_complex and name == "PRODUCT":  # of which C leaves much open
        parts = [torch.where(part.abs() < 9, part, torch.ones_like(part)) for part in parts]
    if is_inexact and size <= 4:
        parts = whose_order_is_free(parts, name)
    expected = mathematics(parts, name)
    tensor = parts[rank].clone()
    dist.all_reduce(tensor, OPS[name])
    assert agrees(tensor, expected), "all_reduce"
    tensor = parts[rank].clone()
    dist.reduce(tensor, 0, OPS[name])
    assert rank or agrees(tensor, expected), "reduce"
    tensor = torch.empty(length, dtype=dtype)
    dist.reduce_scatter_tensor(tensor, parts[rank], OPS[name])
    assert agrees(tensor, expected[rank * length :][:length]), "reduce_scatter_tensor"


@pytest.mark.skipif(LOSES_NAN, reason="gloo's own arithmetic")
@pytest.mark.parametrize("name", ["MIN", "MAX"])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2], ids=ids
)
def test_the_least_and_largest_of_nan_are_nan_on_every_rank(dtype, name, rank, size):
    numbers = [float("nan"), -float("nan"), float("inf"), -float("inf"), -3.0, 5.0, 0.0, -0.0]
    parts = [torch.tensor(numbers[each % 8 :] + numbers[: each % 8], dtype=dtype) for each in range(size)]
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for each, part in enumerate(parts):  # NaN of other bits on each rank
        part.view(integers)[part.isnan()] -= each % 2
    expected, found, bits = mathematics(parts, name), [], [None] * size
    for turn in range(70):  # also by the call cache
        tensors = [parts[rank].clone(), parts[rank].clone(), torch.empty(8, dtype=dtype), torch.empty(8, dtype=dtype)]
        dist.all_reduce(tensors[0], OPS[name])
        dist.reduce(tensors[1], size - 1, OPS[name])
        dist.reduce_scatter_tensor(tensors[2], parts[rank].repeat(size), OPS[name])
        dist.reduce_scatter(tensors[3], [parts[rank]] * size, OPS[name])
        found += tensors if rank == size - 1 else [tensors[0], *tensors[2:]]
        if turn % 69 == 0:
            dist.all_gather_object(bits, [each.view(integers).tolist() for each in (tensors[0], *tensors[2:])])
            assert all(each == bits[0] for each in bits)
    assert all(agrees(each, expected) for each in found)


FACTORS = {
    "number": lambda: 2.0,
    "tensor": lambda: torch.tensor([2.0]),
    "wide": lambda: torch.tensor(2.0, dtype=torch.float64),
    "whole": lambda: torch.tensor([[2]]),
    "learnt": lambda: torch.tensor(2.0, requires_grad=True),
    "strided": lambda: torch.tensor([1.0, 2.0])[1::2],
    "complex": lambda: torch.tensor(2j),
    "conjugate": lambda: torch.tensor([-2j]).conj(),
}


@pytest.mark.parametrize("length", [0, 1, 3, 100_001])  # more than a message that MPI cuts by its elements
def test_factors_that_are_numbers_tensors_and_complex_on_some_ranks(length, rank, size):
    names = list(FACTORS)
    for turn in range(len(names)):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
            kinds = names if dtype.is_complex else names[:6]
            chosen = [kinds[(turn + 3 * each) % len(kinds)] for each in range(size)]
            op = dist._make_nccl_premul_sum(FACTORS[chosen[rank]]())
            expected = sum(2j if each in ("complex", "conjugate") else 2 for each in chosen)
            values = torch.ones(length, dtype=dtype)
            given = torch.stack([values, values], -1)[..., 0] if turn % size == rank else values
            work = dist.all_reduce(given, op, async_op=turn % 2 == rank % 2)
            assert work is None or work.wait()
            assert not given.requires_grad
            assert bool((given == expected).all()), (chosen, dtype)
            output = torch.zeros((), dtype=dtype)
            dist.reduce_scatter_tensor(output, torch.ones(size, dtype=dtype), op)
            assert not output.requires_grad
            assert output.item() == expected
