"""Collectives of ranks on several nodes, which are imitated by node keys: every row, dtype, op and layout."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import ReduceOp

pytest.importorskip("mpi4py")

from hpcdist.backends.mpi.node import arithmetic, collectives, window
from hpcdist.backends.mpi.node.collectives import NodeShared
from hpcdist.backends.mpi.node.places import locate
from hpcdist.backends.mpi.process import ulfm
from tests.mpi.test_shared_memory import REDUCIBLE, assert_same, expected, random_calls, values

SEED = 22
HALF_TYPES = [torch.float16, torch.bfloat16]
# numbers of elements: none for some owners, odd, several chunks, and pieces of odd length
LENGTHS = (1, 1001, 700_001)


def node_of(layout: str, rank: int, ranks: int) -> str:
    """Return the node of a rank in an imitation of several nodes."""
    halves = ranks // 2
    return {"halves": str(rank // halves), "interleaved": str(rank % halves), "each alone": str(rank)}[layout]


def between(every, layout: str, poll=lambda: None) -> NodeShared:
    """Make what the ranks of an imitation of several nodes need; every rank calls."""
    if every.size % 2 and layout != "each alone":
        pytest.skip("an odd number of ranks is not divided evenly")
    places = locate(every, [], node_of(layout, every.rank, every.size))
    if places.nodes == 1:
        places.node.Free()
        pytest.skip("these ranks are on one node")
    return NodeShared(places, SimpleNamespace(derived=[], poll=poll, is_background=bool))


@pytest.fixture(params=["halves", "interleaved", "each alone"], scope="module")
def several(request, every):
    with pytest.MonkeyPatch.context() as patch:  # several pieces, each added up in several blocks
        patch.setattr(collectives, "PIECE_BYTES", 1 << 20)
        patch.setattr(arithmetic, "FOLD_BYTES", 10_000)
        made = between(every, request.param)
        yield made
        made.close()


@pytest.fixture
def sharing(several):
    """Nodes of several ranks, which have moving collectives too."""
    if several.places.is_flat:
        pytest.skip("nodes of one rank have reductions only")
    return several


def reduce_all_rows(several: NodeShared, rank: int, size: int, dtype: torch.dtype, op: str) -> None:
    """Check all_reduce in place and not, and reduce_scatter."""
    reduce_op = getattr(ReduceOp, op)
    for numel in LENGTHS:
        send = values(rank, numel, dtype)
        recv = torch.empty_like(send)
        several.all_reduce(send, recv, reduce_op)
        assert_same(recv, expected(op, size, numel, dtype), op)
        several.all_reduce(send, send, reduce_op)
        assert_same(send, recv)
    for numel in (1, 257, 150_001):
        part = torch.empty(numel, dtype=dtype)
        several.reduce_scatter_single(values(rank, numel * size, dtype), part, reduce_op)
        want = expected(op, size, numel * size, dtype)[numel * rank : numel * (rank + 1)]
        assert_same(part, want, op)


@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX", "PRODUCT"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint16, torch.bool])
def test_reductions(several, every, dtype, op):
    if (dtype, op) not in REDUCIBLE:
        pytest.skip("no meaning")
    reduce_all_rows(several, every.rank, every.size, dtype, op)


@pytest.mark.parametrize(("dtype", "op"), REDUCIBLE, ids=lambda x: str(x).removeprefix("torch."))
def test_every_dtype_and_op(several, every, dtype, op):
    tensor = values(every.rank, 1001, dtype)
    several.all_reduce(tensor, tensor, getattr(ReduceOp, op))
    assert_same(tensor, expected(op, every.size, 1001, dtype), op)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int8, torch.bool])
def test_moves(sharing, every, dtype):
    size, rank = every.size, every.rank
    for numel in (1, 33, 1001, 300_001):
        for root in range(size):
            tensor = values(rank, numel, dtype)
            sharing.broadcast(tensor, root)
            assert_same(tensor, values(root, numel, dtype))
        gathered = torch.empty(numel * size, dtype=dtype)
        sharing.all_gather_single(values(rank, numel, dtype), gathered)
        want = torch.cat([values(r, numel, dtype) for r in range(size)])
        assert_same(gathered, want)
        mine = gathered[rank * numel : (rank + 1) * numel]
        sharing.all_gather_single(mine, gathered)  # in place
        assert_same(gathered, want)


def test_more_than_fits_at_once(sharing, every):
    """More pieces than one, and chunks than there are slots."""
    size, rank = every.size, every.rank
    numel = 7 * window.CHUNK_BYTES // 4 * 2 + 5
    tensor = values(rank, numel, torch.float32)
    sharing.all_reduce(tensor, tensor, ReduceOp.SUM)
    assert_same(tensor, expected("SUM", size, numel, torch.float32))
    part = torch.empty(numel)
    sharing.reduce_scatter_single(values(rank, numel * size, torch.float32), part, ReduceOp.SUM)
    assert_same(part, expected("SUM", size, numel * size, torch.float32)[numel * rank : numel * (rank + 1)])
    sharing.broadcast(tensor, size - 1)
    gathered = torch.empty(numel * size)
    sharing.all_gather_single(values(rank, numel, torch.float32), gathered)
    assert_same(gathered[-numel:], values(size - 1, numel, torch.float32))


def test_nan_is_not_lost(several, every):
    send = torch.zeros(1000)
    send[every.rank] = float("nan")
    several.all_reduce(send, send, ReduceOp.MAX)
    assert send[: every.size].isnan().all()
    assert not send[every.size :].isnan().any()


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("numel", [1000, 400_000])
def test_half_types_round_once_a_level(several, every, dtype, numel):
    """A node's sum is rounded, and the sum of the nodes' sums; only the latter if each rank has its own."""
    size, rank = every.size, every.rank
    every_send = torch.randn(size, numel, generator=torch.Generator().manual_seed(SEED)).to(dtype)
    exact, eps = every_send.double().sum(0), torch.finfo(dtype).eps
    tiny = every_send.double().abs().sum(0) * 1e-6 + torch.finfo(dtype).smallest_normal * eps * size
    in_nodes = torch.zeros(numel, dtype=torch.float64)
    if not several.places.is_flat:
        in_nodes = sum(every_send[ranks].double().sum(0).abs() for ranks in several.places.ranks) * eps / 2
    bound = exact.abs() * eps / 2 + in_nodes * (1 + eps) + tiny
    recv = torch.empty(numel, dtype=dtype)
    several.all_reduce(every_send[rank].clone(), recv, ReduceOp.SUM)
    assert ((recv.double() - exact).abs() <= bound).all()
    assert every.bcast(recv.view(torch.uint8).numpy().tobytes()) == recv.view(torch.uint8).numpy().tobytes()
    part = torch.empty(numel // size, dtype=dtype)
    whole = every_send[rank, : part.numel() * size].clone()
    several.reduce_scatter_single(whole, part, ReduceOp.AVG)
    mine = slice(part.numel() * rank, part.numel() * (rank + 1))
    assert ((part.double() - exact[mine] / size).abs() <= bound[mine] / size + tiny[mine]).all()


def test_averages_of_float16_do_not_overflow(several, every):
    tensor = torch.full((1000,), 60000.0, dtype=torch.float16)
    several.all_reduce(tensor, tensor, ReduceOp.AVG)
    assert (tensor == 60000).all()


def test_two_runs_of_one_program_give_the_same_bits_on_all_ranks(every):
    """Also if the ranks come at other times."""
    bits = []
    for run in range(2):
        several = between(every, "halves" if every.size % 2 == 0 else "each alone")
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.randn(300_000, generator=torch.Generator().manual_seed(SEED + every.rank)).to(dtype)
            if every.rank == run:
                time.sleep(0.05)
            several.all_reduce(tensor, tensor, ReduceOp.SUM)
            bits.append(tensor.view(torch.uint8).numpy().tobytes())
        several.close()
    assert bits[:2] == bits[2:]
    assert bits == every.bcast(bits)


def test_random_interleavings(sharing, every):
    random_calls(sharing, every, 100, [1, 5, 1000, 30_000, 200_000])


class GivenUp(Exception):
    pass


def give_up():
    raise GivenUp


@pytest.mark.parametrize("row", ["all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single"])
def test_poll_leaves_a_wait_in_the_window(every, row):
    """Rank 0 comes without the other rank of its node: what poll raises must end its wait."""
    if every.size != 4:
        pytest.skip("four ranks show it")
    several = between(every, "halves", give_up if every.rank == 0 else lambda: None)
    if every.rank == 0:
        send, recv = torch.ones(600_000), torch.empty(300_000)
        calls = {
            "all_reduce": lambda: several.all_reduce(send, send, ReduceOp.SUM),
            "broadcast": lambda: several.broadcast(send, 1),
            "all_gather_single": lambda: several.window.collect(
                *collectives.places_of(send.split(300_000)), window.CHUNK_BYTES
            ),
            "reduce_scatter_single": lambda: several.reduce_scatter_single(torch.ones(1_200_000), recv, ReduceOp.SUM),
        }
        with pytest.raises(GivenUp):
            calls[row]()
    every.Barrier()
    several.close()


def test_a_call_of_mpi_that_is_left_keeps_its_memory(every, monkeypatch):
    """Under ULFM a wait polls too; MPI still writes to the memory of a call that was left."""
    monkeypatch.setattr(ulfm, "is_tolerant", lambda: True)
    monkeypatch.setattr(ulfm, "UNFINISHED", [])
    several = between(every, "each alone", give_up if every.rank == 0 else lambda: None)
    tensor = torch.ones(8)
    if every.rank == 0:
        with pytest.raises(GivenUp):
            several.all_reduce(tensor, tensor, ReduceOp.SUM)
        ((request, _),) = ulfm.UNFINISHED
        request.Wait()
    else:
        several.all_reduce(tensor, tensor, ReduceOp.SUM)
        assert ulfm.UNFINISHED == []
    assert (tensor == every.size).all()
    several.close()
