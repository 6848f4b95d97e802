"""Collectives of ranks on several nodes, which are real or imitated by node keys: every row, dtype, op and layout."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from torch.distributed import ReduceOp

pytest.importorskip("mpi4py")
from mpi4py import MPI

import hpcdist as dist
from hpcdist.backends.mpi.node import internode, messages, two_level
from hpcdist.backends.mpi.node.places import locate
from hpcdist.backends.mpi.node.thresholds import Network
from hpcdist.backends.mpi.node.two_level import TwoLevel
from tests.mpi.test_shared_memory import REDUCIBLE, assert_same, expected, random_calls, values

SEED = 22
HALF_TYPES = [torch.float16, torch.bfloat16]
# numbers of elements: none for some owners, odd, several chunks, and pieces of odd length
LENGTHS = (1, 1001, 700_001)


def layouts(ranks: int) -> dict[str, list[str]]:
    """Return ways to imitate several nodes: the node of each rank."""
    return {
        "pairs": [str(r // 2) for r in range(ranks)],
        "one alone": ["a"] * (ranks - 1) + ["b"],
        "interleaved": [str(r % 2) for r in range(ranks)],
        "each alone": [str(r) for r in range(ranks)],
    }


LAYOUTS = ["pairs", "one alone", "interleaved", "each alone", "each alone, fast network"]


@pytest.fixture(params=LAYOUTS, scope="module")
def several(request, every):
    layout, _, is_fast = request.param.partition(", ")
    made = []
    places = locate(every, made, layouts(every.size)[layout][every.rank])
    if places.nodes == 1:
        pytest.skip("these ranks are on one node")
    with pytest.MonkeyPatch.context() as patch:
        if is_fast:  # messages that are long for these tensors: several pieces, each added up in blocks
            patch.setattr(two_level, "LONG", messages.LONG._replace(turn=64 << 10, message=64 << 10))
            patch.setattr(internode, "FOLD_BYTES", 10_000)
        network = Network.FAST if is_fast else Network.UNKNOWN
        two = TwoLevel(places, made, lambda: None, lambda: False, network)
        yield two
        two.close()


@pytest.fixture(params=["MPI", "messages for large shares"])
def many(request, every, monkeypatch):
    """Many nodes, across which MPI reduces all slices or the small ones; of two ranks and of one."""
    monkeypatch.setattr(two_level, "FEW_NODES", 1)
    if request.param == "MPI":
        monkeypatch.setattr(two_level, "MOST_NODES", 1)
    monkeypatch.setattr(two_level, "LEAST_SHARE", 64)
    places = locate(every, [], layouts(every.size)["one alone"][every.rank])
    two = TwoLevel(places, [], lambda: None, lambda: False)
    yield two
    two.close()


def reduce_all_rows(two: TwoLevel, rank: int, size: int, dtype: torch.dtype, op: str) -> None:
    """Check all_reduce in place and not, and reduce_scatter."""
    reduce_op = getattr(ReduceOp, op)
    for numel in LENGTHS:
        send = values(rank, numel, dtype)
        recv = torch.empty_like(send)
        two.all_reduce(send, recv, reduce_op)
        assert_same(recv, expected(op, size, numel, dtype), op)
        two.all_reduce(send, send, reduce_op)
        assert_same(send, recv)
    for numel in (1, 257, 150_001):
        part = torch.empty(numel, dtype=dtype)
        two.reduce_scatter_single(values(rank, numel * size, dtype), part, reduce_op)
        want = expected(op, size, numel * size, dtype)[numel * rank : numel * (rank + 1)]
        assert_same(part, want, op)


@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX", "PRODUCT"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint16, torch.bool])
def test_reductions(several, every, dtype, op):
    if (dtype, op) not in REDUCIBLE:
        pytest.skip("no meaning")
    reduce_all_rows(several, every.rank, every.size, dtype, op)


@pytest.mark.parametrize(("dtype", "op"), REDUCIBLE, ids=lambda x: str(x).removeprefix("torch."))
def test_reductions_across_many_nodes(many, every, dtype, op):
    for numel in LENGTHS[:2]:
        tensor = values(every.rank, numel, dtype)
        many.all_reduce(tensor, tensor, getattr(ReduceOp, op))
        assert_same(tensor, expected(op, every.size, numel, dtype), op)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int8, torch.bool])
def test_moves(several, every, dtype):
    size, rank = every.size, every.rank
    for numel in (1, 33, 1001, 300_001):
        for root in range(size):
            tensor = values(rank, numel, dtype)
            several.broadcast(tensor, root)
            assert_same(tensor, values(root, numel, dtype))
        gathered = torch.empty(numel * size, dtype=dtype)
        several.all_gather_single(values(rank, numel, dtype), gathered)
        want = torch.cat([values(r, numel, dtype) for r in range(size)])
        assert_same(gathered, want)
        mine = gathered[rank * numel : (rank + 1) * numel]
        several.all_gather_single(mine, gathered)  # in place
        assert_same(gathered, want)


def test_more_than_fits_at_once(several, every):
    """More pieces than a rank is allowed to be ahead, and chunks than there are slots."""
    size, rank = every.size, every.rank
    numel = 3 * two_level.AHEAD * two_level.CHUNK_BYTES // 4 * 2 + 5
    tensor = values(rank, numel, torch.float32)
    several.all_reduce(tensor, tensor, ReduceOp.SUM)
    assert_same(tensor, expected("SUM", size, numel, torch.float32))
    part = torch.empty(numel)
    several.reduce_scatter_single(values(rank, numel * size, torch.float32), part, ReduceOp.SUM)
    assert_same(part, expected("SUM", size, numel * size, torch.float32)[numel * rank : numel * (rank + 1)])
    several.broadcast(tensor, size - 1)
    gathered = torch.empty(numel * size)
    several.all_gather_single(values(rank, numel, torch.float32), gathered)
    assert_same(gathered[-numel:], values(size - 1, numel, torch.float32))


def test_nan_is_not_lost(several, every):
    send = torch.zeros(1000)
    send[every.rank] = float("nan")
    several.all_reduce(send, send, ReduceOp.MAX)
    assert send[: every.size].isnan().all()
    assert not send[every.size :].isnan().any()


def test_nan_is_not_lost_across_many_nodes(many, every):
    test_nan_is_not_lost(many, every)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("numel", [1000, 400_000])
def test_half_types_round_once_a_level(several, every, dtype, numel):
    """A node's sum is rounded, and the sum of the nodes' sums; only the latter if each rank has its own."""
    size, rank = every.size, every.rank
    every_send = torch.randn(size, numel, generator=torch.Generator().manual_seed(SEED)).to(dtype)
    exact, eps = every_send.double().sum(0), torch.finfo(dtype).eps
    tiny = every_send.double().abs().sum(0) * 1e-6 + torch.finfo(dtype).smallest_normal * eps * size
    in_nodes = torch.zeros(numel, dtype=torch.float64)
    if not several._places.is_flat:
        in_nodes = sum(every_send[ranks].double().sum(0).abs() for ranks in several._places.ranks) * eps / 2
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


def test_all_ranks_hold_the_same_bits(several, every):
    for numel in (100, 300_000):
        tensor = torch.randn(numel, generator=torch.Generator().manual_seed(SEED + every.rank))
        several.all_reduce(tensor, tensor, ReduceOp.SUM)
        assert every.bcast(tensor.numpy().tobytes()) == tensor.numpy().tobytes()


def test_random_interleavings(several, every):
    random_calls(several, every, 100, [1, 5, 1000, 30_000, 200_000])


@pytest.mark.parametrize("row", ["all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single"])
def test_poll_leaves_a_call(several, every, row):
    """Rank 0 comes alone: what poll raises must end its wait. The others call when it has left, and take its place."""

    class GivenUp(Exception):
        pass

    def give_up():
        raise GivenUp

    if every.size > 2:
        pytest.skip("two ranks show it, and what is left behind is the two's")
    two = TwoLevel(locate(every, [], str(every.rank)), [], give_up if every.rank == 0 else lambda: None, lambda: False)
    before, inbox = len(messages.ABANDONED), two._inbox
    if every.rank == 0:
        send, recv = torch.ones(600_000), torch.empty(300_000)
        calls = {
            "all_reduce": lambda: two.all_reduce(send, send, ReduceOp.SUM),
            "broadcast": lambda: two.broadcast(send, 1),
            "all_gather_single": lambda: two.all_gather_single(recv, send),
            "reduce_scatter_single": lambda: two.reduce_scatter_single(send, recv, ReduceOp.SUM),
        }
        with pytest.raises(GivenUp):
            calls[row]()
        assert len(messages.ABANDONED) == before + 1
        assert two._inbox is not inbox  # MPI may still write to that one
    every.Barrier()
    # the communicator is left as a lost group's is: freeing it would wait for the messages


def test_a_message_that_nobody_has_received_is_not_taken(every):
    """As one of a freed communicator, whose context MPI has given to this one."""
    made, rank, size = [], every.rank, every.size
    two = TwoLevel(locate(every, made, str(rank)), made, lambda: None, lambda: False)
    stray = [bytearray(3), MPI.BYTE]
    sent = two._comm.Isend(stray, (rank + 1) % size, 0)
    for numel in (1, 100_000):
        tensor = torch.full((numel,), rank + 1.0)
        two.all_reduce(tensor, tensor, ReduceOp.SUM)
        assert (tensor == size * (size + 1) / 2).all()
    two._comm.Recv(stray, (rank - 1) % size, 0)
    sent.Wait()
    two.close()


def test_memory_of_messages_that_were_left_is_kept(every):
    """MPI still writes to it, as here after the call that it was for has raised."""

    reasons = ["interrupted"]

    def interrupt():
        for reason in reasons:
            raise dist.DistBackendError(reason)

    tensor = torch.zeros(8)
    if every.rank == 0:
        left = messages.Messages(every, interrupt)
        left.receive(1, tensor.data_ptr(), tensor.nbytes, lambda: None)
        with pytest.raises(dist.DistBackendError, match="interrupted"):
            left.wait(lambda: False)
        left.abandon([tensor])
        kept, of_tensor = len(messages.ABANDONED), weakref.ref(tensor)
        del left, tensor
        gc.collect()
        every.Barrier()
        assert of_tensor() is not None
        left, (tensor,) = messages.ABANDONED.pop(kept - 1)
        reasons.clear()
        left.finish()  # on a busy machine after more than one look at whether it was interrupted
        assert tensor.tolist() == [1.0] * 8
    else:
        every.Barrier()
        if every.rank == 1:
            every.Send(torch.ones(8).numpy(), 0, messages.TAG)


@pytest.mark.parametrize("slack", [0, 2 * messages.SHORT.ahead])
def test_turns_are_taken_in_order_and_not_too_far_ahead(every, slack):
    """A ring of three places: one is written again when it has been read, and a turn sent ``slack`` after another."""
    count, nbytes, empty = 24, 3 * messages.SHORT.message + 5, 5
    after, before = (every.rank + 1) % every.size, (every.rank - 1) % every.size
    outgoing = [torch.full((nbytes,), turn + 32 * every.rank, dtype=torch.uint8) for turn in range(count)]
    places = torch.zeros(3, nbytes, dtype=torch.uint8)
    read = []
    end = time.monotonic() + 60

    def poll():
        assert time.monotonic() < end, f"{turns.done} turns have come, {turns.left} have left"

    def sends(turn):
        assert turn - turns.done < messages.SHORT.ahead
        length = 0 if turn == empty else nbytes
        return [(after, outgoing[turn].data_ptr(), length)] if turn <= len(read) + slack else None

    def receives(turn):
        assert turn - turns.done < 2 * messages.SHORT.ahead
        length = 0 if turn == empty else nbytes
        return [(before, places[turn % 3].data_ptr(), length)] if turn < len(read) + 3 else None

    def then():
        while len(read) < turns.done:
            read.append(places[len(read) % 3].unique().tolist())

    call = messages.Messages(every, poll)
    turns = messages.Turns(call, messages.SHORT, count, sends, receives, then)
    turns.advance()
    assert (turns.left, turns.done) == (0, 0)
    call.wait(lambda: turns.done == count)
    call.finish()
    then()
    expected = [[turn + 32 * before] for turn in range(count)]
    expected[empty] = expected[empty - 3]
    assert read == expected
    assert turns.left == count
