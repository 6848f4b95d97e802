"""Ranks whose calls differ: an error on every rank that names both calls, no memory overwritten, the group usable."""

import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch

import hpcdist as dist
from hpcdist.backends.mpi.datatypes import CUTS
from hpcdist.backends.mpi.node import call_board
from hpcdist.core import hooks
from hpcdist.core.errors import CallsDifferError
from tests.ranks import sum_of_ranks

from . import wrong_programs


@pytest.fixture(autouse=True)
def comm(every):
    return every


@pytest.fixture
def group(comm):
    made = dist.new_group()
    yield made
    assert sum_of_ranks(group=made) == made.size()  # it can be used again
    dist.destroy_process_group(made)


@pytest.mark.parametrize("seed", range(20))
def test_random_programs(seed, rank, size, comm):
    calls, odd, _ = wrong_programs.program(seed, size)
    failure, memory = wrong_programs.run(calls[rank])
    assert sum_of_ranks() == size  # at once: other ranks may not have raised yet
    failures = comm.allgather(f"{type(failure).__name__}: {failure}")
    for each in failures:
        assert each.startswith("CallsDifferError: the ranks of a group"), failures
        assert f"rank {odd}: " in each, failures  # and, of the others, those that had come
        named = each.count("; rank")
        assert named == 1 or (1 < named < size and "all_to_all_single of elements by counts" in each), failures
    assert memory.is_whole()


def refused(match, call, *args, **kwargs):
    """Make a call that the ranks disagree about."""
    with pytest.raises(CallsDifferError, match=match):
        call(*args, **kwargs)


@pytest.mark.parametrize("late", [(), (1, 2)], ids=["", "the others late"])
def test_a_rank_that_ran_ahead_is_stopped(late, group, rank, size):
    """The root of broadcasts does not wait; the 10th call is another one on the last rank, which comes late."""
    dist.barrier(group)
    time.sleep(0.1 * (size - rank) * (rank in late))  # the last one comes first

    def run():
        for number in range(200):
            dist.broadcast(torch.ones(3 if number == 9 and rank == size - 1 else 2), 0, group)

    refused(r"broadcast of 2 elements.*broadcast of 3 elements", run)


@pytest.fixture(params=[call_board.FEW, 1], ids=["few", "many"])
def looks(request, monkeypatch):
    """The call board looks at few ranks one by one, at many all together."""
    monkeypatch.setattr(call_board, "FEW", request.param)


def test_repeated_calls(looks, group, rank, size):
    """Those that are prepared (``core.call_cache``) are compared too."""
    for _ in range(200):
        assert sum_of_ranks(group=group) == size
        dist.barrier(group)
    both = torch.ones(size), torch.zeros(size)
    for _ in range(100):
        dist.all_to_all_single(both[1], both[0], group=group)
    if rank == size - 1:
        refused(r"all_reduce of 1 element.*barrier", dist.barrier, group)
    else:
        refused(r"all_reduce of 1 element.*barrier", dist.all_reduce, torch.ones(1), group=group)


@pytest.mark.parametrize("sizes", [(1, 2), (150_000, 150_001)])
def test_repeated_calls_of_other_sizes(sizes, looks, group, rank, size):
    """The call board has the larger sizes in a word of their own."""
    for number in range(200):
        dist.all_reduce(torch.ones(sizes[number % 2]), group=group)
    own = sizes[1] if rank == size - 1 else sizes[0]
    refused(f"of {sizes[0]} elements.*of {sizes[1]} elements", dist.all_reduce, torch.ones(own), group=group)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("before", [0, 200], ids=["first", "repeated"])
def test_several_tensors_of_other_sizes_and_as_many_elements(before, is_async, group, rank, size):
    """Tensors that are reduced as one are compared one by one."""

    def reduce(*sizes):
        tensors = [torch.ones(each) for each in sizes]
        work = dist.all_reduce_coalesced(tensors, group=group, async_op=is_async)
        if work is not None:
            work.wait()
        assert all(bool((each == size).all()) for each in tensors)

    for _ in range(before):
        reduce(3, 1, 4)
    refused(
        "of 8 elements, float32, SUM, of several tensors.*of 8 elements, float32, SUM, of several tensors",
        reduce, *((3, 4, 1) if rank == size - 1 else (3, 1, 4)),
    )  # fmt: skip
    refused("of 8 elements, float32, SUM(;|.*of several)", reduce, *((8,) if rank == size - 1 else (3, 1, 4)))


def test_asynchronous_calls(group, rank, size):
    works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for _ in range(3)]
    works.append(dist.all_reduce(torch.ones(4 if rank else 5), group=group, async_op=True))
    for work in works[:3]:
        work.wait()
    refused(r"all_reduce of 5 elements.*all_reduce of 4 elements", works[3].wait)


def test_what_is_queued_behind_a_call_that_differs_is_not_made(group, rank, size):
    """The root of broadcasts runs ahead: what it makes after its error is not what the others make after theirs."""
    is_odd = rank == size - 1
    tensors = [
        torch.full((3 if number == 9 and is_odd else 2,), -1.0 if rank else float(number)) for number in range(100)
    ]
    works = [dist.broadcast(each, 0, group, async_op=True) for each in tensors]
    for work in works[:9]:
        work.wait()
    refused("broadcast of 2 elements.*broadcast of 3 elements", works[-1].wait)
    assert [each[0] for each in tensors[:9]] == list(range(9))
    assert all(tensors[number][0] in (-1, number) for number in range(10, 100))  # that of the 10th is not valid


def test_a_call_that_blocks_raises_what_nobody_has_waited_for(group, rank, size):
    words = r"all_reduce of 5 elements.*all_reduce of 4 elements"
    dist.all_reduce(torch.ones(4 if rank else 5), group=group, async_op=True)
    refused(words, dist.barrier, group)
    work = dist.all_reduce(torch.ones(4 if rank else 5), group=group, async_op=True)
    refused(words, dist.all_gather_object, [None] * size, 0, group)
    refused(words, work.wait)


@pytest.mark.parametrize("how", ["nobody waits", "wait", "future", "exception"])
def test_the_end_of_a_group_raises_what_nobody_has_waited_for(how, rank, size):
    made, words = dist.new_group(), r"all_reduce of 5 elements.*all_reduce of 4 elements"
    right, wrong = (dist.all_reduce(torch.ones(4 + n * (rank == 0)), group=made, async_op=True) for n in range(2))
    right.wait()
    if how == "nobody waits":
        refused(words, dist.destroy_process_group, made)
        return
    if how == "wait":
        refused(words, wrong.wait)
    elif how == "future":
        with pytest.raises(RuntimeError, match=words):
            wrong.get_future().wait()
    else:
        while not wrong.is_completed():
            time.sleep(0.001)
        assert isinstance(wrong.exception(), CallsDifferError)
    dist.destroy_process_group(made)


def test_splits_are_compared_pair_by_pair(group, rank, size):
    """Ragged splits that fit are right; a rank that expects another share than it is sent is told."""
    sent = [rank + other + 1 for other in range(size)]
    for _ in range(20):
        output = torch.empty(sum(sent))
        dist.all_to_all_single(output, torch.full((sum(sent),), float(rank)), sent, sent, group)
        assert torch.equal(output, torch.cat([torch.full((n,), float(other)) for other, n in enumerate(sent)]))
    if size > 2:
        return
    if rank == 0:
        sent[1] += 30_000
    output, given = torch.empty(sum(sent)), torch.ones(sum(sent))
    refused(r"sends", dist.all_to_all_single, output, given, sent, sent, group)


@pytest.mark.parametrize("room", [call_board.COUNTS_BYTES, 0], ids=["counts on the board", "too many ranks for it"])
def test_one_exchange_after_another_that_does_not_fit(room, group, rank, size, monkeypatch):
    """Rank 0 sends more, or less, than the others expect: nothing is written past a tensor, the next is compared."""
    monkeypatch.setattr(call_board, "COUNTS_BYTES", room)
    for shares in (1100, 900, 100_000):
        sent, received = [shares if rank == 0 else 1000] * size, [1000] * size
        if rank == 0:
            received[0] = shares
        whole = torch.zeros(sum(received) + 200_000)
        into = whole[: sum(received)]
        refused("all_to_all", dist.all_to_all_single, into, torch.ones(sum(sent)), received, sent, group)
        refused("all_to_all", dist.all_to_all, [*into.split(received)], [torch.ones(n) for n in sent], group)
        assert not whole[len(into) :].any()
    if rank == size - 1:
        refused("all_to_all.*barrier", dist.barrier, group)
    else:
        splits = [1 + rank + other for other in range(size)]
        given = torch.ones(sum(splits))
        refused("all_to_all", dist.all_to_all_single, torch.empty_like(given), given, splits, splits, group)


@pytest.mark.parametrize("late", range(4))
def test_an_exchange_that_does_not_fit_between_two_ranks(late, group, rank, size):
    """The last rank sends rank 0 more, or less; its exchanges with the others fit, and all of theirs are equal."""
    dist.barrier(group)
    for more in (-1000, 200_000):
        sent, received = [50_000] * size, [50_000] * size
        if rank == size - 1:
            sent[0] += more
        if rank == late:
            time.sleep(0.2)
        refused("all_to_all", dist.all_to_all_single, torch.empty(sum(received)), torch.ones(sum(sent)), received, sent,
                group)  # fmt: skip


def test_counts_stay_until_the_last_rank_has_read_them(group, rank, size, monkeypatch):
    """Rank 0 exchanges nothing with the last one, and so may have made its next exchange before that one stands in."""
    check = group.any_backend().check
    dist.barrier(group)
    board, number = check.board, check.number + 1
    if size == 2 or len(board.ranks) < size:
        return
    if rank == size - 1:
        shares = check._shares

        def late(*given):
            time.sleep(0.3)
            return shares(*given)

        monkeypatch.setattr(check, "_shares", late)
        while not all(board.has_come_to(other, number) for other in range(size - 1) if other != 1):
            time.sleep(0.001)
        refused("all_to_all_single.*barrier", dist.barrier, group)
    else:
        with_1 = [1 in (rank, other) and max(rank, other) < size - 1 for other in range(size)]
        splits = [2 * (rank == other or with_1[other]) for other in range(size)]
        given = torch.ones(sum(splits))
        while rank == 1 and board.failing[size - 1] != number:  # until when the others wait for it in MPI
            time.sleep(0.001)
        refused(
            "all_to_all_single.*barrier", dist.all_to_all_single, torch.empty_like(given), given, splits, splits, group
        )
    splits = [1 + rank + other for other in range(size)]
    output = torch.empty(sum(splits))
    dist.all_to_all_single(output, torch.full_like(output, float(rank)), splits, splits, group)
    assert torch.equal(output, torch.arange(float(size)).repeat_interleave(torch.tensor(splits)))


def test_a_rank_that_comes_to_an_exchange_after_the_decision_about_it(group, rank, size):
    splits = [1 + rank + other for other in range(size)]
    given = torch.ones(sum(splits))
    dist.barrier(group)
    board = group.any_backend().check.board
    decided = board.decided[0]  # before the exchanges: the others may differ before this rank has returned from them
    for _ in range(2 * call_board.COUNTS_KEPT):
        dist.all_to_all_single(torch.empty_like(given), given, splits, splits, group)
    if size == 2 or len(board.ranks) < size:
        return
    while rank == 0 and board.decided[0] == decided:
        time.sleep(0.001)
    if rank == size - 1:
        given = given.double()
    refused("float32.*float64", dist.all_to_all_single, torch.empty_like(given), given, splits, splits, group)


def test_an_exchange_that_nothing_compares_overwrites_nothing(rank, size, monkeypatch):
    """Open MPI would write a large message to its end, and all are told there; MPICH tells who gets too much."""
    for length in (9, 1000, 30_000, 300_000):
        with monkeypatch.context() as patch:
            patch.setattr(dist.group.WORLD.any_backend().check, "is_wanted", False)
            made = dist.new_group()
        right = torch.zeros(5 * size)
        for _ in range(20):  # prepared (``core.call_cache``) too
            dist.all_to_all_single(right, torch.full((5 * size,), float(rank)), group=made)
            assert right.tolist() == [float(other) for other in range(size) for _ in range(5)]
        assert made.any_backend().check.board is None
        sent, received = [length if rank == 0 else 8] * size, [8] * size
        if rank == 0:
            received[0] = length
        whole = torch.zeros(sum(received) + 300_000)
        errors = (RuntimeError, ValueError) if CUTS else CallsDifferError
        with pytest.raises(errors) if rank or not CUTS else suppress(*errors):
            dist.all_to_all_single(whole[: sum(received)], torch.ones(sum(sent)), received, sent, made)
        assert not whole[sum(received) :].any()
        dist.barrier()
        made.abort("its exchange has failed", ends_calls=False)
        dist.destroy_process_group(made)


@pytest.mark.parametrize("end", ["destroy_process_group", "new_group"])
def test_a_rank_that_makes_fewer_calls(end, comm, rank, size):
    """Nobody waits for it: a broadcast's root goes on. Of several nodes: ``tests/faults/test_call_check.py``."""
    made, failure = dist.new_group(), None
    try:
        for _ in range(3 if rank == size - 1 else 4):
            dist.broadcast(torch.ones(3), 0, made)  # a late rank raises here
        if end == "new_group":
            dist.split_group(made, [list(range(size))])
        else:
            dist.destroy_process_group(made)
    except CallsDifferError as error:
        failure = str(error)
    told = [each for each in comm.allgather(failure) if each is not None]
    assert told
    assert all("broadcast of 3 elements" in each and f"rank {size - 1}: {end}" in each for each in told), told
    dist.barrier()
    made.abort("its calls differ", ends_calls=False)


def managed(first, group, size, is_async):
    with dist._coalescing_manager(group, async_ops=is_async) as manager:
        if first:
            dist.barrier(group)
        for _ in range(2):
            dist.all_reduce(torch.ones(3), group=group)
            dist.all_gather_into_tensor(torch.ones(3 * size), torch.ones(3), group)
    manager.wait()


def listed(first, group, size, is_async):
    tensors = [torch.ones(300_000) for _ in range(3 if first else 1)]  # each in a call of its own
    work = dist.all_reduce_coalesced([*tensors, torch.ones(3)], group=group, async_op=is_async)
    if is_async:
        work.wait()


def gathered(first, group, size, is_async):
    count, length = (3, 4) if first else (1, 5)
    outputs = [[torch.ones(length) for _ in range(count)] for _ in range(size)]
    inputs = [torch.ones(length) for _ in range(count)]
    if is_async:
        dist.all_gather_coalesced(outputs, inputs, group, True).wait()
    else:
        group.all_gather_single_coalesced([torch.ones(size * length)] * count, inputs).wait()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("call", [managed, listed, gathered])
def test_calls_that_are_one_end_with_the_first_that_differs(call, is_async, group, rank, size):
    """One rank has more of them: without the others it would wait in the rest."""
    refused("do not make the same call", call, rank == 0, group, size, is_async)


OBJECTS = {
    "scatter": lambda n, root, group: dist.scatter_object_list(
        [None], [0] * n if group.rank() == root else None, None, group, group_src=root
    ),
    "gather": lambda n, root, group: dist.gather_object(
        0, [None] * n if group.rank() == root else None, None, group, group_dst=root
    ),
    "broadcast": lambda n, root, group: dist.broadcast_object_list([0], None, group, group_src=root),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_of_two_roots(name, group, rank, size):
    """Each rank says that another one is the root, so that nobody gives a list."""
    for root in (size - 1, 0):
        mine = (root + 1) % size if rank == size - 1 else root

        def run(root=mine):
            OBJECTS[name](size, root, group)
            dist.barrier(group)  # where a rank is told that has not waited for others before

        refused(f"{name}_object, root .*{name}_object, root", run)


# calls that begin with a gathering of objects; its name alone would not say which they are
GATHERING = {
    "all_gather_object": lambda group: dist.all_gather_object([None] * dist.get_world_size(group), 0, group),
    "Window": lambda group: dist.Window(2, group=group),
    "node_shared": lambda group: dist.node_shared(2, group=group),
    "new_subgroups": lambda group: dist.new_subgroups(group=group),
    "new_group with another backend": lambda group: dist.new_group(backend="gloo"),
    "reproducible": lambda group: dist.reproducible(),
    "profile": lambda group: dist.profile().__enter__(),
}


@pytest.mark.parametrize("one", GATHERING)
def test_calls_that_gather_objects_are_named(one, rank, size):
    names = list(GATHERING)
    other = names[names.index(one) - 1]
    refused(f"{one}.*{other}|{other}.*{one}", GATHERING[one if rank == size - 1 else other], None)
    assert not hooks.reproducible


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_groups_of_all_ranks_are_counted_alike_after_a_new_group_that_differed(backend, comm, rank):
    """Their names say where the ranks of one without MPI meet, and which group a report is about."""
    if rank == 0:
        refused("barrier.*new_group", dist.barrier)
    else:
        refused("barrier.*new_group", dist.new_group, backend=backend)
    made = dist.new_group(backend="gloo", timeout=timedelta(seconds=10))
    assert len(set(comm.allgather(made.group_name))) == 1
    dist.barrier(made)
    dist.destroy_process_group(made)


SPARSE = torch.eye(3).to_sparse()
# calls that are made of others, each against one that is made of the same
COMPOSED = {
    "all_gather_varied": (
        lambda group, n: dist.all_gather_varied(torch.ones(2), group=group),
        lambda group, n: dist.all_gather_into_tensor(
            torch.ones(4 * n, dtype=torch.int64), torch.ones(4, dtype=torch.int64), group
        ),
    ),
    "reduce_scatter_varied": (
        lambda group, n: dist.reduce_scatter_varied(torch.ones(n), 1, group=group),
        lambda group, n: dist.all_gather_varied(torch.ones(n), group=group),
    ),
    "all_to_all_varied": (
        lambda group, n: dist.all_to_all_varied([torch.ones(2)] * n, group=group),
        lambda group, n: dist.all_to_all_single(
            torch.ones(4 * n, dtype=torch.int64), torch.ones(4 * n, dtype=torch.int64), group=group
        ),
    ),
    "sparse all_reduce": (
        lambda group, n: dist.all_reduce(SPARSE, group=group),
        lambda group, n: dist.all_gather_into_tensor(
            torch.ones(2 * n, dtype=torch.int64), torch.ones(2, dtype=torch.int64), group
        ),
    ),
    "reproducible all_reduce of 2 elements, float32, SUM": (
        lambda group, n: dist.all_reduce(torch.ones(2), group=group),
        lambda group, n: dist.all_reduce(torch.ones(2), dist.ReduceOp.PRODUCT, group),
    ),
    "reproducible reduce of 2 elements, float32, SUM, root 0": (
        lambda group, n: dist.reduce(torch.ones(2), group=group, group_dst=0),
        lambda group, n: dist.reduce(torch.ones(2), group=group, group_dst=1),
    ),
    "reproducible reduce_scatter_single of 9000 elements a rank, float32, SUM": (
        lambda group, n: dist.reduce_scatter_tensor(torch.ones(9000), torch.ones(9000 * n), group=group),
        lambda group, n: dist.reduce_scatter_tensor(
            torch.ones(9000), torch.ones(9000 * n), dist.ReduceOp.AVG, group, async_op=True
        ).wait(),
    ),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_calls_that_are_made_of_others_are_named(name, group, rank, size):
    right, wrong = COMPOSED[name]
    with dist.reproducible(name.startswith("reproducible")):
        for _ in range(3):
            right(group, size)
            refused(name, wrong if rank == size - 1 else right, group, size)
        right(group, size)


def test_a_new_group_that_one_rank_does_not_make(rank, size):
    for odd in 10 * (True, False):  # each rank makes as many, so that their later groups have one name
        call = dist.barrier if (rank == size - 1) is odd else dist.new_group
        refused(r"new_group.*barrier|barrier.*new_group", call)


@pytest.mark.parametrize("is_late", [True, False])
def test_the_end_of_a_group_against_a_call(is_late, rank, size):
    """Who destroys a group waits for nobody, so that only a late one can know; the others are told in any case."""
    made = dist.new_group()
    dist.barrier(made)
    if rank == size - 1:
        if is_late:
            time.sleep(0.2)
            refused(r"destroy_process_group", dist.destroy_process_group, made)
        else:
            dist.destroy_process_group(made)
    else:
        if not is_late:
            time.sleep(0.2)
        refused(r"destroy_process_group", dist.all_reduce, torch.ones(2), group=made)
        dist.destroy_process_group(made)


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("turns", [1, 3])
def test_calls_after_that_are_refused_too(turns, is_late, rank, size):
    """Ranks that go on after a rank has destroyed their group neither wait for it nor for each other."""
    made = dist.new_group(timeout=timedelta(seconds=20))
    dist.barrier(made)
    if rank == 0:
        time.sleep(0.2 * is_late)
        with suppress(CallsDifferError):
            dist.destroy_process_group(made)
    else:
        time.sleep(0.2 * (not is_late))
        for turn in range(turns):
            refused(r"destroy_process_group", dist.all_reduce, torch.ones(2), group=made)
            if turn or size == 2:
                refused(r"destroy_process_group", dist.barrier, made)
            elif rank == 1:  # differs from the end, or from the others' call, whichever comes first
                refused(r"all_to_all_single", dist.all_to_all, *[[torch.ones(r) for r in range(size)]] * 2, group=made)
            else:
                refused(r"destroy_process_group|all_to_all_single", dist.barrier, made)
        with suppress(CallsDifferError):  # one of the others may still be in its last call
            dist.destroy_process_group(made)
    dist.barrier()


def test_equal_calls_in_other_words(group, rank, size):
    """Parts of complex numbers, other layouts, async or not: the same calls."""
    dtype, length = (torch.complex64, 2) if rank else (torch.float32, 4)
    given, op = torch.ones(length, dtype=dtype), dist._make_nccl_premul_sum(0.5)
    dist.all_reduce(given, group=group)
    dist.all_reduce(given, op, group)
    dist.reduce_scatter_tensor(torch.empty(4), torch.ones(length * size, dtype=dtype), op, group)
    dist.broadcast(given, 0, group)
    dist.all_gather_into_tensor(torch.empty(length * size, dtype=dtype), given, group)
    dist.all_to_all_single(torch.empty(length * size, dtype=dtype), torch.ones(length * size, dtype=dtype), group=group)
    dist.all_gather([torch.empty(length, dtype=dtype) for _ in range(size)], given, group)
    uneven = [torch.empty((peer + 1) * length, dtype=dtype) for peer in range(size)]
    dist.all_gather(uneven, torch.ones_like(uneven[rank]), group)


IN_PLACE = {
    "all_gather_into_tensor": lambda x, n: dist.all_gather_into_tensor(x, x),
    "reduce_scatter_tensor": lambda x, n: dist.reduce_scatter_tensor(x, x),
    "uneven all_to_all_single": lambda x, n: dist.all_to_all_single(x[: n + 1], x[: n + 1]),
}


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("is_strided", [False, True], ids=["contiguous", "strided"])
def test_one_tensor_as_input_and_output_has_to_fit(name, is_strided, size):
    x = torch.ones(2048)[:: 2 if is_strided else 1]
    with pytest.raises((ValueError, RuntimeError), match=r"fit|divide"):
        IN_PLACE[name](x, size)
    assert bool((x == 1).all())


@pytest.mark.parametrize("name", ["profile", "reproducible"])
def test_a_block_that_one_rank_leaves_by_an_error_has_ended_on_all(name, rank, size):
    def run():
        with dist.profile(show=False) if name == "profile" else dist.reproducible():
            if rank == 0:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError if rank == 0 else CallsDifferError):
        run()
    if rank == 0:  # it is told by its next call
        with pytest.raises(CallsDifferError, match=rf"{name}.*barrier|barrier.*{name}"):
            dist.barrier()
    assert not hooks.reproducible
    assert not hooks.is_profiled()
    assert sum_of_ranks() == size
