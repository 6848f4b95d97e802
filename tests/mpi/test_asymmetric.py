"""Ranks that differ: layout, form of the call, sync or async, and the door are chosen by each rank on its own.

What is legal in c10d must give its result whatever a rank's tensors look like, how large the shares of one pair of
ranks are, and whether a rank waits. A rank that made another MPI call than the others would hang or truncate.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist

import hpcdist as dist
from hpcdist.backends.mpi.node.thresholds import BYTES, MIB
from hpcdist.core import issue
from hpcdist.core.several import ALONE_BYTES, BUCKET_BYTES

EDGES = sorted({at for rows in BYTES.values() for at in rows.values() if at <= 16 * MIB})
SIZES = [1, 7, *(at // 4 + more for at in EDGES if at <= 4 << 20 for more in (-1, 0, 1))]  # float32 elements
LISTS = [5, 4096, 70_001]
ROUNDS = 6


def contiguous(values):
    return values.clone()


def strided(values):
    wide = torch.full((*values.shape, 2), -1, dtype=values.dtype)
    wide[..., 0] = values
    return wide[..., 0]


def with_gradient(values):
    return values.clone().requires_grad_(values.is_floating_point() or values.is_complex())


def negated(values):
    """A view whose memory says the opposite; only for real floats."""
    return torch.complex(torch.zeros_like(values), -values).conj().imag


def with_offset(values):
    flat = torch.empty(values.numel() + 3, dtype=values.dtype)
    return flat[3:].view(values.shape).copy_(values)


def array(values):
    return values.numpy().copy()


LAYOUTS = [contiguous, strided, with_gradient, negated, with_offset, array]


def value(given):
    return torch.from_numpy(given) if isinstance(given, np.ndarray) else given.detach()


class Chooser:
    """The free choices of one rank."""

    def __init__(self, seed, rank, has_arrays=True):
        self.pick = random.Random(1000 * seed + rank)
        self.layouts = LAYOUTS if has_arrays else LAYOUTS[:-1]
        self.door = self.pick.choice([dist, torch_dist]) if torch_dist.is_initialized() else dist

    def placed(self, values):
        layout = self.pick.choice(self.layouts[:-1] if self.door is torch_dist else self.layouts)
        return layout(values)

    def is_async(self):
        return self.pick.random() < 0.5


def ended(work):
    if work is not None:
        work.wait()


@pytest.fixture
def chooser(request, rank):
    return lambda seed: Chooser(seed, rank)


@pytest.mark.parametrize("length", SIZES)
def test_all_reduce_and_broadcast(length, rank, size, chooser):
    for seed in range(ROUNDS):
        own = chooser(seed)
        tensor = own.placed(torch.full((length,), float(rank + 1)))
        with torch.no_grad():
            ended(own.door.all_reduce(tensor, async_op=own.is_async()))
            assert bool((value(tensor) == size * (size + 1) / 2).all()), own.door
            tensor = own.placed(torch.full((length,), float(rank)))
            ended(own.door.broadcast(tensor, seed % size, async_op=own.is_async()))
        assert bool((value(tensor) == seed % size).all())


@pytest.mark.parametrize("length", SIZES)
def test_gathering_and_scattering(length, rank, size, chooser):
    for seed in range(ROUNDS):
        own = chooser(seed)
        own.layouts = [each for each in own.layouts if each is not negated]  # outputs must be written to
        given = own.placed(torch.full((length,), float(rank)))
        output = own.placed(torch.zeros(size * length))
        with torch.no_grad():
            ended(own.door.all_gather_into_tensor(output, given, async_op=own.is_async()))
            assert torch.equal(value(output), torch.arange(float(size)).repeat_interleave(length))
            given = own.placed(torch.arange(float(size)).repeat_interleave(length) + rank)
            output = own.placed(torch.zeros(length))
            ended(own.door.reduce_scatter_tensor(output, given, async_op=own.is_async()))
        assert bool((value(output) == size * rank + size * (size - 1) / 2).all())


@pytest.mark.parametrize("length", SIZES)
def test_input_and_output_overlap_on_some_ranks(length, rank, size, chooser):
    for seed in range(ROUNDS):
        own = chooser(seed)
        memory = torch.zeros((size + 1) * length)
        given = memory[length:]
        given.copy_(torch.arange(float(size)).repeat_interleave(length) + rank)
        starts = [None, 0, length * (rank + 1), length // 2]  # apart, before, its own block, across
        start = own.pick.choice(starts)
        output = torch.empty(length) if start is None else memory[start : start + length]
        ended(own.door.reduce_scatter_tensor(output, given, async_op=own.is_async()))
        assert bool((output == size * rank + size * (size - 1) / 2).all())
        whole = torch.zeros(size * length)
        start = own.pick.choice([None, rank, (rank + 1) % size])
        mine = torch.empty(length) if start is None else whole[start * length : (start + 1) * length]
        mine.fill_(rank)
        ended(own.door.all_gather_into_tensor(whole, mine, async_op=own.is_async()))
        assert torch.equal(whole, torch.arange(float(size)).repeat_interleave(length))
        both = torch.arange(float(size)).repeat_interleave(length) + 10 * rank
        target = both if own.pick.random() < 0.5 and own.door is dist else torch.empty(size * length)
        ended(own.door.all_to_all_single(target, both, async_op=own.is_async()))
        assert torch.equal(target, (10 * torch.arange(float(size)) + rank).repeat_interleave(length))


def shares(size, seed):
    """Elements from each rank to each; one rank's are all equal, one sends nothing, the others are ragged."""
    pick = random.Random(seed)
    most = pick.choice([1, 3, 5000])
    table = [[pick.randrange(most + 1) for _ in range(size)] for _ in range(size)]
    equal, silent = pick.randrange(size), pick.randrange(size)
    table[silent] = [0] * size
    table[equal] = [most] * size
    for row in table:
        row[equal] = most
    return table


@pytest.mark.parametrize("seed", range(12))
def test_exchanges_that_are_equal_on_one_rank_and_ragged_on_another(seed, rank, size, chooser):
    own = chooser(seed)
    table = shares(size, seed)
    sent, received = table[rank], [row[rank] for row in table]
    inputs = [own.placed(torch.full((count,), float(10 * rank + peer))) for peer, count in enumerate(sent)]
    outputs = [own.placed(torch.zeros(count)) for count in received]
    expected = [torch.full((count,), float(10 * peer + rank)) for peer, count in enumerate(received)]
    with torch.no_grad():
        outputs = [
            torch.zeros(count) if torch.is_tensor(each) and each.is_neg() else each
            for each, count in zip(outputs, received, strict=True)
        ]
        ended(own.door.all_to_all(outputs, inputs, async_op=own.is_async()))
        assert all(torch.equal(value(each), right) for each, right in zip(outputs, expected, strict=True))
        flat, target = torch.cat([value(each) for each in inputs]), torch.zeros(sum(received))
        form = {"input_split_sizes": sent, "output_split_sizes": received}
        if len({*sent, *received}) == 1 and own.pick.random() < 0.8:
            form = own.pick.choice([{}, {"input_split_sizes": sent}, {"output_split_sizes": []}])  # equal shares
        ended(own.door.all_to_all_single(target, flat, async_op=own.is_async(), **form))
        assert torch.equal(target, torch.cat(expected))


def test_splits_on_some_ranks_and_none_on_others(rank, size):
    for length in (1, 3, 4096, 300_000):
        for turn in range(2 * size):
            given = torch.arange(float(size)).repeat_interleave(length) + 10 * rank
            output = torch.empty(size * length)
            splits = [length] * size if (rank + turn) % 2 or rank == turn else None
            ended(dist.all_to_all_single(output, given, splits, splits, async_op=bool(turn % 2) and rank == 0))
            assert torch.equal(output, (10 * torch.arange(float(size)) + rank).repeat_interleave(length))


@pytest.mark.parametrize("seed", range(8))
def test_lists_whose_sizes_are_ragged_or_zero(seed, rank, size, chooser):
    own, pick = chooser(seed), random.Random(seed)
    counts = [pick.choice([0, 1, 3, 5000]) for _ in range(size)] if seed % 2 else [pick.choice(LISTS)] * size
    with torch.no_grad():
        outputs = [
            contiguous(torch.zeros(count)) if own.is_async() else strided(torch.zeros(count)) for count in counts
        ]
        mine = own.placed(torch.full((counts[rank],), float(rank)))
        ended(dist.all_gather(outputs, mine, async_op=own.is_async()))
        assert all(bool((each == peer).all()) for peer, each in enumerate(outputs))
        inputs = [own.placed(torch.full((count,), float(peer + rank))) for peer, count in enumerate(counts)]
        target = strided(torch.zeros(counts[rank])) if own.is_async() else torch.zeros(counts[rank])
        ended(dist.reduce_scatter(target, inputs, async_op=own.is_async()))
    assert bool((target == size * rank + size * (size - 1) / 2).all())


COALESCED = [
    [ALONE_BYTES // 4, 256],  # the sizes that were truncated
    [ALONE_BYTES // 4 - 1, 256, 1],
    [BUCKET_BYTES // 4],
    [BUCKET_BYTES // 4 - 1, 1],
    [BUCKET_BYTES // 4, 1],
    [ALONE_BYTES // 8] * 9,
    [0, 3, ALONE_BYTES, 1],
]


@pytest.mark.parametrize("lengths", COALESCED)
@pytest.mark.parametrize("seed", range(4))
def test_coalesced_calls(lengths, seed, rank, size, chooser):
    own = chooser(seed)
    total = size * (size + 1) / 2

    def made():
        return [own.placed(torch.full((length,), float((rank + 1) * (i + 1)))) for i, length in enumerate(lengths)]

    def are_right(tensors):
        return all(bool((value(each) == total * (i + 1)).all()) for i, each in enumerate(tensors))

    with torch.no_grad():
        for _ in range(3):  # what a group sees again it recognises
            tensors = made()
            ended(dist.all_reduce_coalesced(tensors, async_op=own.is_async()))
            assert are_right(tensors)
        tensors = made()
        with dist._coalescing_manager(async_ops=(is_async := own.is_async())) as manager:
            for each in tensors:
                dist.all_reduce(each)
        if is_async:
            manager.wait()
        assert are_right(tensors)


def test_premultiplied_sums_in_a_manager_are_told_apart_on_all_ranks_alike(rank, size):
    for turn in range(3):
        tensors = [torch.ones(5), torch.ones(7)]
        one = torch_dist._make_nccl_premul_sum(2.0)
        other = one if (rank + turn) % 2 else torch_dist._make_nccl_premul_sum(2.0)  # the same object, or its like
        with dist._coalescing_manager():
            dist.all_reduce(tensors[0], one)
            dist.all_reduce(tensors[1], other)
        assert [each[0].item() for each in tensors] == [2.0 * size] * 2


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
            op = torch_dist._make_nccl_premul_sum(FACTORS[chosen[rank]]())
            expected = sum(2j if each in ("complex", "conjugate") else 2 for each in chosen)
            values = torch.ones(length, dtype=dtype)
            given = strided(values) if turn % size == rank else values
            ended(dist.all_reduce(given, op, async_op=turn % 2 == rank % 2))
            assert not given.requires_grad
            assert bool((given == expected).all()), (chosen, dtype)
            output = torch.zeros((), dtype=dtype)
            dist.reduce_scatter_tensor(output, torch.ones(size, dtype=dtype), op)
            assert not output.requires_grad
            assert output.item() == expected


def in_form(values, is_complex):
    """Complex values as they are, conjugated twice, or as their parts."""
    if not is_complex:
        return torch.view_as_real(values).clone()
    return values.conj().resolve_conj().conj() if values.numel() % 2 else values.clone()


@pytest.fixture
def debug_level():
    """Sets the debug level for one test."""
    yield dist.set_debug_level
    dist.set_debug_level(dist.DebugLevel.OFF)


@pytest.mark.parametrize(("length", "level"), [(1, "OFF"), (4, "OFF"), (3001, "OFF"), (3, "DETAIL")])
def test_lists_of_complex_tensors_and_of_their_parts(length, level, rank, size, chooser, debug_level):
    debug_level(getattr(dist.DebugLevel, level))

    def value(each):
        each = each.detach().resolve_conj()
        return each if each.is_complex() else torch.view_as_complex(each)

    def are_right(tensors, factors):
        return all(torch.equal(value(each), unit * factor) for each, factor in zip(tensors, factors, strict=True))

    unit = torch.full((length,), 1 + 2j)
    zeros = torch.zeros(length, dtype=torch.complex64)
    total = sum(range(size))
    for seed in range(ROUNDS):
        own = chooser(seed)

        def form(values, own=own):
            return in_form(values, own.pick.random() < 0.5)

        outputs = [form(zeros) for _ in range(size)]
        ended(dist.all_gather(outputs, form(unit * rank), async_op=own.is_async()))
        assert are_right(outputs, range(size))
        outputs = [form(zeros) for _ in range(size)] if rank == 0 else None
        ended(dist.gather(form(unit * rank), outputs, async_op=own.is_async()))
        assert outputs is None or are_right(outputs, range(size))
        output = form(zeros)
        inputs = [form(unit * peer) for peer in range(size)] if rank == 0 else None
        ended(dist.scatter(output, inputs, async_op=own.is_async()))
        assert are_right([output], [rank])
        outputs, inputs = [form(zeros) for _ in range(size)], [form(unit * (rank + peer)) for peer in range(size)]
        ended(dist.all_to_all(outputs, inputs, async_op=own.is_async()))
        assert are_right(outputs, [rank + peer for peer in range(size)])
        output = form(zeros)
        ended(dist.reduce_scatter(output, inputs, async_op=own.is_async()))
        assert are_right([output], [size * rank + total])
        ended(dist.all_reduce_coalesced(inputs, async_op=own.is_async()))
        assert are_right(inputs, [size * peer + total for peer in range(size)])
        lists = [[form(zeros), torch.zeros(2)] for _ in range(size)]
        ended(dist.all_gather_coalesced(lists, [form(unit * rank), torch.ones(2)], async_op=own.is_async()))
        assert are_right([each[0] for each in lists], range(size))
        output = form(zeros.repeat(size))
        ended(dist.all_gather_into_tensor(output, form(unit * rank), async_op=own.is_async()))
        assert are_right(list(output.chunk(size)), range(size))
        given = form(torch.cat([unit * (rank + peer) for peer in range(size)]))
        splits = [length] * size if own.is_async() else None
        ended(dist.all_to_all_single(output, given, splits, splits, async_op=own.is_async()))
        assert are_right(list(output.chunk(size)), [rank + peer for peer in range(size)])


def test_loops_that_are_learnt_and_then_change_on_one_rank(rank, size, monkeypatch):
    monkeypatch.setattr(issue, "LOOKS", 3)
    group = dist.new_group()
    try:
        for length in (4, 4096, 300_000):
            for turn in range(40):
                is_odd_one = turn > 20 and turn % size == rank
                kept = strided(torch.full((length,), float(rank))) if is_odd_one else torch.full((length,), float(rank))
                work = dist.all_reduce(kept, group=group, async_op=is_odd_one and turn % 2 == 0)
                ended(work)
                assert bool((kept == size * (size - 1) / 2).all()), turn
                given, output = torch.full((size * length,), float(rank)), torch.empty(length)
                if is_odd_one:
                    output = given[:length]
                dist.reduce_scatter_tensor(output, given, group=group)
                assert bool((output == size * (size - 1) / 2).all()), turn
                given, output = torch.full((size,), float(rank)), torch.empty(size)
                splits = [1] * size if is_odd_one else None
                dist.all_to_all_single(output, given, splits, splits, group=group)
                assert output.tolist() == list(range(size))
    finally:
        dist.destroy_process_group(group)


def test_half_types_and_complex_numbers(rank, size, chooser):
    for seed in range(ROUNDS):
        own = chooser(seed)
        own.layouts = [contiguous, strided, with_gradient, with_offset]
        for dtype in (torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool):
            for length in (3, 16 << 10):
                tensor = own.placed(torch.ones(length, dtype=dtype))
                if dtype.is_complex and own.pick.random() < 0.5:
                    tensor = (1j * torch.ones(length, dtype=dtype) + 1).conj() * 0 + torch.ones(
                        length, dtype=dtype
                    ).conj()
                with torch.no_grad():
                    ended(own.door.all_reduce(tensor, async_op=own.is_async()))
                assert bool((tensor.detach().resolve_conj() == (1 if dtype is torch.bool else size)).all())
