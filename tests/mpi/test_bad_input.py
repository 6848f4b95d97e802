"""Bad input raises c10d's class, says what was expected, sends nothing, and leaves the group usable."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist

import hpcdist as dist


@pytest.fixture(autouse=True)
def _still_usable(size):
    yield
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size


def one(dtype=torch.float32):
    return torch.ones(2, dtype=dtype)


def sparse():
    return torch.eye(2).to_sparse()


CASES = {
    "no tensor": (TypeError, lambda n: dist.all_reduce([1, 2]), "torch.Tensor"),
    "no tensor at all": (TypeError, lambda n: dist.all_reduce(None), "torch.Tensor"),
    "no tensor to broadcast": (TypeError, lambda n: dist.broadcast(None, 0), "torch.Tensor"),
    "no tensor to reduce": (TypeError, lambda n: dist.reduce(None, 0), "torch.Tensor"),
    "no output": (TypeError, lambda n: dist.all_gather_single(None, one()), "torch.Tensor"),
    "no input": (TypeError, lambda n: dist.reduce_scatter_single(one(), None), "torch.Tensor"),
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
    "a list too long": (ValueError, lambda n: dist.all_gather([one()] * (n + 1), one()), "one a rank"),
    "dtypes": (ValueError, lambda n: dist.all_gather([one()] * n, one(torch.float64)), "dtypes"),
    "sizes": (ValueError, lambda n: dist.all_gather([torch.ones(3)] * n, one()), "elements"),
    "one size": (ValueError, lambda n: dist.all_gather_single(torch.ones(2 * n + 1), one()), "do not fit"),
    "one dtype": (ValueError, lambda n: dist.all_gather_single(torch.ones(2 * n, dtype=torch.int32), one()), "dtypes"),
    "scattered size": (ValueError, lambda n: dist.reduce_scatter_single(one(), torch.ones(2 * n + 1)), "do not fit"),
    "input list": (ValueError, lambda n: dist.reduce_scatter(one(), [one()] * (n + 1)), "one a rank"),
    "exchange list": (ValueError, lambda n: dist.all_to_all([one()] * n, [one()] * (n + 1)), "one a rank"),
    "splits": (RuntimeError, lambda n: dist.all_to_all_single(one(), one(), [2] * n, [1] * (n + 1)), "plit"),
    "split sum": (RuntimeError, lambda n: dist.all_to_all_single(one(), one(), [5] * n, [5] * n), "plit"),
    "device ids": (TypeError, lambda n: dist.barrier(device_ids=0), "List"),
    "timeout": (TypeError, lambda n: dist.new_group([0], timeout="1"), "timedelta"),
    "coalesced": (TypeError, lambda n: dist.all_reduce_coalesced([1]), "List"),
    "init twice": (ValueError, lambda n: dist.init_process_group(), "twice"),
    "unknown group": (ValueError, lambda n: dist.all_reduce(one(), group="dp"), "Invalid process group"),
    "no communicator": (ValueError, lambda n: dist.get_mpi_comm("x"), "Invalid process group"),
    "sparse outputs": (TypeError, lambda n: dist.all_gather([sparse() for _ in range(n)], sparse()), "dense"),
    "sparse inputs": (TypeError, lambda n: dist.reduce_scatter(one(), [sparse() for _ in range(n)]), "dense"),
    "sparse exchange": (TypeError, lambda n: dist.all_to_all([sparse()] * n, [sparse()] * n), "dense"),
    "sparse, coalesced": (TypeError, lambda n: dist.all_gather_coalesced([[sparse()]] * n, [sparse()]), "dense"),
    "compressed rows in a list": (
        TypeError,
        lambda n: dist.all_gather([torch.eye(2).to_sparse_csr()] * n, one()),
        "dense",
    ),
    "compressed rows, coalesced": (
        TypeError,
        lambda n: dist.all_reduce_coalesced([torch.eye(2).to_sparse_csr()] * 2),
        "dense",
    ),
    "parts of a product": (
        ValueError,
        lambda n: dist.reduce_scatter_single(torch.ones(2), torch.ones(n) * 1j, dist.ReduceOp.PRODUCT),
        "as a whole",
    ),
    "factor, none": (ValueError, lambda n: dist.all_reduce(one(), dist.ReduceOp.PREMUL_SUM), "factor"),
    "factor, complex": (
        ValueError,
        lambda n: dist.all_reduce(one(), dist._make_nccl_premul_sum(torch.tensor(1j))),
        "factor",
    ),
    "numpy dtype": (TypeError, lambda n: dist.all_reduce(np.ones(2, dtype="U3")), "numpy"),
    "sparse broadcast": (TypeError, lambda n: dist.broadcast(torch.eye(2).to_sparse(), 0), "sparse"),
    "meta device": (RuntimeError, lambda n: dist.all_reduce(torch.ones(2, device="meta")), "device type meta"),
}


@pytest.mark.parametrize(
    "case", ["a list too long", "dtypes", "sizes", "one size", "scattered size", "source outside", "negative source"]
)
def test_what_c10d_calls_a_runtime_error_in_some_places_is_one_too(case, size):
    with pytest.raises(RuntimeError, match=CASES[case][2]):
        CASES[case][1](size)


METHODS = {
    "all_gather": lambda pg, n: pg.allgather([[one()] * (n + 1)], [one()]),
    "gather": lambda pg, n: pg.gather([[torch.ones(1), *[one()] * (n - 1)]], [one()]),
    "scatter": lambda pg, n: pg.scatter([one()], [[one()] * (n + 1)]),
    "reduce_scatter": lambda pg, n: pg.reduce_scatter([one()], [[one()] * (n + 1)]),
    "all_to_all": lambda pg, n: pg.alltoall([one()] * (n + 1), [one()] * (n + 1)),
    "no lists": lambda pg, n: pg.alltoall([], []),
}


@pytest.mark.parametrize("call", METHODS)
def test_a_method_of_a_group_with_lists_that_do_not_fit(call, world, rank, size):
    if rank and call in ("gather", "scatter"):
        return  # the root alone has the list
    with pytest.raises(RuntimeError, match="expected"):
        METHODS[call](world, size)


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
def test_rows_that_do_not_divide_among_the_ranks(width, size):
    if size == 1:
        pytest.skip("one rank takes all rows")
    rows = torch.ones(size + 1, *width, dtype=torch.float32)  # on 2 and 4 ranks their bytes would divide
    with pytest.raises(RuntimeError):
        dist.all_to_all_single(rows.clone(), rows)


def freed(count):
    """Return a tensor whose storage was freed, as FSDP frees those of unsharded parameters."""
    tensor = torch.ones(count)
    tensor.untyped_storage().resize_(0)
    return tensor


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
    "coalesced": lambda make, n: dist.all_reduce_coalesced([make(), make()]),
    "coalesced, asynchronous": lambda make, n: dist.all_reduce_coalesced([make(), make()], async_op=True).wait(),
}


@pytest.mark.skipif("HPCDIST_TEST_BACKEND" in os.environ, reason="MPI's backend")
@pytest.mark.parametrize("count", [24, 600_000])
@pytest.mark.parametrize("call", WITHOUT_MEMORY)
def test_tensors_whose_storage_was_freed(call, count, size):
    for _ in range(40):  # until the group knows the call, which then checks less
        with pytest.raises(ValueError, match="storage was freed"):
            WITHOUT_MEMORY[call](lambda: freed(count), size)
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
    tensor.untyped_storage().resize_(0)
    for call in (dist.all_reduce, lambda each: dist.broadcast(each, 0), lambda each: dist.reduce(each, 0), gather):
        for _ in range(20):  # until the group knows the call
            with pytest.raises(ValueError, match="storage was freed"):
                call(tensor)
            if call is not gather or not tensor.numel() % size:
                call(make())
    for message in (dist.isend, dist.irecv):
        with pytest.raises(ValueError, match="storage was freed"):
            message(tensor, 0)


@pytest.mark.skipif("HPCDIST_TEST_BACKEND" in os.environ, reason="MPI's backend")
def test_a_list_of_which_one_tensor_has_no_memory(size):
    with pytest.raises(ValueError, match="storage was freed"):
        dist.all_gather([*(one() for _ in range(size - 1)), freed(2)], one())
    with pytest.raises(ValueError, match="storage was freed"):
        dist.all_gather([one() for _ in range(size)], freed(2))
    with pytest.raises(ValueError, match="storage was freed"):
        dist.all_reduce_coalesced([one(), freed(2)])
    dist.all_reduce_coalesced([one(), freed(0)])  # has no elements


def test_lists_on_the_wrong_ranks(rank, size):
    root = size - 1
    if rank == root:
        with pytest.raises(ValueError, match="must be specified on destination"):
            dist.gather(one(), None, root)
        with pytest.raises(ValueError, match="must be specified on source"):
            dist.scatter(one(), None, root)
    else:
        with pytest.raises(ValueError, match="NOT be specified"):
            dist.gather(one(), [one()] * size, root)
        with pytest.raises(ValueError, match="NOT be specified"):
            dist.scatter(one(), [one()] * size, root)


def test_a_read_only_array_is_no_output(rank, size):
    array = np.ones(2)
    array.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        dist.all_reduce(array)
    output = [np.empty(2) for _ in range(size)]
    dist.all_gather(output, array)
    assert all((each == 1).all() for each in output)
