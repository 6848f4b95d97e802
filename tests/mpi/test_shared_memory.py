"""Collectives through shared memory give what mathematics says, at every chunk edge, for every dtype × op."""

from __future__ import annotations

import os
import random
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

pytest.importorskip("mpi4py")
import hpcdist as dist
from hpcdist.backends.mpi.node import collectives, window
from hpcdist.backends.mpi.node.arithmetic import DTYPES
from hpcdist.backends.mpi.node.collectives import NodeShared
from hpcdist.backends.mpi.node.places import locate
from hpcdist.core import memory_file
from hpcdist.core.buffers import TensorList
from hpcdist.core.reduction import KIND_OF, KINDS, name_of
from tests.mpi.expected import mathematics

SEED = 20
ITEM = 4
EDGES = sorted(
    {
        max(1, edge // ITEM + more)
        for edge in (
            64,
            collectives.DIRECT_HALF_BYTES // 2,
            collectives.DIRECT_HALF_BYTES_OF_TWO // 2,
            *(collectives.DIRECT_BYTES // n for n in (2, 3, 4, 5)),
            window.CHUNK_BYTES,
            2 * window.CHUNK_BYTES,
            window.SLOT_BYTES,
            6 * window.CHUNK_BYTES,
            4 * window.SLOT_BYTES,
        )
        for more in (-17, -1, 0, 1, 15)
    }
)
REDUCIBLE = [(dtype, name_of(op)) for dtype in DTYPES for op in KINDS[KIND_OF[dtype]]]


def node_shared(comm, poll=lambda: None) -> NodeShared:
    """Make a group's shared memory, as its first call that needs it does; every rank calls."""
    return NodeShared(locate(comm, []), SimpleNamespace(poll=poll, is_background=bool))


@pytest.fixture(scope="module")
def comm(of_host):
    return of_host


@pytest.fixture(scope="module")
def node(comm):
    shared = node_shared(comm)
    yield shared
    shared.close()


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small numbers that differ by rank and place and stay exact in every dtype."""
    whole = (torch.arange(numel) * (rank + 3) + rank) % 4
    return (whole % 2).bool() if dtype is torch.bool else whole.to(dtype)


def expected(op: str, ranks: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return mathematics([values(rank, numel, dtype) for rank in range(ranks)], op)


def assert_same(got: torch.Tensor, want: torch.Tensor, op: str = "") -> None:
    if op == "AVG" and (got.dtype.is_floating_point or got.dtype.is_complex):
        wide = torch.complex128 if got.dtype.is_complex else torch.float64
        near = torch.finfo(got.dtype).eps
        assert torch.allclose(got.to(wide), want.to(wide), rtol=near, atol=0)
        return
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize(("dtype", "op"), REDUCIBLE, ids=lambda x: str(x).removeprefix("torch."))
def test_every_dtype_and_op(node, comm, dtype, op):
    for numel in (1, 1001, (1 << 20) // dtype.itemsize + 5):
        send = values(comm.rank, numel, dtype)
        recv = torch.empty_like(send)
        want = expected(op, comm.size, numel, dtype)
        node.all_reduce(send, recv, getattr(ReduceOp, op))
        assert_same(recv, want, op)
        node.all_reduce(send, send, getattr(ReduceOp, op))
        assert_same(send, recv)
    blocks = values(comm.rank, 257 * comm.size, dtype)
    part = torch.empty(257, dtype=dtype)
    node.reduce_scatter_single(blocks, part, getattr(ReduceOp, op))
    want = expected(op, comm.size, 257 * comm.size, dtype)
    assert_same(part, want[257 * comm.rank : 257 * (comm.rank + 1)], op)
    shares = TensorList([each.clone() for each in blocks.split(257)], dtype)
    again = torch.empty(257, dtype=dtype)
    node.reduce_scatter_single(shares, again, getattr(ReduceOp, op))
    assert_same(again, part)


@settings(max_examples=20, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    numel=st.one_of(st.sampled_from(EDGES), st.integers(1, 1 << 20)),
    in_place=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
)
def test_all_reduce_at_every_edge(node, comm, numel, in_place, dtype):
    send = values(comm.rank, numel, dtype)
    recv = send if in_place else torch.full_like(send, 3)
    node.all_reduce(send, recv, ReduceOp.SUM)
    assert_same(recv, expected("SUM", comm.size, numel, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rank_that_comes_late(node, comm, dtype):
    """The others wait for its part, where an earlier call's still lies."""
    numel = 4 * window.SLOT_BYTES // dtype.itemsize
    for late in range(comm.size):
        send = torch.full((numel,), float(late + 1), dtype=dtype)
        if comm.rank == late:
            time.sleep(0.05)
        node.all_reduce(send, send, ReduceOp.SUM)
        assert (send == (late + 1) * comm.size).all()


@settings(max_examples=12, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    numel=st.one_of(st.sampled_from(EDGES[:-10]), st.integers(1, 1 << 18)),
    root=st.integers(0, 100),
    dtype=st.sampled_from([torch.float32, torch.complex64, torch.int8]),
)
def test_moves_at_every_edge(node, comm, numel, root, dtype):
    size, rank, root = comm.size, comm.rank, root % comm.size
    tensor = values(rank, numel, dtype)
    node.broadcast(tensor, root)
    assert_same(tensor, values(root, numel, dtype))
    gathered = torch.empty(numel * size, dtype=dtype)
    node.all_gather_single(values(rank, numel, dtype), gathered)
    assert_same(gathered, torch.cat([values(r, numel, dtype) for r in range(size)]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numel", [1000, 400_000])
def test_half_types_round_once(node, comm, dtype, numel):
    send = torch.randn(comm.size, numel, generator=torch.Generator().manual_seed(SEED)).to(dtype)
    recv = torch.empty(numel, dtype=dtype)
    with torch.autocast("cpu", dtype=dtype):  # of the program around it; it must not choose the dtype of our sums
        node.all_reduce(send[comm.rank].clone(), recv, ReduceOp.SUM)
    exact = send.double().sum(0)
    # rounded once from a float32 sum: half a unit in the last place, and float32's own error
    bound = exact.abs() * torch.finfo(dtype).eps / 2 + send.double().abs().sum(0) * 1e-6
    assert ((recv.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("numel", [64, 300_000])
def test_nan_is_not_lost(node, comm, op, numel):
    send = torch.zeros(numel)
    send[comm.rank] = float("nan")
    recv = torch.empty_like(send)
    node.all_reduce(send, recv, op)
    assert recv[: comm.size].isnan().all()
    assert not recv[comm.size :].isnan().any()


def random_calls(shared, comm, count, lengths):
    """Make calls in an order that chance gives, and check each; every rank calls."""
    chance, size, rank = random.Random(SEED), comm.size, comm.rank
    for _ in range(count):
        numel, what, root = chance.choice(lengths), chance.randrange(4), chance.randrange(size)
        dtype = chance.choice([torch.float32, torch.bfloat16])  # their parts lie in the window in different ways
        if chance.random() < 0.1 and rank == chance.randrange(5):
            time.sleep(0.002)
        mine = slice(rank * numel, (rank + 1) * numel)
        if what == 0:
            tensor = values(rank, numel, dtype)
            shared.all_reduce(tensor, tensor, ReduceOp.SUM)
            assert_same(tensor, expected("SUM", size, numel, dtype))
        elif what == 1:
            tensor = values(rank, numel, dtype)
            shared.broadcast(tensor, root)
            assert_same(tensor, values(root, numel, dtype))
        elif what == 2:
            tensor = torch.empty(numel * size, dtype=dtype)
            shared.all_gather_single(values(rank, numel, dtype), tensor)
            assert_same(tensor[root * numel : (root + 1) * numel], values(root, numel, dtype))
        else:
            tensor = torch.empty(numel, dtype=dtype)
            shared.reduce_scatter_single(values(rank, numel * size, dtype), tensor, ReduceOp.SUM)
            assert_same(tensor, expected("SUM", size, numel * size, dtype)[mine])


def test_random_interleavings(node, comm):
    random_calls(node, comm, 200, [1, 5, 1000, 30_000, 70_000, 300_000])


def late(wait):
    def wait_and_sleep(*given):
        wait(*given)
        time.sleep(0.01)

    return wait_and_sleep


@pytest.mark.parametrize("numel", [1000, 300_000])
@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single", "mixed"])
def test_nothing_is_overwritten_that_a_slow_peer_still_reads(node, comm, monkeypatch, call, numel):
    size, rank = comm.size, comm.rank
    if rank == size - 1:
        for name in ("wait", "wait_for"):  # what was waited for is read later than anybody expects
            monkeypatch.setattr(node.window, name, late(getattr(node.window, name)))
    for value in range(2 * window.SLOTS):
        mine = torch.full((numel,), float(value + rank))
        total = torch.full((numel,), float(sum(value + each for each in range(size))))
        for _ in range(window.SLOTS if call == "mixed" else 0):  # whose root waits for nobody
            one = mine.clone()
            node.broadcast(one, 0)
            assert_same(one, torch.full((numel,), float(value)))
        if call in ("all_reduce", "mixed"):
            node.all_reduce(mine, mine, ReduceOp.SUM)
            assert_same(mine, total)
        elif call == "broadcast":
            node.broadcast(mine, 0)
            assert_same(mine, torch.full((numel,), float(value)))
        elif call == "all_gather_single":
            everything = torch.empty(size * numel)
            node.all_gather_single(mine, everything)
            assert_same(everything, torch.cat([torch.full((numel,), float(value + each)) for each in range(size)]))
        else:
            share = torch.empty(numel)
            node.reduce_scatter_single(mine.repeat(size), share, ReduceOp.SUM)
            assert_same(share, total)


def test_more_threads_than_cores_are_warned_of(comm):
    cores = len(set().union(*comm.allgather(os.sched_getaffinity(0))))
    threads = torch.get_num_threads()
    torch.set_num_threads(cores // comm.size + 2)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            node_shared(comm).close()
    finally:
        torch.set_num_threads(threads)
    said = [str(each.message) for each in caught if each.category is RuntimeWarning]
    assert len(said) == (comm.rank == 0), said
    if said:
        assert f"export OMP_NUM_THREADS={max(1, cores // comm.size)}" in said[0]


def test_no_room_in_dev_shm_is_found_before_anybody_writes(comm, monkeypatch, memory_files):
    """It was found by the rank that wrote to it, which died of SIGBUS."""

    def full(descriptor, nbytes):
        raise OSError(28, "No space left on device")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(memory_file, "reserve", full)
        monkeypatch.setattr(memory_file, "free_bytes", lambda: 7)
    with pytest.raises(RuntimeError, match=r"has 7 bytes free, and \d+ are needed"):
        node_shared(comm)
    assert memory_files
    assert not any(path.exists() for path in memory_files)


def test_the_memory_of_a_window_is_taken_when_it_is_made(comm, monkeypatch):
    """A second group's window must not be promised the room that the first one has not used yet."""
    made, create = [], memory_file.create

    def note(nbytes):
        descriptor, name = create(nbytes)
        made.append((os.dup(descriptor), nbytes))
        return descriptor, name

    monkeypatch.setattr(memory_file, "create", note)
    node_shared(comm).close()
    ((descriptor, nbytes),) = made
    assert os.fstat(descriptor).st_blocks * 512 >= nbytes
    os.close(descriptor)


@pytest.mark.skipif(os.environ.get("HPCDIST_TEST_BACKEND", "mpi") != "mpi", reason="MPI's memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [10, 1 << 20])
def test_ranks_in_inference_mode_and_outside(dtype, elements, rank, size):
    group = dist.new_group()  # whose memory the first call makes
    with torch.inference_mode(rank == 0):
        ones = torch.ones(elements, dtype=dtype)
        dist.all_reduce(ones, op=dist.ReduceOp.AVG, group=group)
    dist.all_reduce(ones, group=group)  # on rank 0 outside the mode in which the tensor was made
    assert bool((ones == size).all())
    for index in range(3):
        values = torch.full((elements,), float(index + 1), dtype=dtype)
        dist.all_reduce(values, op=dist.ReduceOp.AVG, group=group)
        assert bool((values == index + 1).all())
        several = [values.clone() for _ in range(3)]
        dist.all_reduce_coalesced(several, op=dist.ReduceOp.AVG, group=group)
        assert all(bool((each == index + 1).all()) for each in several)
    dist.destroy_process_group(group)
