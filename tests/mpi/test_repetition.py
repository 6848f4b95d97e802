"""A call that repeats the last one is taken for it, and one that only resembles it is not."""

import gc
import os
import sys
import time

import numpy as np
import pytest
import torch
from torch.distributed import ReduceOp
from torch.multiprocessing.reductions import StorageWeakRef

import hpcdist as dist
from hpcdist.core import hooks
from hpcdist.core.call_cache import KEPT, LOOKS
from hpcdist.core.issue import issue
from hpcdist.core.journal import RING
from hpcdist.core.table import (
    ALL_GATHER,
    ALL_GATHER_SINGLE,
    ALL_REDUCE,
    ALL_TO_ALL,
    ALL_TO_ALL_SINGLE,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
)
from hpcdist.core.waiting import wait_until
from hpcdist.core.world import WORLD

LISTED = (ALL_GATHER, GATHER, SCATTER, REDUCE_SCATTER, ALL_TO_ALL)
FEW = 8  # ranks
ENOUGH = 3 * LOOKS  # a group looks at every LOOKSth call, and must see one twice


@pytest.fixture
def group(size):
    made = dist.new_group(list(range(size)))
    yield made
    dist.destroy_process_group(made)


PLAIN = torch.arange(6.0).reshape(2, 3)
RESEMBLING = {
    "another shape": torch.zeros(3, 2),
    "fewer": torch.zeros(2, 2),
    "flat": torch.zeros(6),
    "of no dimension": torch.tensor(0.0),
    "strided": torch.zeros(3, 2).t(),
    "every other one": torch.zeros(2, 6)[:, ::2],
    "another dtype": torch.zeros(2, 3, dtype=torch.int32),
    "lazily negated": torch.zeros(2, 3, dtype=torch.complex64).conj().imag,
    "with a gradient": torch.zeros(2, 3, requires_grad=True),
    "a parameter": torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False),
    "sparse": torch.zeros(2, 3).to_sparse(),
    "on no device": torch.zeros(2, 3, device="meta"),
    "an array": PLAIN.numpy(),
    "nothing": None,
}


@pytest.mark.parametrize("name", RESEMBLING)
def test_what_resembles_is_not_alike(name):
    is_like = hooks.likeness(PLAIN)
    assert is_like(PLAIN)
    assert is_like(torch.zeros(2, 3))
    assert not is_like(RESEMBLING[name])
    with torch.no_grad():
        assert not is_like(RESEMBLING[name])


def test_lazily_conjugated_is_not_alike():
    tensor = torch.ones(2, dtype=torch.complex64)
    assert not hooks.likeness(tensor)(tensor.conj())


def known(group, row):
    """What the group has prepared for a row, whatever the root."""
    return [
        each
        for kind, kept in group.known.items()
        for each in kept
        if row is (kind[0] if kind.__class__ is tuple else kind)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_memory_in_turn_than_is_described(dtype, group, size):
    tensors = [torch.empty(1 + each % 7, dtype=dtype) for each in range(100)]
    for turn in range(3):
        for tensor in tensors:
            dist.all_reduce(tensor.fill_(turn), group=group)
            assert tensor.tolist() == [turn * size] * len(tensor)


def all_reduce_often(group, size):
    tensor = torch.ones(4)
    for _ in range(ENOUGH):
        tensor.fill_(1)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [size] * 4
    assert known(group, ALL_REDUCE)


def test_sizes_that_do_not_fit(group, rank, size):
    part, whole = torch.full((2,), float(rank)), torch.empty(2 * size)
    for _ in range(ENOUGH):
        dist.all_gather_single(whole, part, group)
    assert known(group, ALL_GATHER_SINGLE)
    with pytest.raises(ValueError, match="do not fit"):
        dist.all_gather_single(torch.empty(2 * size + 1), part, group)
    with pytest.raises(ValueError, match="dtypes"):
        dist.all_gather_single(torch.empty(2 * size, dtype=torch.int32), part, group)


def test_messages_again_and_again(two_ranks, group, rank, size):
    last = size - 1
    tensors = [torch.zeros(5), torch.zeros(5)]
    for turn in range(2 * ENOUGH):
        tensor = tensors[turn // 3 % 2]  # memory that comes again, and other memory
        if rank == 0:
            dist.send(tensor.fill_(turn), last, group, tag=turn % 2)
            assert dist.recv(tensor, last, group) == last
            assert tensor.tolist() == [turn + 1] * 5
        elif rank == last:
            assert dist.recv(tensor, 0, group, tag=turn % 2) == 0
            assert tensor.tolist() == [turn] * 5
            dist.send(tensor.fill_(turn + 1), 0, group)
    if rank in (0, last):
        assert group.journal.messages == 4 * ENOUGH
        with pytest.raises(ValueError, match="should not be the same as the rank"):
            dist.send(tensors[0], rank, group)
        with pytest.raises(ValueError, match="not part of group"):
            dist.recv(tensors[0], size + 3, group)
    if rank == 0:
        dist.send(torch.full((5, 2), 7.0)[:, 1], last, group)
        dist.send(torch.full((5,), 8.0), group=group, group_dst=last)
    elif rank == last:
        target = torch.zeros(5, 2)
        assert dist.recv(target[:, 0], group=group) == 0
        assert target.tolist() == [[7, 0]] * 5
        assert dist.recv(tensors[0], group=group, group_src=0) == 0
        assert tensors[0].tolist() == [8] * 5


def test_many_sets_of_tensors_leave_what_is_prepared_for_one(group, size):
    all_reduce_often(group, size)
    prepared = group.known[ALL_REDUCE]
    for length in [*range(2 * KEPT)] * ENOUGH:
        dist.all_reduce_coalesced([torch.ones(3), torch.ones(length)], group=group)
    assert group.known[ALL_REDUCE] == prepared
    for _ in range(ENOUGH):
        tensors = [torch.ones(3), torch.ones(4)]
        dist.all_reduce_coalesced(tensors, group=group)
        assert all(bool((each == size).all()) for each in tensors)
    assert not group.cpu.has_lists or 0 < len(group.known[ALL_REDUCE, None]) <= KEPT


def test_small_tensors_together_again_and_again(group, rank, size):
    shapes = [(3,), (), (0,), (2, 5), (1, 1)]
    kept = [torch.empty(shape) for shape in shapes]
    total = size * (size + 1) / 2

    def reduced(tensors):
        for number, tensor in enumerate(tensors):
            tensor.fill_((rank + 1) * (number + 1))
        dist.all_reduce_coalesced(tensors, group=group)
        return all(bool((tensor == total * (number + 1)).all()) for number, tensor in enumerate(tensors))

    for turn in range(2 * ENOUGH):
        assert reduced(kept if turn % 2 else [torch.empty(shape) for shape in shapes])
    assert not group.cpu.has_lists or group.known[ALL_REDUCE, None]
    assert reduced(kept[:-1])
    assert reduced(kept[::-1])
    assert reduced([tensor.to(torch.float64) for tensor in kept])
    assert reduced([kept[0], torch.empty(4, 2)[:, 0]])
    assert reduced([])
    assert reduced(kept)
    with pytest.raises(TypeError, match="tensors"):
        dist.all_reduce_coalesced([*kept[:-1], "text"], group=group)
    with dist._coalescing_manager(group):
        for tensor in kept:
            dist.all_reduce(tensor.fill_(rank), group=group)
    assert all(bool((tensor == size * (size - 1) / 2).all()) for tensor in kept)


def test_splits_may_be_tensors_that_change(group, rank, size):
    send, recv = torch.full((size,), float(rank)), torch.empty(size)
    to, of = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    for turn in range(2 * ENOUGH):
        receiver, sender = (rank + turn) % size, (rank - turn) % size
        to.zero_()[receiver] = of.zero_()[sender] = size
        dist.all_to_all_single(recv, send, list(of), list(to), group=group)
        assert recv.tolist() == [float(sender)] * size, turn


def test_asynchronous_calls_repeat_too(group, rank, size):
    tensor = torch.empty(4)
    for number in range(2 * ENOUGH):
        work = dist.all_reduce(tensor.fill_(rank + number), group=group, async_op=True)
        assert work.wait()
        assert tensor.tolist() == [size * number + size * (size - 1) / 2] * 4
        assert torch.equal(work.result()[0], tensor)
    assert known(group, ALL_REDUCE)
    assert group.journal.sequence == 2 * ENOUGH


def test_a_destroyed_group_repeats_nothing(size):
    group = dist.new_group(list(range(size)))
    all_reduce_often(group, size)
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="destroyed"):
        dist.all_reduce(torch.ones(4), group=group)
    assert WORLD.default is not None


def frames(call):
    """Return how many functions of Python a call runs."""
    names = []

    def note(frame, event, _):
        if event == "call":
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(names)


@pytest.mark.skipif("HPCDIST_TEST_BACKEND" in os.environ, reason="MPI's backend")
@pytest.mark.parametrize("few", [FEW, 1])
def test_functions_of_python_in_a_call(few, group, rank, size, monkeypatch):
    from hpcdist.backends.mpi.node import call_board

    monkeypatch.setattr(call_board, "FEW", few)
    looks = 2 * (size > few)  # at the words of many ranks together

    def fewest(make):
        """Return the fewest of several calls: a rank that comes before others looks again, or collects garbage."""
        counts = []
        for number in range(3 * size):
            tensor = make(number)
            time.sleep(0.005 * (number % size == rank))  # so each comes last
            counts.append(frames(lambda tensor=tensor: dist.all_reduce(tensor, group=group)))
        return min(counts)

    general = fewest(lambda number: torch.ones(1 + number))
    all_reduce_often(group, size)
    tensor = torch.ones(4)
    # the lambda; all_reduce, issue and what was prepared
    assert (general <= 1 + 20 + looks, fewest(lambda _: tensor)) == (True, 1 + 3 + looks), general
    half = torch.ones(4, dtype=torch.bfloat16)
    for _ in range(ENOUGH):
        dist.all_reduce(half, group=group)
    assert fewest(lambda _: half) == 1 + 3 + looks


@pytest.mark.skipif("HPCDIST_TEST_BACKEND" in os.environ, reason="MPI's backend")
def test_what_was_prepared_before_the_nodes_were_known(group, size):
    """The least threshold of any layout holds until then; those of a larger one are then prepared calls too."""
    from mpi4py import MPI

    from hpcdist.backends.mpi.node.threshold_file import SEVERAL
    from hpcdist.backends.mpi.node.thresholds import Thresholds

    if not 1 < size <= FEW:
        pytest.skip("has no window, or a call looks at many ranks together")
    plans, library = group.cpu.collectives.plans, MPI.get_vendor()[0]
    plans.thresholds = Thresholds(
        "", "a file", {(library, size): {"all_reduce": 1 << 20}, (library, SEVERAL): {"all_reduce": 1 << 16}}
    )
    all_reduce_often(group, size)
    assert plans.nodes == 0
    tensor = torch.ones(1 << 16)
    dist.all_reduce(tensor, group=group)
    assert plans.nodes == 1
    assert min(frames(lambda: dist.all_reduce(tensor, group=group)) for _ in range(10)) == 1 + 3


def forms(rank, size):
    """Calls of every form: (call, outputs, what is written to them before, expected)."""
    last, total, length = size - 1, size * (size - 1) / 2, 3
    half, pairs = torch.empty(length, dtype=torch.bfloat16), torch.empty(length, dtype=torch.complex64)
    strided, plain, grown = torch.empty(length, 2)[:, 0], torch.empty(length), torch.empty(length, requires_grad=True)
    small, array = torch.empty(length, dtype=torch.uint8), np.empty(length, np.float32)
    outputs = [torch.empty(length) for _ in range(size)]
    uneven = [torch.empty(each + 1) for each in range(size)]
    inputs = [torch.full((length,), float(peer)) for peer in range(size)]
    sent = torch.arange(float(size)).repeat_interleave(length)
    whole, splits = torch.empty(size * length), [length] * size
    mine, square = torch.full((rank + 1,), float(rank)), torch.empty(size)
    is_root = rank == last
    growing = [torch.full((peer + 1,), float(peer)) for peer in range(size)]
    combined, combined_pairs = torch.empty(rank + 1), torch.empty(rank + 1, dtype=torch.complex64)
    arrays = [each.numpy() for each in outputs]
    first = torch.empty(length)
    ranks, own, one = torch.arange(float(size)), torch.full((size,), float(rank)), torch.empty(1)
    largest = torch.distributed.AllreduceOptions()
    largest.reduceOp = ReduceOp.MAX
    parameter = torch.nn.Parameter(inputs[rank].clone())
    spread = [torch.empty(length, 2)[:, 0] if peer % 2 == rank % 2 else torch.empty(length) for peer in range(size)]
    strided_inputs = [torch.full((length, 2), float(peer))[:, 1] for peer in range(size)]
    return {
        "all_reduce": (lambda g: dist.all_reduce(plain, group=g), [plain], [total]),
        "broadcast": (lambda g: dist.broadcast(plain, group=g, group_src=last), [plain], [last]),
        "all_gather_single": (lambda g: dist.all_gather_single(whole, inputs[rank], g), [whole], [sent]),
        "reduce_scatter_single": (lambda g: dist.reduce_scatter_single(one, ranks, group=g), [one], [rank * size]),
        "all_to_all_single": (lambda g: dist.all_to_all_single(square, own, group=g), [square], [ranks]),
        "bfloat16": (lambda g: dist.all_reduce(half, group=g), [half], [total]),
        "uint8": (lambda g: dist.all_reduce(small, group=g), [small], [total]),
        "average": (lambda g: dist.all_reduce(plain, ReduceOp.AVG, g), [plain], [total / size]),
        "average of halves": (lambda g: dist.all_reduce(half, ReduceOp.AVG, g), [half], [total / size]),
        "method of a group": (lambda g: g.allreduce([plain], largest).wait(), [plain], [last]),
        "complex": (lambda g: dist.all_reduce(pairs, group=g), [pairs], [total]),
        "strided": (lambda g: dist.all_reduce(strided, group=g), [strided], [total]),
        "with gradient": (lambda g: dist.all_reduce(grown, group=g), [grown], [total]),
        "array": (lambda g: dist.all_reduce(array, group=g), [torch.from_numpy(array)], [total]),
        "reduce": (lambda g: dist.reduce(plain, group=g, group_dst=last), [plain], [total if is_root else rank]),
        "reduce of halves": (
            lambda g: dist.reduce(half, group=g, group_dst=last),
            [half],
            [total if is_root else rank],
        ),
        "gather": (
            lambda g: dist.gather(inputs[rank], outputs if is_root else None, group=g, group_dst=last),
            outputs,
            range(size) if is_root else [rank] * size,
        ),
        "scatter": (
            lambda g: dist.scatter(plain, inputs if is_root else None, group=g, group_src=last),
            [plain],
            [rank],
        ),
        "all_gather": (lambda g: dist.all_gather(outputs, inputs[rank], g), outputs, range(size)),
        "all_gather, uneven": (lambda g: dist.all_gather(uneven, mine, g), uneven, range(size)),
        "all_gather, uneven, in place": (
            lambda g: dist.all_gather(uneven, uneven[rank].view(-1), g),
            uneven,
            range(size),
        ),
        "all_gather of a parameter": (lambda g: dist.all_gather(outputs, parameter, g), outputs, range(size)),
        "all_gather of a strided one": (
            lambda g: dist.all_gather(outputs, strided_inputs[rank], g),
            outputs,
            range(size),
        ),
        "all_gather into strided ones": (lambda g: dist.all_gather(spread, inputs[rank], g), spread, range(size)),
        "scatter of strided ones": (
            lambda g: dist.scatter(plain, strided_inputs if is_root else None, group=g, group_src=last),
            [plain],
            [rank],
        ),
        "all_to_all of strided ones": (lambda g: dist.all_to_all(spread, strided_inputs, g), spread, [rank] * size),
        "reduce_scatter": (lambda g: dist.reduce_scatter(plain, inputs, group=g), [plain], [rank * size]),
        "reduce_scatter, uneven": (
            lambda g: dist.reduce_scatter(combined, growing, group=g),
            [combined],
            [rank * size],
        ),
        "reduce_scatter, uneven, complex": (
            lambda g: dist.reduce_scatter(combined_pairs, [each.to(torch.complex64) for each in growing], group=g),
            [combined_pairs],
            [rank * size],
        ),
        "reduce_scatter of halves": (
            lambda g: dist.reduce_scatter(half, [each.bfloat16() for each in inputs], group=g),
            [half],
            [rank * size],
        ),
        "reduce_scatter, average": (lambda g: dist.reduce_scatter(plain, inputs, ReduceOp.AVG, g), [plain], [rank]),
        "reduce_scatter, uneven, largest": (
            lambda g: dist.reduce_scatter(combined, growing, ReduceOp.MAX, g),
            [combined],
            [rank],
        ),
        "reduce_scatter into an input": (
            lambda g: dist.reduce_scatter(first, [first.view(-1), *inputs[1:]], ReduceOp.MAX, g),
            [first],
            [rank if rank else last],
        ),
        "reduce_scatter_single of halves": (
            lambda g: dist.reduce_scatter_single(half, sent.bfloat16(), ReduceOp.MIN, g),
            [half],
            [rank],
        ),
        "counts of a reduction of halves": (
            lambda g: issue(REDUCE_SCATTER, g, sent.bfloat16(), half, ReduceOp.SUM, counts=(splits, [length])),
            [half],
            [rank * size],
        ),
        "largest": (lambda g: dist.all_reduce(plain, ReduceOp.MAX, g), [plain], [last]),
        "arrays": (lambda g: dist.all_gather(arrays, inputs[rank].numpy(), g), outputs, range(size)),
        "all_to_all": (lambda g: dist.all_to_all(outputs, inputs, g), outputs, [rank] * size),
        "in place": (lambda g: dist.all_to_all_single(square, square, group=g), [square], [torch.arange(size)]),
        "splits": (lambda g: dist.all_to_all_single(whole, sent, splits, splits, g), [whole], [rank]),
        "splits of the input": (lambda g: dist.all_to_all_single(whole, sent, None, splits, g), [whole], [rank]),
        "splits of the output": (lambda g: dist.all_to_all_single(whole, sent, splits, None, g), [whole], [rank]),
        "counts": (lambda g: issue(ALL_TO_ALL, g, sent, whole, counts=(splits, splits)), [whole], [rank]),
        "counts of a gather": (
            lambda g: issue(ALL_GATHER, g, inputs[rank], whole, counts=([length], splits)),
            [whole],
            [sent],
        ),
        "counts of a reduction": (
            lambda g: issue(REDUCE_SCATTER, g, sent, plain, ReduceOp.SUM, counts=(splits, [length])),
            [plain],
            [rank * size],
        ),
    }


def by_turns(group, rank, size):
    made = forms(rank, size)
    for turn in range(ENOUGH):  # whatever this rank has prepared: all make the same calls
        for name, (call, outputs, expected) in made.items():
            for each in outputs:
                each.data.fill_(rank)
            call(group)
            for each, value in zip(outputs, expected, strict=True):
                assert bool((each == value).all()), (name, turn, each, value)


def test_calls_of_every_form_by_turns(group, rank, size):
    by_turns(group, rank, size)
    assert group.journal.sequence == ENOUGH * len(forms(rank, size))
    if "HPCDIST_TEST_BACKEND" not in os.environ:  # others prepare fewer
        assert all(known(group, row) for row in (REDUCE, ALL_TO_ALL_SINGLE, *LISTED))
    assert len(group.known[ALL_REDUCE]) == KEPT


def test_what_was_prepared_is_used(group, rank, size):
    """Otherwise the same call would be prepared again and again."""
    for name, (call, *_) in forms(rank, size).items():
        for _ in range(4 * LOOKS):
            call(group)
        assert all(len(kept) == 1 for kept in group.known.values()), (name, group.known)
        assert group.known or "HPCDIST_TEST_BACKEND" in os.environ, name  # others prepare fewer
        group.known.clear()


def test_what_was_prepared_keeps_no_memory_alive(group, rank, size):
    made = forms(rank, size)
    memory = [StorageWeakRef(each.untyped_storage()) for _, outputs, _ in made.values() for each in outputs]
    while made:
        call = made.popitem()[1][0]
        for _ in range(4 * LOOKS):
            call(group)
    del call
    gc.collect()
    # gloo's threads release a call's tensors a moment after it has returned
    assert wait_until(lambda: all(each.expired() for each in memory), 10)


def test_what_comes_most_often_is_compared_first(group, rank, size):
    kinds = [torch.zeros(1, 1), torch.zeros(2), torch.zeros(2, dtype=torch.int32)]
    for tensor in (*kinds, kinds[1]):
        for _ in range(2 * ENOUGH):
            dist.all_reduce(tensor, group=group)
            dist.irecv(tensor.clone(), group=group, group_src=rank)
            dist.isend(tensor, group=group, group_dst=rank).wait()
    for name in (ALL_REDUCE, "isend", "irecv"):
        assert "HPCDIST_TEST_BACKEND" in os.environ or group.known[name][0].is_like(kinds[1]), name


def test_sizes_other_than_the_counts_are_refused(group, size):
    for _ in range(ENOUGH):
        issue(ALL_GATHER, group, torch.ones(2), torch.empty(2 * size), counts=([2], [2] * size))
    with pytest.raises(ValueError, match="do not fit"):
        issue(ALL_GATHER, group, torch.ones(3), torch.empty(3 * size), counts=([2], [2] * size))


def test_calls_of_every_form_in_a_group_of_one(rank):
    group = dist.new_group([rank], use_local_synchronization=True)
    by_turns(group, 0, 1)
    dist.destroy_process_group(group)


def test_what_is_of_a_kind_but_for_its_sizes_or_its_memory(group, rank, size):
    outputs = [torch.empty(2) for _ in range(size)]
    for _ in range(ENOUGH):
        dist.all_gather(outputs, torch.full((2,), float(rank)), group)
        dist.all_gather_single(torch.empty(2 * size), torch.zeros(2), group)
        dist.all_reduce(torch.ones(2, 2), group=group)
    before = group.journal.sequence
    for is_async in (False, True):
        with pytest.raises(ValueError, match="elements"):
            dist.all_gather(outputs, torch.zeros(3), group, is_async)
        with pytest.raises(ValueError, match="do not fit"):
            dist.all_gather_single(torch.empty(2 * size + 1), torch.zeros(2), group, is_async)
        with pytest.raises(ValueError, match="tensors"):
            dist.all_gather([*outputs, torch.empty(2)], torch.zeros(2), group, is_async)
    assert group.journal.sequence == before
    dist.all_reduce(torch.ones(7, 3), group=group)
    assert RING.last()[3] == (7, 3)
    kept = torch.ones(4)
    dist.all_reduce(kept, group=group)
    kept.resize_(3).fill_(1)  # where it was
    dist.all_reduce(kept, group=group)
    assert kept.tolist() == [size] * 3
    kept.untyped_storage().resize_(1 << 16)
    kept.resize_(1 << 14).fill_(2)  # elsewhere
    dist.all_reduce(kept, group=group)
    assert bool((kept == 2 * size).all())
    kept.set_(torch.full((3,), 5.0))
    dist.all_reduce(kept, group=group)
    assert kept.tolist() == [5 * size] * 3
