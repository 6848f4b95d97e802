"""Bad input raises c10d's class, says what was expected, sends nothing, and leaves the group usable."""

import os
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist

import hpcdist as dist
from tests.ranks import sum_of_ranks

from .refused import freed, frozen


@pytest.fixture(autouse=True)
def _still_usable(size):
    yield
    assert sum_of_ranks() == size


def one(dtype=torch.float32):
    return torch.ones(2, dtype=dtype)


def sparse():
    return torch.eye(2).to_sparse()


def meta():
    return torch.ones(2, device="meta")


def compressed():
    return torch.eye(2).to_sparse_csr()


def factor(value):
    return dist._make_nccl_premul_sum(value)


def ones(count):
    return [one()] * count


def scattered(size):
    return ones(size) if dist.get_rank() == 0 else None


BEFORE = timedelta(seconds=-1)


CASES = {
    "no tensor": (TypeError, lambda n: dist.all_reduce([1, 2]), "torch.Tensor"),
    "a list of tensors": (TypeError, lambda n: dist.all_reduce([torch.ones(2), torch.ones(2)]), "torch.Tensor"),
    "no tensor at all": (TypeError, lambda n: dist.all_reduce(None), "torch.Tensor"),
    "no tensor to broadcast": (TypeError, lambda n: dist.broadcast(None, 0), "torch.Tensor"),
    "no tensor to reduce": (TypeError, lambda n: dist.reduce(None, 0), "torch.Tensor"),
    "no output": (TypeError, lambda n: dist.all_gather_single(None, one()), "torch.Tensor"),
    "no input": (TypeError, lambda n: dist.reduce_scatter_single(one(), None), "torch.Tensor"),
    "none to gather": (TypeError, lambda n: dist.gather_single(None, torch.ones(2 * n)), "torch.Tensor"),
    "none to scatter into": (TypeError, lambda n: dist.scatter(None, scattered(n)), "torch.Tensor"),
    "none to gather in a list": (TypeError, lambda n: dist.gather(None, scattered(n)), "torch.Tensor"),
    "no exchange": (TypeError, lambda n: dist.all_to_all_single(torch.ones(n), None), "torch.Tensor"),
    "a word for a rank": (TypeError, lambda n: dist.broadcast(one(), "0"), "a rank is '0'"),
    "a float for a rank": (TypeError, lambda n: dist.broadcast(one(), 0.0), "a rank is 0.0 of type float"),
    "a float for a rank of the group": (TypeError, lambda n: dist.reduce(one(), group_dst=0.0), "a rank is 0.0"),
    "a message to a float": (TypeError, lambda n: dist.isend(one(), 0.0), "a rank is 0.0"),
    "a message from a float": (TypeError, lambda n: dist.irecv(one(), 0.0), "a rank is 0.0"),
    "halos of a float": (TypeError, lambda n: dist.exchange({0.0: one()}, {0.0: one()}), "a rank is 0.0"),
    "floats to split": (TypeError, lambda n: dist.split_group(None, [[0.0]]), "a rank is 0.0"),
    "no whole splits": (TypeError, lambda n: dist.all_to_all_single(one(), one(), [1.0] * n, [1.0] * n), "integer"),
    "no op": (TypeError, lambda n: dist.all_reduce(one(), "sum"), "ReduceOp"),
    "no source": (ValueError, lambda n: dist.broadcast(one()), "Must specify"),
    "two sources": (ValueError, lambda n: dist.broadcast(one(), 0, group_src=0), "both"),
    "source outside": (ValueError, lambda n: dist.broadcast(one(), n), "not part of group"),
    "negative source": (ValueError, lambda n: dist.broadcast(one(), group_src=-1), "not part of group"),
    "max of complex": (ValueError, lambda n: dist.all_reduce(one(torch.complex64), dist.ReduceOp.MAX), "complex"),
    "or of floats": (RuntimeError, lambda n: dist.all_reduce(one(), dist.ReduceOp.BOR), "BOR"),
    "average of bools": (RuntimeError, lambda n: dist.all_reduce(one(torch.bool), dist.ReduceOp.AVG), "AVG"),
    "no list": (TypeError, lambda n: dist.all_gather(one(), one()), "List"),
    "a list of numbers": (TypeError, lambda n: dist.all_gather([1] * n, one()), "List"),
    "a list too long": (ValueError, lambda n: dist.all_gather(ones(n + 1), one()), "one a rank"),
    "dtypes": (ValueError, lambda n: dist.all_gather(ones(n), one(torch.float64)), "dtypes"),
    "sizes": (ValueError, lambda n: dist.all_gather([torch.ones(3)] * n, one()), "elements"),
    "one size": (ValueError, lambda n: dist.all_gather_single(torch.ones(2 * n + 1), one()), "do not fit"),
    "one dtype": (ValueError, lambda n: dist.all_gather_single(torch.ones(2 * n, dtype=torch.int32), one()), "dtypes"),
    "scattered size": (ValueError, lambda n: dist.reduce_scatter_single(one(), torch.ones(2 * n + 1)), "do not fit"),
    "input list": (ValueError, lambda n: dist.reduce_scatter(one(), ones(n + 1)), "one a rank"),
    "exchange list": (ValueError, lambda n: dist.all_to_all(ones(n), ones(n + 1)), "one a rank"),
    "splits": (RuntimeError, lambda n: dist.all_to_all_single(one(), one(), [2] * n, [1] * (n + 1)), "plit"),
    "split sum": (RuntimeError, lambda n: dist.all_to_all_single(one(), one(), [5] * n, [5] * n), "plit"),
    "device ids": (TypeError, lambda n: dist.barrier(device_ids=0), "List"),
    "timeout": (TypeError, lambda n: dist.new_group([0], timeout="1"), "timedelta"),
    "a rank twice": (ValueError, lambda n: dist.new_group([0, 0]), "duplicate"),
    "a rank outside": (ValueError, lambda n: dist.new_group([n]), "out of range"),
    "a float in a group": (TypeError, lambda n: dist.new_group([0.0]), "a rank is 0.0 of type float; expected an int"),
    "a word in a group": (TypeError, lambda n: dist.new_group(["0"], use_local_synchronization=True), "a rank is '0'"),
    "no rank of the group": (ValueError, lambda n: dist.get_group_rank(dist.group.WORLD, n), "not part of group"),
    "no rank of the world": (ValueError, lambda n: dist.get_global_rank(dist.group.WORLD, n), "not part of group"),
    "coalesced": (TypeError, lambda n: dist.all_reduce_coalesced([1]), "List"),
    "coalesced number": (TypeError, lambda n: dist.all_reduce_coalesced(5), "List"),
    "init twice": (ValueError, lambda n: dist.init_process_group(), "twice"),
    "unknown group": (ValueError, lambda n: dist.all_reduce(one(), group="dp"), "Invalid process group"),
    "no communicator": (ValueError, lambda n: dist.get_mpi_comm("x"), "Invalid process group"),
    "sparse outputs": (TypeError, lambda n: dist.all_gather([sparse() for _ in range(n)], sparse()), "dense"),
    "sparse inputs": (TypeError, lambda n: dist.reduce_scatter(one(), [sparse() for _ in range(n)]), "dense"),
    "sparse exchange": (TypeError, lambda n: dist.all_to_all([sparse()] * n, [sparse()] * n), "dense"),
    "sparse, coalesced": (TypeError, lambda n: dist.all_gather_coalesced([[sparse()]] * n, [sparse()]), "dense"),
    "compressed rows in a list": (TypeError, lambda n: dist.all_gather([compressed()] * n, one()), "dense"),
    "compressed rows, coalesced": (TypeError, lambda n: dist.all_reduce_coalesced([compressed()] * 2), "dense"),
    "compressed rows to all": (TypeError, lambda n: dist.all_gather([one()] * n, compressed()), "dense"),
    "compressed rows to gather": (TypeError, lambda n: dist.gather(compressed(), scattered(n)), "dense"),
    "compressed rows to scatter into": (TypeError, lambda n: dist.scatter(compressed(), scattered(n)), "dense"),
    "compressed rows in a message": (TypeError, lambda n: dist.isend(compressed(), 0), "dense"),
    "compressed rows in a batch": (
        TypeError,
        lambda n: dist.batch_isend_irecv([dist.P2POp(dist.isend, compressed(), 0)]),
        "dense",
    ),
    "compressed rows, as c10d": (NotImplementedError, lambda n: dist.broadcast(compressed(), 0), "dense"),
    "sparse message, as c10d": (NotImplementedError, lambda n: dist.isend(sparse(), 0), "dense"),
    "of oneDNN to all": (TypeError, lambda n: dist.all_gather([one()] * n, torch.eye(2).to_mkldnn()), "dense"),
    "tensor for a group": (ValueError, lambda n: dist.all_reduce(one(), group=torch.ones(2)), "Invalid process group"),
    "window of others": (
        ValueError,
        lambda n: dist.Window(1, group=dist.GroupMember.NON_GROUP_MEMBER),
        "this rank is not in the group",
    ),
    "halo of others": (
        ValueError,
        lambda n: dist.HaloExchange([n], group=dist.GroupMember.NON_GROUP_MEMBER),
        "this rank is not in the group",
    ),
    "parts of a product": (
        ValueError,
        lambda n: dist.reduce_scatter_single(torch.ones(2), torch.ones(n) * 1j, dist.ReduceOp.PRODUCT),
        "as a whole",
    ),
    "factor, none": (ValueError, lambda n: dist.all_reduce(one(), dist.ReduceOp.PREMUL_SUM), "factor"),
    "factor, complex": (ValueError, lambda n: dist.all_reduce(one(), factor(torch.tensor(1j))), "factor"),
    "factor, meta": (ValueError, lambda n: dist.all_reduce(one(), factor(meta()[:1])), "which has no value"),
    "numpy dtype": (TypeError, lambda n: dist.all_reduce(np.ones(2, dtype="U3")), "numpy"),
    "read-only array": (ValueError, lambda n: dist.all_reduce(frozen()), "read-only"),
    "masked array": (TypeError, lambda n: dist.all_reduce(np.ma.ones(2)), "whose mask would be ignored"),
    "masked arrays": (TypeError, lambda n: dist.all_gather([np.ma.ones(2)] * n, np.ones(2)), "whose mask"),
    "sparse broadcast": (TypeError, lambda n: dist.broadcast(sparse(), 0), "sparse"),
    "meta device": (RuntimeError, lambda n: dist.all_reduce(meta()), "device type meta"),
    "meta device in a list": (RuntimeError, lambda n: dist.all_gather([meta()] * n, one()), "meta"),
    "meta device to gather": (RuntimeError, lambda n: dist.all_gather(ones(n), meta()), "meta"),
    "meta device, coalesced": (RuntimeError, lambda n: dist.all_reduce_coalesced([one(), meta()]), "meta"),
    "meta device, varied": (RuntimeError, lambda n: dist.all_gather_varied(meta()), "device type meta"),
    "meta device, halo": (RuntimeError, lambda n: dist.HaloExchange([n])(torch.ones(9, device="meta")), "type meta"),
    "meta device, message": (RuntimeError, lambda n: dist.isend(meta(), 0), "device type meta"),
    "subgroups, a number": (TypeError, lambda n: dist.new_subgroups_by_enumeration(5), "subgroups are 5 of type int"),
    "splits, a number": (TypeError, lambda n: dist.split_group(None, 5), "subgroups are 5 of type int"),
    "size of subgroups": (TypeError, lambda n: dist.new_subgroups("2"), "group_size is '2'"),
    "local group of another backend": (
        ValueError,
        lambda n: dist.new_group(backend="loopback", use_local_synchronization=True),
        "takes the default group's backend",
    ),
    "backend of a number": (TypeError, lambda n: dist.get_backend_impl(None, 0.5), ""),
    "no shape": (TypeError, lambda n: dist.node_shared(None), "`shape` is None of type NoneType"),
    "float shape": (TypeError, lambda n: dist.node_shared((2, 0.5)), "`shape` is 0.5 of type float"),
    "quantized shared": (TypeError, lambda n: dist.node_shared(2, torch.quint8), "`dtype` is torch.quint8"),
    "float dimension": (TypeError, lambda n: dist.all_gather_varied(one(), 0.0), "dim is 0.0 of type float"),
    "float size": (TypeError, lambda n: dist.reduce_scatter_varied(one(), 1.0), "size is 1.0 of type float"),
    "splits of one number": (TypeError, lambda n: dist.all_to_all_single(one(), one(), 1, 1), "list of integers"),
    "barrier, timeout": (TypeError, lambda n: dist.barrier(timeout="1"), "timedelta"),
    "barrier, negative timeout": (RuntimeError, lambda n: dist.barrier(timeout=BEFORE), "Invalid timeout: -1 s"),
    "group, negative timeout": (RuntimeError, lambda n: dist.new_group(timeout=BEFORE), "Invalid timeout: -1 s"),
    "group, no time": (RuntimeError, lambda n: dist.new_group(timeout=timedelta(0)), "Invalid timeout: 0 s"),
    "subgroups, negative timeout": (RuntimeError, lambda n: dist.new_subgroups(n, timeout=BEFORE), "Invalid timeout"),
    "split, negative timeout": (RuntimeError, lambda n: dist.split_group(None, [[0]], BEFORE), "Invalid timeout"),
    "monitored, negative timeout": (RuntimeError, lambda n: dist.monitored_barrier(timeout=BEFORE), "Invalid timeout"),
    "set, negative timeout": (RuntimeError, lambda n: dist.set_timeout(BEFORE), "Invalid timeout"),
    "set, no timeout": (TypeError, lambda n: dist.set_timeout(None), "timedelta"),
}


@pytest.mark.parametrize(
    "case", ["a list too long", "dtypes", "sizes", "one size", "scattered size", "source outside", "negative source"]
)
def test_what_c10d_calls_a_runtime_error_in_some_places_is_one_too(case, size):
    with pytest.raises(RuntimeError, match=CASES[case][2]):
        CASES[case][1](size)


# c10d's methods of a group
REFUSED = {
    "send nothing": (RuntimeError, lambda pg, n: pg.send([], 0, 0), "single-element tensor list, got 0"),
    "send a number": (TypeError, lambda pg, n: pg.send(5, 0, 0), "List"),
    "send to a word": (TypeError, lambda pg, n: pg.send([one()], "0", 0), "a rank is '0'"),
    "recv nothing": (RuntimeError, lambda pg, n: pg.recv([], 0, 0), "single-element tensor list, got 0"),
    "recv from None": (TypeError, lambda pg, n: pg.recv([one()], None, 0), "a rank is None"),
    "recv_anysource two": (RuntimeError, lambda pg, n: pg.recv_anysource([one(), one()], 0), "single-element"),
    "allreduce a number": (TypeError, lambda pg, n: pg.allreduce(5), "List"),
    "allreduce numbers": (TypeError, lambda pg, n: pg.allreduce([1, 2]), "List"),
    "allreduce None too": (TypeError, lambda pg, n: pg.allreduce([one(), None]), "List"),
    "allreduce by the class": (TypeError, lambda pg, n: pg.allreduce([one()], dist.ReduceOp), "ReduceOp"),
    "allreduce by a word": (TypeError, lambda pg, n: pg.allreduce([one()], "sum"), "ReduceOp"),
    "allreduce, other options": (TypeError, lambda pg, n: pg.allreduce([one()], dist.BarrierOptions()), "ReduceOp"),
    "allreduce, layouts in turn": (RuntimeError, lambda pg, n: pg.allreduce([torch.eye(2), sparse()]), "tensor layout"),
    "allreduce, sparse": (
        RuntimeError,
        lambda pg, n: pg.allreduce([sparse(), sparse()], dist.ReduceOp.MAX),
        r"unsupported reduction operation: ReduceOp\.MAX with sparse",
    ),
    "allreduce_coalesced a number": (TypeError, lambda pg, n: pg.allreduce_coalesced(5), "List"),
    "reduce to a word": (TypeError, lambda pg, n: pg.reduce([one()], "0"), "a rank is '0'"),
    "reduce, other options": (TypeError, lambda pg, n: pg.reduce([one()], dist.BarrierOptions()), "a rank is"),
    "broadcast from a word": (TypeError, lambda pg, n: pg.broadcast([one()], opts="0"), "a rank is '0'"),
    "broadcast a number": (TypeError, lambda pg, n: pg.broadcast(5), "List"),
    "allgather, a list too long": (RuntimeError, lambda pg, n: pg.allgather([ones(n + 1)], [one()]), "expected"),
    "gather, another size": (
        RuntimeError,
        lambda pg, n: pg.gather([[torch.ones(1)] * n], [one()], pg.rank()),
        "expected",
    ),
    "scatter, a list too long": (RuntimeError, lambda pg, n: pg.scatter([one()], [ones(n + 1)], pg.rank()), "expected"),
    "reduce_scatter, a list too long": (
        RuntimeError,
        lambda pg, n: pg.reduce_scatter([one()], [ones(n + 1)]),
        "expected",
    ),
    "alltoall, lists too long": (RuntimeError, lambda pg, n: pg.alltoall(ones(n + 1), ones(n + 1)), "expected"),
    "alltoall, no lists": (RuntimeError, lambda pg, n: pg.alltoall([], []), "expected"),
    "allgather no lists": (TypeError, lambda pg, n: pg.allgather(5, [one()]), "expected a list"),
    "allgather no list in a list": (TypeError, lambda pg, n: pg.allgather([torch.ones(n)], [one()]), "expected a list"),
    "allgather, options": (TypeError, lambda pg, n: pg.allgather([ones(n)], [one()], "0"), "opts is '0'"),
    "allgather_coalesced": (TypeError, lambda pg, n: pg.allgather_coalesced(5, [one()]), "list of lists"),
    "all_gather_single, options": (
        TypeError,
        lambda pg, n: pg.all_gather_single(torch.ones(2 * n), one(), "0"),
        "opts is '0'",
    ),
    "reduce_scatter no lists": (TypeError, lambda pg, n: pg.reduce_scatter(5, 5), "expected a list"),
    "reduce_scatter no list": (TypeError, lambda pg, n: pg.reduce_scatter([one()], [torch.ones(n)]), "expected a list"),
    "gather no list": (TypeError, lambda pg, n: pg.gather(5, [one()]), "expected a list"),
    "gather_single a list": (TypeError, lambda pg, n: pg.gather_single(torch.ones(2 * n), ones(n)), "torch.Tensor"),
    "scatter no list": (TypeError, lambda pg, n: pg.scatter([one()], 5), "expected a list"),
    "scatter from a word": (TypeError, lambda pg, n: pg.scatter([one()], [ones(n)], "0"), "a rank is '0'"),
    "alltoall numbers": (TypeError, lambda pg, n: pg.alltoall(5, 5), "List"),
    "alltoall_base, splits": (TypeError, lambda pg, n: pg.alltoall_base(one(), one(), 1, 1), "list of integers"),
    "barrier, options": (TypeError, lambda pg, n: pg.barrier("now"), "opts is 'now'"),
    "timeout": (TypeError, lambda pg, n: pg.set_timeout(5), "timedelta"),
    "split, twice": (RuntimeError, lambda pg, n: pg.split_group([0, 0]), "duplicate"),
    "split, outside": (RuntimeError, lambda pg, n: pg.split_group([n]), "out of range"),
    "split, words": (TypeError, lambda pg, n: pg.split_group(["0"]), "a rank is '0'"),
    "split, no such device": (RuntimeError, lambda pg, n: pg.split_group([0], device_types=["meta"]), "type meta"),
    "split, device": (TypeError, lambda pg, n: pg.split_group([0], device_types=[0.5]), ""),
    "split, timeout": (TypeError, lambda pg, n: pg.split_group([0], 5), "timedelta"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_method_of_a_group_refuses(case, world, size):
    kind, call, text = REFUSED[case]
    with pytest.raises(kind, match=text):
        call(world, size)


# of a tensor that fits, and then one that does not
PARTLY = {
    "allreduce_coalesced": lambda pg, n, good, freed: pg.allreduce_coalesced([good, freed]).wait(),
    "op": lambda pg, n, good, _: pg.allreduce_coalesced([good, one(torch.bool)], dist.ReduceOp.AVG).wait(),
    "layout": lambda pg, n, good, _: pg.allreduce_coalesced([good, compressed()]).wait(),
    "large": lambda pg, n, good, freed: pg.allreduce_coalesced([torch.ones(300_000), good, freed]).wait(),
    "all_reduce_coalesced": lambda pg, n, good, freed: dist.all_reduce_coalesced([good, freed]),
    "asynchronous": lambda pg, n, good, freed: dist.all_reduce_coalesced([good, freed], async_op=True),
    "all_gather": lambda pg, n, good, _: pg.all_gather_single_coalesced(
        [good, torch.ones(2 * n + 1)], [torch.ones(2), torch.ones(2)]
    ).wait(),
    "reduce_scatter": lambda pg, n, good, _: pg.reduce_scatter_single_coalesced(
        [good, one()], [torch.ones(2 * n * n), torch.ones(2 * n + 1)]
    ).wait(),
    "all_gather_coalesced": lambda pg, n, good, _: dist.all_gather_coalesced(
        [[each, torch.ones(3)] for each in good.chunk(n)], [torch.ones(2), torch.ones(2)]
    ),
}


@pytest.mark.parametrize("case", PARTLY)
def test_nothing_is_sent_if_a_later_tensor_does_not_fit(case, world, size):
    good = torch.full((2 * size,), 7.0)
    with pytest.raises((TypeError, RuntimeError)):
        PARTLY[case](world, size, good, freed(2))
    assert (good == 7).all()


def test_a_coalescing_manager_refuses_a_call_where_it_stands(size):
    good = torch.ones(2)
    with dist._coalescing_manager():
        dist.all_reduce(good)
        with pytest.raises(ValueError, match="do not fit"):
            dist.all_gather_into_tensor(torch.ones(2 * size + 1), one())
        with pytest.raises(TypeError, match=r"torch\.Tensor"):
            dist.broadcast(5, 0)
    assert (good == size).all()


def quantized():
    return torch.quantize_per_tensor(torch.ones(4), 0.1, 10, torch.quint8)


QUANTIZED = {
    "all_reduce": lambda q, pg, n: dist.all_reduce(q()),
    "reduce": lambda q, pg, n: dist.reduce(q(), 0),
    "broadcast": lambda q, pg, n: dist.broadcast(q(), 0),
    "asynchronous": lambda q, pg, n: dist.broadcast(q(), 0, async_op=True),
    "all_gather": lambda q, pg, n: dist.all_gather([q() for _ in range(n)], q()),
    "all_gather_single": lambda q, pg, n: dist.all_gather_single(q(), q()),
    "gather": lambda q, pg, n: dist.gather(q(), [q() for _ in range(n)] if pg.rank() == 0 else None),
    "gather_single": lambda q, pg, n: dist.gather_single(q(), q()),
    "scatter": lambda q, pg, n: dist.scatter(q(), [q() for _ in range(n)] if pg.rank() == 0 else None),
    "reduce_scatter": lambda q, pg, n: dist.reduce_scatter(q(), [q() for _ in range(n)]),
    "reduce_scatter_single": lambda q, pg, n: dist.reduce_scatter_single(q(), q()),
    "all_to_all": lambda q, pg, n: dist.all_to_all([q() for _ in range(n)], [q() for _ in range(n)]),
    "all_to_all_single": lambda q, pg, n: dist.all_to_all_single(q(), q()),
    "coalesced": lambda q, pg, n: dist.all_reduce_coalesced([q(), q()]),
    "all_gather_coalesced": lambda q, pg, n: dist.all_gather_coalesced([[q()] for _ in range(n)], [q()]),
    "several": lambda q, pg, n: pg.allreduce([q(), q()]),
    "send": lambda q, pg, n: dist.send(q(), (pg.rank() + 1) % n),
    "recv": lambda q, pg, n: dist.recv(q(), (pg.rank() + 1) % n),
    "isend": lambda q, pg, n: dist.isend(q(), 0),
    "irecv": lambda q, pg, n: dist.irecv(q(), 0),
    "batch": lambda q, pg, n: dist.batch_isend_irecv([dist.P2POp(dist.isend, q(), 0)]),
    "exchange": lambda q, pg, n: dist.exchange({0: q()}, {}),
    "halo": lambda q, pg, n: dist.HaloExchange([n], periodic=True)(q()),
    "varied": lambda q, pg, n: dist.all_gather_varied(q()),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("call", QUANTIZED)
def test_quantized_tensors_are_refused(call, world, size):
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        QUANTIZED[call](quantized, world, size)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("call", [*QUANTIZED][: [*QUANTIZED].index("several")])
def test_nested_tensors_are_refused(call, world, size):
    """Lists took their memory for flat tensors, a transposed one's in its own order."""
    parts = [torch.ones(2, 3), torch.ones(1, 3)]
    for made in (torch.nested.nested_tensor(parts), torch.nested.nested_tensor(parts).transpose(1, 2)):
        world.known.clear()  # torch's comparison of looks ends the process (docs, Known issues)
        with pytest.raises(TypeError, match="does not carry nested tensors"):
            QUANTIZED[call](lambda made=made: made, world, size)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_batch_with_what_cannot_be_sent_sends_nothing(rank, size):
    peer, received = (rank + 1) % size, torch.zeros(2)
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, each, peer) for each in (one(), quantized())])
    sent = dist.isend(torch.full((2,), 5.0), peer)
    dist.irecv(received, (rank - 1) % size).wait()
    sent.wait()
    assert received.tolist() == [5, 5]


def test_a_group_of_nobody(size):
    assert dist.new_group([]) is dist.GroupMember.NON_GROUP_MEMBER
    outside = torch_dist.new_group([], use_local_synchronization=True)
    assert dist.new_group([], use_local_synchronization=True) == outside


TAGGED = {
    "send": lambda dist, peer, tag: dist.send(one(), peer, tag=tag),
    "recv": lambda dist, peer, tag: dist.recv(one(), peer, tag=tag),
    "recv from anyone": lambda dist, peer, tag: dist.recv(one(), tag=tag),
    "isend": lambda dist, peer, tag: dist.isend(one(), peer, tag=tag),
    "irecv": lambda dist, peer, tag: dist.irecv(one(), peer, tag=tag),
    "batch": lambda dist, peer, tag: dist.batch_isend_irecv([dist.P2POp(dist.irecv, one(), peer, tag=tag)]),
}


@pytest.mark.parametrize("call", TAGGED)
def test_negative_tags(call, rank, size):
    # on one rank torch looks at the peer first, which must be another rank
    doors = [dist, torch_dist] if torch_dist.is_initialized() and size > 1 else [dist]
    for door in doors:
        for tag in (-1, -2, -(2**31)):  # to MPI some of them mean any tag
            with pytest.raises(ValueError, match=f"Tag must be nonnegative: got {tag}"):
                TAGGED[call](door, (rank + 1) % size, tag)
            with pytest.raises(RuntimeError, match="Tag must be nonnegative"):  # as gloo's
                TAGGED[call](door, (rank + 1) % size, tag)


@pytest.mark.parametrize("call", TAGGED)
def test_tags_that_are_no_numbers_of_messages(call, rank, size):
    for tag in (1.5, None, "1", np.float64(1)):
        with pytest.raises(TypeError, match="expected an int"):
            TAGGED[call](dist, (rank + 1) % size, tag)
    with pytest.raises(ValueError, match="2147483648 is too large"):
        TAGGED[call](dist, (rank + 1) % size, 2**31)


def test_other_numbers_are_tags(rank, size):
    for tag, same in ((np.int64(3), 3), (True, 1), (torch.tensor(4), 4)):
        work = dist.irecv(received := torch.zeros(1), rank, tag=same)
        dist.isend(torch.ones(1), rank, tag=tag).wait()
        work.wait()
        assert received.item() == 1


@pytest.mark.parametrize("case", CASES)
def test_error(case, size):
    kind, call, text = CASES[case]
    with pytest.raises(kind, match=text):
        call(size)


@pytest.mark.parametrize("width", [(), (3,)])
def test_rows_that_do_not_divide_among_the_ranks(two_ranks, width, size):
    rows = torch.ones(size + 1, *width, dtype=torch.float32)  # on 2 and 4 ranks their bytes would divide
    with pytest.raises(RuntimeError):
        dist.all_to_all_single(rows.clone(), rows)


def most_to_oneself(tensor):
    """Return splits of a tensor's rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return [len(tensor) - size + 1 if peer == rank else 1 for peer in range(size)]


# with tensors that a function makes
WITHOUT_MEMORY = {
    "all_reduce": lambda make, n: dist.all_reduce(make()),
    "asynchronous": lambda make, n: dist.all_reduce(make(), async_op=True).wait(),
    "broadcast": lambda make, n: dist.broadcast(make(), 0),
    "reduce": lambda make, n: dist.reduce(make(), 0),
    "all_gather": lambda make, n: dist.all_gather([make() for _ in range(n)], make()),
    "reduce_scatter": lambda make, n: dist.reduce_scatter(make(), [make() for _ in range(n)]),
    "all_to_all": lambda make, n: dist.all_to_all([make() for _ in range(n)], [make() for _ in range(n)]),
    "all_to_all_single": lambda make, n: dist.all_to_all_single(make(), make()),
    "splits": lambda make, n: dist.all_to_all_single(make(), tensor := make(), *[most_to_oneself(tensor)] * 2),
    "coalesced": lambda make, n: dist.all_reduce_coalesced([make(), make()]),
    "coalesced, asynchronous": lambda make, n: dist.all_reduce_coalesced([make(), make()], async_op=True).wait(),
}


@pytest.mark.skipif("HPCDIST_TEST_BACKEND" in os.environ, reason="MPI's backend")
@pytest.mark.parametrize("count", [24, 600_000])
@pytest.mark.parametrize("call", WITHOUT_MEMORY)
def test_tensors_whose_storage_was_freed(call, count, rank, size):
    for number in range(80):  # until the group knows the call, which then checks less
        if rank == size - 1:  # the others see nothing of it
            with pytest.raises(ValueError, match="storage was freed"):
                WITHOUT_MEMORY[call](partial(freed, count, number % 2), size)
        if count < 1000:
            WITHOUT_MEMORY[call](lambda: torch.ones(count), size)


@pytest.mark.skipif("HPCDIST_TEST_BACKEND" in os.environ, reason="MPI's backend")
@pytest.mark.parametrize(
    "make",
    [lambda: torch.ones(3, 2).t(), lambda: torch.ones(3, 2).bfloat16(), lambda: torch.ones(3, 2).bfloat16().t()],
    ids=["strided", "half", "strided half"],
)
def test_a_copied_tensor_whose_storage_was_freed(make, size):
    def gather(each):
        dist.all_gather_into_tensor(each, torch.ones(each.numel() // size, dtype=each.dtype))

    tensor = make()
    part = make()[1:]
    for each in (tensor, part):
        each.untyped_storage().resize_(0)
    for call in (dist.all_reduce, lambda each: dist.broadcast(each, 0), lambda each: dist.reduce(each, 0), gather):
        for _ in range(20):  # until the group knows the call
            for each in (tensor, part):
                with pytest.raises(ValueError, match="storage was freed"):
                    call(each)
            if call is not gather or not tensor.numel() % size:
                call(make())
    for message in (dist.isend, dist.irecv):
        for each in (tensor, part):
            with pytest.raises(ValueError, match="storage was freed"):
                message(each, 0)


@pytest.mark.skipif("HPCDIST_TEST_BACKEND" in os.environ, reason="MPI's backend")
def test_a_list_of_which_one_tensor_has_no_memory(size):
    with pytest.raises(ValueError, match="storage was freed"):
        dist.all_gather([*(one() for _ in range(size - 1)), freed(2)], one())
    with pytest.raises(ValueError, match="storage was freed"):
        dist.all_gather([one() for _ in range(size)], freed(2))
    with pytest.raises(ValueError, match="storage was freed"):
        dist.all_reduce_coalesced([one(), freed(2)])
    dist.all_reduce_coalesced([one(), freed(0)])  # has no elements


RESIZED_LATER = {
    "all_gather_into_tensor": lambda make, n: (dist.all_gather_into_tensor, (make(n), make(1))),
    "reduce_scatter_tensor": lambda make, n: (dist.reduce_scatter_tensor, (make(1), make(n))),
    "all_to_all_single": lambda make, n: (dist.all_to_all_single, (make(n), make(n))),
    "all_gather": lambda make, n: (dist.all_gather, ([make(1) for _ in range(n)], make(1))),
    "reduce_scatter": lambda make, n: (dist.reduce_scatter, (make(1), [make(1) for _ in range(n)])),
    "all_to_all": lambda make, n: (dist.all_to_all, ([make(1) for _ in range(n)], [make(1) for _ in range(n)])),
    "coalesced": lambda make, n: (dist.all_reduce_coalesced, ([make(1), make(1)],)),
}


@pytest.mark.skipif("HPCDIST_TEST_BACKEND" in os.environ, reason="MPI's backend")
@pytest.mark.parametrize("before", [0, 80], ids=["first", "repeated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RESIZED_LATER)
def test_a_tensor_that_got_less_memory_before_an_asynchronous_call_was_carried_out(name, dtype, before, size):
    """MPI wrote past it."""
    made, group = [], dist.new_group()

    def make(parts):
        made.append(torch.ones(parts * 500, dtype=dtype))
        return made[-1]

    def begin():
        made.clear()
        call, tensors = RESIZED_LATER[name](make, size)
        return call(*tensors, group=group, async_op=True)

    for _ in range(before):  # until the group knows the call
        begin().wait()
    for index in range(len(made) or 2):
        memory = torch.zeros(4000, dtype=dtype)
        with group.cpu.open_queue()._turn:  # nobody carries it out
            work = begin()
            made[index].data = memory[:7]
        with pytest.raises(ValueError, match="resized"):
            work.wait()
        assert not memory.any()
    dist.destroy_process_group(group)


FREED_LATER = {
    "all_reduce": lambda make, n, how: dist.all_reduce(make(), **how),
    "half": lambda make, n, how: dist.all_reduce(make(dtype=torch.bfloat16), **how),
    "strided": lambda make, n, how: dist.all_reduce(make().view(-1, 2).t(), **how),
    "all_gather": lambda make, n, how: dist.all_gather([make() for _ in range(n)], make(), **how),
    "reduce_scatter": lambda make, n, how: dist.reduce_scatter(make(), [make() for _ in range(n)], **how),
    "all_to_all": lambda make, n, how: dist.all_to_all(*([make() for _ in range(n)] for _ in range(2)), **how),
    "coalesced": lambda make, n, how: dist.all_reduce_coalesced([make(), make()], **how),
}


@pytest.mark.skipif("HPCDIST_TEST_BACKEND" in os.environ, reason="MPI's backend")
@pytest.mark.parametrize("count", [24, 600_000])
@pytest.mark.parametrize("call", FREED_LATER)
def test_tensors_whose_storage_was_freed_before_an_asynchronous_call_was_carried_out(call, count, size):
    """That crashed, or MPI wrote to memory that was another tensor's since."""
    made = []

    def make(dtype=torch.float32):
        made.append(torch.ones(count, dtype=dtype))
        return made[-1]

    group = dist.new_group()  # on which no rank has made such calls before
    with group.cpu.open_queue()._turn:  # nobody carries it out
        work = FREED_LATER[call](make, size, {"group": group, "async_op": True})
        for each in made:
            each.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="storage was freed"):
        work.wait()
    dist.destroy_process_group(group)


def test_lists_on_the_wrong_ranks(rank, size):
    root = size - 1
    given, text = (None, "must be specified on") if rank == root else (ones(size), "NOT be specified")
    for call in (dist.gather, dist.scatter):
        with pytest.raises(ValueError, match=text):
            call(one(), given, root)


def test_a_root_that_has_no_output_is_refused_before_it_is_in_a_call(rank, size):
    """Others would send what nobody receives, and the next gather would take it."""
    if rank == 0:
        with pytest.raises(TypeError, match=r"torch\.Tensor"):
            dist.group.WORLD.gather_single(None, torch.ones(2))
