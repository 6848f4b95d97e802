"""c10d's methods of a group, given lists of several tensors, or lists that do not fit: ours beside gloo's."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as td

import hpcdist as dist


@pytest.fixture(params=["ours", "gloo"])
def group(request):
    return dist.group.WORLD if request.param == "ours" else td.group.WORLD


def one(value=1.0, length=3):
    return torch.full((length,), float(value))


def options(kind, **values):
    made = getattr(td, kind)()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def test_allreduce_sums_over_the_list_too(group, rank, size):
    tensors = [one(rank + 1), one(10 * (rank + 1))]
    group.allreduce(tensors, options("AllreduceOptions")).wait()
    assert [each.tolist() for each in tensors] == [[11 * size * (size + 1) / 2] * 3] * 2
    tensors = [one(rank), one(size + rank)]
    group.allreduce(tensors, options("AllreduceOptions", reduceOp=td.ReduceOp.MAX)).wait()
    assert [each.tolist() for each in tensors] == [[2 * size - 1] * 3] * 2


def test_allreduce_sums_over_a_list_of_sparse_tensors_too(group, rank, size):
    tensors = [torch.sparse_coo_tensor([[0, rank + each + 1]], [1.0, 10.0 * (each + 1)], (8,)) for each in (0, 1)]
    group.allreduce(tensors, options("AllreduceOptions")).wait()
    expected = torch.zeros(8)
    for r in range(size):
        expected[0] += 2
        expected[r + 1] += 10
        expected[r + 2] += 20
    assert [each.to_dense().tolist() for each in tensors] == [expected.tolist()] * 2


def test_broadcast_takes_the_tensor_that_is_named(group, rank, size):
    for root in range(size):
        tensors = [one(10 * rank), one(10 * rank + 1)]
        group.broadcast(tensors, options("BroadcastOptions", rootRank=root, rootTensor=1)).wait()
        assert [each.tolist() for each in tensors] == [[10 * root + 1] * 3] * 2


def test_allgather_has_an_entry_for_each_tensor_of_each_rank(group, rank, size):
    outputs = [[one(-1) for _ in range(2 * size)] for _ in range(2)]
    group.allgather(outputs, [one(rank), one(100 + rank)]).wait()
    expected = [value for each in range(size) for value in (each, 100 + each)]
    assert [[each[0].item() for each in listed] for listed in outputs] == [expected] * 2


def test_the_future_of_several_lists_has_lists(group, rank, size):
    for count in (1, 2):
        outputs = [[one(-1) for _ in range(count * size)] for _ in range(count)]
        shown = group.allgather(outputs, [one(10 * rank + each) for each in range(count)]).get_future().wait()
        values = [10.0 * r + each for r in range(size) for each in range(count)]
        listed = shown if count > 1 else [shown]
        assert [[each[0].item() for each in tensors] for tensors in listed] == [values] * count
    lists = [[one(-1), one(-1, 2)] for _ in range(size)]
    shown = group.allgather_coalesced(lists, [one(rank), one(rank, 2)]).get_future().wait()
    listed = shown if size > 1 else [shown]
    assert [[each.tolist() for each in tensors] for tensors in listed] == [[[r] * 3, [r] * 2] for r in range(size)]


REFUSED = {
    "allreduce, nothing": (lambda pg, n: pg.allreduce([]), "requires (a )?non-empty"),
    "allreduce, dtypes": (lambda pg, n: pg.allreduce([one(), one().double()]), "invalid tensor type"),
    "allreduce, sizes": (lambda pg, n: pg.allreduce([one(), one(length=4)]), "invalid tensor size"),
    "allreduce, layouts": (
        lambda pg, n: pg.allreduce([torch.eye(2).to_sparse(), torch.eye(2)]),
        "invalid tensor layout at index 1",
    ),
    "allreduce, layouts and dtypes": (
        lambda pg, n: pg.allreduce([one(), torch.eye(2, dtype=torch.long).to_sparse()]),
        "invalid tensor layout",
    ),
    "allreduce, sparse": (
        lambda pg, n: pg.allreduce([torch.eye(2).to_sparse()], options("AllreduceOptions", reduceOp=td.ReduceOp.MAX)),
        "unsupported reduction operation",
    ),
    "send, two": (lambda pg, n: pg.send([one(), one()], 0, 0), "single"),
    "recv, two": (lambda pg, n: pg.recv([one(), one()], 0, 0), "single"),
    "timeout": (lambda pg, n: pg.set_timeout(timedelta(seconds=-1)), "Invalid timeout"),
    "split, nobody": (lambda pg, n: pg.split_group([]), "cannot be empty"),
    "allreduce_coalesced, nothing": (lambda pg, n: pg.allreduce_coalesced([]), "requires (a )?non-empty"),
    "broadcast, root": (
        lambda pg, n: pg.broadcast([one()], options("BroadcastOptions", rootRank=n)),
        "invalid root rank",
    ),
    "broadcast, negative root": (
        lambda pg, n: pg.broadcast([one()], options("BroadcastOptions", rootRank=-1)),
        "invalid root rank",
    ),
    "broadcast, root tensor": (
        lambda pg, n: pg.broadcast([one()], options("BroadcastOptions", rootTensor=1)),
        "invalid root tensor",
    ),
    "broadcast, dtypes": (lambda pg, n: pg.broadcast([one(), one().long()]), "invalid tensor type"),
    "reduce, root": (lambda pg, n: pg.reduce([one()], options("ReduceOptions", rootRank=n)), "invalid root rank"),
    "reduce, root tensor": (
        lambda pg, n: pg.reduce([one()], options("ReduceOptions", rootTensor=1)),
        "invalid root tensor",
    ),
    "reduce, two": (lambda pg, n: pg.reduce([one(), one()], options("ReduceOptions")), "requires a single-element"),
    "allgather, nothing": (lambda pg, n: pg.allgather([], []), "requires (a )?non-empty"),
    "allgather, outputs": (
        lambda pg, n: pg.allgather([[one()] * n] * 2, [one()]),
        "requires input/output tensor lists to have the same length",
    ),
    "allgather, one too few": (
        lambda pg, n: pg.allgather([[one()] * (n - 1)], [one()]),
        "invalid output tensor list at index 0",
    ),
    "allgather, dtypes": (lambda pg, n: pg.allgather([[one().double()] * n], [one()]), "invalid tensor type"),
    "allgather, sizes": (lambda pg, n: pg.allgather([[one(length=4)] * n], [one()]), "invalid tensor size"),
    "scatter, dtypes": (
        lambda pg, n: pg.scatter([one()], [[one().long()] * n], options("ScatterOptions", rootRank=pg.rank())),
        "invalid tensor type",
    ),
    "scatter, sizes": (
        lambda pg, n: pg.scatter([one()], [[one(length=4)] * n], options("ScatterOptions", rootRank=pg.rank())),
        "invalid tensor size",
    ),
    "gather, dtypes": (
        lambda pg, n: pg.gather([[one().long()] * n], [one()], options("GatherOptions", rootRank=pg.rank())),
        "invalid tensor type",
    ),
    "gather, sizes": (
        lambda pg, n: pg.gather([[one(length=4)] * n], [one()], options("GatherOptions", rootRank=pg.rank())),
        "invalid tensor size",
    ),
    "scatter, root": (
        lambda pg, n: pg.scatter([one()], [[one()] * n], options("ScatterOptions", rootRank=n)),
        "invalid root rank",
    ),
    "gather, root": (
        lambda pg, n: pg.gather([[one()] * n], [one()], options("GatherOptions", rootRank=-1)),
        "invalid root rank",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_the_call_in_the_same_words(case, group, size):
    call, phrase = REFUSED[case]
    for name in {"set_timeout", "split_group"} & {*call.__code__.co_names}:
        if not hasattr(group, name):
            pytest.skip(f"groups of this torch have no {name}")
    with pytest.raises((ValueError, RuntimeError), match=phrase):
        call(group, size)
    tensor = one()
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [size] * 3


def test_lists_off_the_root_are_refused(group, rank, size):
    root = size - 1
    if rank != root:
        with pytest.raises((ValueError, RuntimeError), match="requires empty input on non-root"):
            group.scatter([one()], [[one()] * size], options("ScatterOptions", rootRank=root))
        with pytest.raises((ValueError, RuntimeError), match="requires empty output on non-root"):
            group.gather([[one()] * size], [one()], options("GatherOptions", rootRank=root))
