"""Objects arrive whole, on the ranks they are for."""

from __future__ import annotations

import functools
import os
import pickle
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import hpcdist as dist


class Point:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return type(other) is Point and self.x == other.x

    __hash__ = None


def payload(rank):
    return {
        "rank": rank,
        "array": np.arange(rank * 1000),
        "point": Point(rank),
        "tensor": torch.full((rank + 1,), rank),
    }


def equal(one, rank):
    other = payload(rank)
    return (
        one["rank"] == rank
        and one["point"] == other["point"]
        and np.array_equal(one["array"], other["array"])
        and torch.equal(one["tensor"].cpu(), other["tensor"].cpu())  # it may be on the sender's GPU
    )


PLAIN = {"step": 3, "loss": 0.5, "names": ["a", None], "weights": torch.arange(5.0), 7: (True, b"x" * 9000)}


def is_plain(one):
    return str(one) == str(PLAIN) and torch.equal(one["weights"], PLAIN["weights"])


# each hands the root's value to some ranks, and returns there what arrived
def all_gathered(value, root, weights_only):
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, value, weights_only=weights_only)
    return objects[root]


def gathered(value, root, weights_only):
    size = dist.get_world_size()
    receiver = (root + 1) % size
    objects = [None] * size if dist.get_rank() == receiver else None
    dist.gather_object(value, objects, receiver, weights_only=weights_only)
    return objects[root] if objects else None


def broadcast(value, root, weights_only):
    objects = [value if dist.get_rank() == root else None]
    dist.broadcast_object_list(objects, root, weights_only=weights_only)
    return objects[0]


def scattered(value, root, weights_only):
    objects = [None]
    values = [value] * dist.get_world_size() if dist.get_rank() == root else None
    dist.scatter_object_list(objects, values, root, weights_only=weights_only)
    return objects[0]


def sent(value, root, weights_only):
    rank, size = dist.get_rank(), dist.get_world_size()
    receiver, objects = (root + 1) % size, [value]
    if rank == root:
        dist.send_object_list(objects, receiver, weights_only=weights_only)
    elif rank == receiver:
        objects = [None]
        assert dist.recv_object_list(objects, root if root % 2 else None, weights_only=weights_only) == root
        return objects[0]
    return None


CALLS = [all_gathered, gathered, broadcast, scattered, sent]


def receives(call, rank, root, size):
    if call in (gathered, sent):
        return rank == (root + 1) % size
    return call is all_gathered or call is scattered or rank != root


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_every_root(call, weights_only, rank, size):
    """With ``weights_only`` tensors and plain values."""
    for root in range(size if size > 1 or call is not sent else 0):
        found = call(PLAIN if weights_only else payload(rank), root, weights_only)
        assert not receives(call, rank, root, size) or (is_plain(found) if weights_only else equal(found, root))


@pytest.mark.parametrize("kind", [list, tuple])
def test_what_is_only_read_may_be_a_tuple(kind, rank, size):
    root = size - 1
    objects = kind((1, "text")) if rank == root else [None] * 2
    dist.broadcast_object_list(objects, root)
    assert [*objects] == [1, "text"]
    output = [None, "kept"]
    dist.scatter_object_list(output, kind(range(size)) if rank == root else None, root)
    assert output == [rank, "kept"]
    if size > 1 and rank == 0:
        dist.send_object_list(kind((1, "text")), 1)
    elif rank == 1:
        received = [None] * 2
        dist.recv_object_list(received, 0)
        assert received == [1, "text"]


def test_a_list_of_another_length(rank, size):
    objects = [None] * (1 if rank == 0 else 2)
    with nullcontext() if rank == 0 else pytest.raises(RuntimeError, match=r"list has 1 entries, `object_list`.* 2"):
        dist.broadcast_object_list(objects, 0)
    if rank == 0 and size > 1:
        dist.send_object_list(objects, 1)
    elif rank == 1:
        with pytest.raises(RuntimeError, match="the list sent has 1 entries, `object_list` 2"):
            dist.recv_object_list(objects, 0)


def test_messages_of_objects_and_of_tensors_are_not_taken_for_each_other(two_ranks, rank):
    tensor = torch.full((2,), 5.0, device="cpu")  # as objects: NCCL has no tags
    if rank == 0:
        sent = dist.isend(tensor, 1)
        dist.send_object_list(["one"], 1)
        dist.send(tensor + 1, 1)
        sent.wait()
    elif rank == 1:
        objects = [None]
        dist.recv_object_list(objects, 0)
        assert objects == ["one"]
        for expected in (5.0, 6.0):
            dist.recv(tensor.zero_(), 0)
            assert tensor.tolist() == [expected] * 2
    dist.barrier()


def test_two_ranks_of_a_fresh_group_need_no_third(rank, size):
    group = dist.new_group(list(range(size)))
    box = ["for the last"] if rank == 0 else [None]
    if size > 1 and rank == 0:
        dist.send_object_list(box, dst=size - 1, group=group)
    if size > 1 and rank == size - 1:
        dist.recv_object_list(box, src=0, group=group)
        assert box == ["for the last"]
    assert dist.get_world_size(group) == size
    dist.destroy_process_group(group)


def test_subgroup_and_non_members(rank, size):
    group = dist.new_group([size - 1])
    objects = [None]
    if rank == size - 1:
        dist.all_gather_object(objects, "alone", group)
        assert objects == ["alone"]
        dist.destroy_process_group(group)
    else:
        with pytest.warns(UserWarning, match="does not belong"):
            dist.all_gather_object(objects, "alone", group)
        assert objects == [None]


def test_bad_lists_leave_the_group_usable(rank, size):
    with pytest.raises(ValueError, match="entries"):
        dist.all_gather_object([None] * (size - 1), 1)
    with pytest.raises(TypeError, match="list"):
        dist.all_gather_object("text", 1)
    if rank != 0:
        with pytest.raises(ValueError, match="must NOT"):
            dist.gather_object(1, [None] * size, 0)
    else:
        with pytest.raises(ValueError, match="must be specified"):
            dist.gather_object(1, None, 0)
    with pytest.raises(ValueError, match="at least 1"):
        dist.scatter_object_list([], [1] * size)
    with pytest.raises((TypeError, AttributeError, RuntimeError)):
        dist.all_gather_object([None] * size, lambda: 0)
    with pytest.raises(ValueError, match="Invalid destination rank"):
        dist.send_object_list([1], rank)
    for who in ({"src": rank}, {"group_src": rank}):  # it would wait for ever
        with pytest.raises(ValueError, match="Invalid source rank"):
            dist.recv_object_list([None], **who)
    assert equal(all_gathered(payload(0), 0, False), 0)


@pytest.mark.skipif("HPCDIST_TEST_LARGE" not in os.environ, reason="takes 10 GiB; set HPCDIST_TEST_LARGE=1")
def test_objects_over_two_gibibytes(rank, size):
    length = 2**31 + 11
    objects = [np.full(length, 7, dtype=np.uint8)] if rank == 0 else [None]
    dist.broadcast_object_list(objects, 0)
    assert objects[0].shape == (length,)
    assert objects[0][-1] == 7


@pytest.mark.parametrize("large_rank", [0, -1])
@pytest.mark.parametrize("value", ["x" * 600, torch.arange(300), [torch.ones(2), {"a": b"y" * 70_000}]])
def test_gathering_small_objects_beside_a_large_one(rank, size, large_rank, value):
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, value if rank == large_rank % size else {"rank": rank})
    for r, found in enumerate(gathered):
        assert str(found) == str(value if r == large_rank % size else {"rank": r})
    if isinstance(gathered[large_rank], torch.Tensor):
        gathered[large_rank].add_(1)  # what arrived can be written to


def test_gathering_objects_around_every_slot_size(rank, size):
    group = dist.new_group()  # where nothing has been gathered before
    pickled = len(pickle.dumps("", 5))
    lengths = [edge - pickled + more for edge in (256, 257, 512, 1024, 4096, 5000, 300) for more in range(-3, 3)]
    for turn, length in enumerate([*lengths, *reversed(lengths)]):
        gathered: list[object] = [None] * size
        dist.all_gather_object(gathered, "x" * length if rank == turn % size else rank, group)
        assert gathered == ["x" * length if r == turn % size else r for r in range(size)]
    dist.destroy_process_group(group)


UNPICKLABLE = {
    "all_gather_object": lambda value, who, size: dist.all_gather_object([None] * size, value),
    "gather_object": lambda value, who, size: dist.gather_object(
        value, [None] * size if dist.get_rank() == 0 else None, 0
    ),
    "broadcast_object_list": lambda value, who, size: dist.broadcast_object_list([value], who),
    "scatter_object_list": lambda value, who, size: dist.scatter_object_list([None], [1] * (size - 1) + [value], who),
}


class Interrupted:
    """Pickling it is interrupted, as by Ctrl-C or a call of ``sys.exit``."""

    def __init__(self, by):
        self.by = by

    def __getstate__(self):
        raise self.by("while it is pickled")


@pytest.mark.parametrize("by", [None, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("call", UNPICKLABLE)
def test_an_object_whose_pickling_fails_or_is_interrupted_leaves_nobody_waiting(call, by, rank, size):
    reason = "" if by is None else f": {by.__name__}: while it"
    for who in range(size):
        if rank == who:
            with pytest.raises(by or (pickle.PicklingError, AttributeError), match=r"pickle|local object"):
                UNPICKLABLE[call](Interrupted(by) if by else lambda: None, who, size)
        elif call != "gather_object" or rank == 0:  # its senders learn of nobody
            with pytest.raises(RuntimeError, match=f"rank {who} of the group could not pickle its object{reason}"):
                UNPICKLABLE[call]("fine", who, size)
        else:
            UNPICKLABLE[call]("fine", who, size)
        for each in (all_gathered, broadcast):
            assert equal(each(payload(who), who, False), who)


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("count", [4, 4000])
def test_a_tensor_whose_storage_was_freed_is_an_error_and_no_garbage(count, weights_only, rank, size):
    tensor = torch.ones(count, device="cpu")
    if rank == 0:
        tensor.untyped_storage().resize_(0)
    # on all ranks; with weights only torch saves and loads what gloo carries, and refuses it by itself
    with pytest.raises(RuntimeError, match=r"storage was freed|storage that is not resizable"):
        dist.all_gather_object([None] * size, {"weights": tensor}, weights_only=weights_only)


# -- weights_only: what a peer sends cannot run code here --------------------------------------------------

RAN = []  # what malicious objects have run in this process


def run(what):
    RAN.append(what)


class Malicious:
    """Runs code in whoever unpickles it."""

    def __reduce__(self):
        return run, ("code",)


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_weights_only_refuses_what_runs_code(two_ranks, call, is_saved, rank, size):
    """Both if the sender writes it by torch.save and if it writes an ordinary pickle, which it may read itself."""
    for root in range(size):
        RAN.clear()
        is_trusting = rank == root and not is_saved
        value = Malicious() if rank == root else "fine"
        if receives(call, rank, root, size) and not is_trusting:
            with pytest.raises(pickle.UnpicklingError, match="weights_only=True"):
                call(value, root, True)
        else:
            call(value, root, not is_trusting)
        assert ["code"] * (is_trusting and call in (all_gathered, scattered)) == RAN
        assert is_plain(all_gathered(PLAIN, root, False))  # the group goes on


@pytest.mark.parametrize("call", CALLS)
def test_ranks_may_differ_in_weights_only(two_ranks, call, rank, size):
    """A rank without it reads both; one with it refuses ordinary pickles; nobody waits."""
    for root in range(size):
        for careful in range(size):
            is_careful = rank == careful
            if is_careful and receives(call, rank, root, size) and (careful != root or call is all_gathered):
                with pytest.raises(pickle.UnpicklingError, match="ordinary pickle"):
                    call(PLAIN, root, is_careful)
            else:
                found = call(PLAIN, root, is_careful)
                assert not receives(call, rank, root, size) or is_plain(found)
            dist.barrier()


def test_weights_only_of_an_object_that_cannot_be_pickled(rank, size):
    value = (lambda: None) if rank == 0 else 1
    expected = (pickle.PicklingError, AttributeError) if rank == 0 else RuntimeError
    with pytest.raises(expected, match="pickle"):
        dist.all_gather_object([None] * size, value, weights_only=True)


def test_registered_classes_are_taken_by_weights_only(rank, size):
    with torch.serialization.safe_globals([Point]):
        objects = [None] * size
        dist.all_gather_object(objects, Point(rank), weights_only=True)
    assert objects == [Point(r) for r in range(size)]


def test_objects_of_many_buffers_and_layouts(rank, size):
    arrays = [np.asfortranarray(np.arange(6.0).reshape(2, 3) + r) for r in range(40)]
    arrays.append(np.broadcast_to(np.arange(3), (4, 3)))
    arrays[0].flags.writeable = False
    for root in range(size):
        objects = [arrays if rank == root else None]
        dist.broadcast_object_list(objects, root)
        everything = [None] * size
        dist.all_gather_object(everything, arrays)
        for found in (objects[0], *everything):
            assert all(np.array_equal(one, other) for one, other in zip(found, arrays, strict=True))
        everything[rank][1] += 1  # its own copy
        assert arrays[1][0, 0] == 1


def test_an_object_with_a_small_array_takes_the_slots(every, rank, size, monkeypatch):
    from hpcdist.backends.mpi import parts

    monkeypatch.setattr(parts, "deliver", None)  # the way of large ones
    for _ in range(2):
        gathered = [None] * size
        dist.all_gather_object(gathered, {"loss": np.array(float(rank)), "grad": np.ones(100, np.float32)})
        assert [each["loss"].item() for each in gathered] == list(range(size))
        gathered[0]["grad"] += 1  # is its receiver's own


def on_cpu(test):
    """Run a test on CPU tensors, whatever the default device is."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        with torch.device("cpu"):
            test(*args, **kwargs)

    return run


def kinds():
    """Return tensors of many kinds, some with memory in common."""
    storage = torch.arange(4000.0)
    numbers = torch.arange(3000.0)
    return {
        "parameter": torch.nn.Parameter(torch.ones(700), requires_grad=False),
        "trained": torch.nn.Parameter(torch.ones(3)),
        "leaf": torch.ones(800, requires_grad=True),
        "strided": numbers.view(60, 50).t()[::2],
        "views": (storage[:1000], storage[10:]),
        "bfloat16": numbers.to(torch.bfloat16),
        "float8": (numbers % 16).to(torch.float8_e4m3fn),
        "complex": numbers.to(torch.complex64),
        "conjugate": numbers.to(torch.complex64).conj(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(5),
        "24 bytes": torch.ones(3, dtype=torch.float64),
        "sparse": torch.eye(3).to_sparse(),
        "buffer": torch.nn.Buffer(torch.ones(600)),
    }


@pytest.mark.parametrize("weights_only", [False, True])
@on_cpu
def test_tensors_of_all_kinds(weights_only, rank, size):
    """Each arrives as it was, in memory of its own that can be written; views of one storage stay views of one."""
    expected = kinds()
    gathered = [None] * size
    dist.all_gather_object(gathered, kinds(), weights_only=weights_only)
    sent = [kinds() if rank == 0 else None]
    dist.broadcast_object_list(sent, 0, weights_only=weights_only)
    scattered, given = [None], [kinds() for _ in range(size)] if rank == size - 1 else None
    dist.scatter_object_list(scattered, given, size - 1, weights_only=weights_only)
    for got in (*gathered, *sent, *scattered):
        for name, tensor in expected.items():
            for one, other in zip(*[each if name == "views" else [each] for each in (got[name], tensor)], strict=True):
                assert type(one) is type(other)
                assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad), (
                    name
                )
                if name != "sparse":
                    assert one.stride() == other.stride()
                same = one.to_dense().detach().to(torch.complex64), other.to_dense().detach().to(torch.complex64)
                assert torch.equal(*same), name
        one, other = got["views"]
        one[10] = -1
        assert other[0] == -1
        assert storages_of(got).isdisjoint(storages_of(expected))


def storages_of(tensors):
    views = tensors["views"]
    return {each.untyped_storage().data_ptr() for each in (*views, tensors["leaf"], tensors["parameter"])}


@pytest.mark.parametrize("weights_only", [False, True])
@on_cpu
def test_the_memory_of_tensors_is_not_in_the_pickle(weights_only):
    from hpcdist.core.objects import pack, unpack

    state = {"weight": torch.ones(1000), "bias": torch.nn.Parameter(torch.ones(2000))}
    data, apart, failure = pack(state, 0, weights_only=weights_only)
    assert failure is None
    assert len(data) < (3000 if weights_only else 1000)
    assert sorted(each.nbytes for each in apart) == [4000, 8000]
    found = unpack(data, *map(bytearray, apart), weights_only=weights_only)
    assert torch.equal(found["bias"], state["bias"])
