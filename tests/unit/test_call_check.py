"""The comparison of calls, on threads in place of ranks and a library that notices when calls differ or never end."""

import mmap
import random
import sys
import threading
import time
from contextlib import nullcontext
from itertools import combinations

import pytest
import torch
from torch.distributed import ReduceOp

pytest.importorskip("mpi4py")

from hpcdist.backends.mpi.call_check import CallCheck
from hpcdist.backends.mpi.node.call_board import RING, CallBoard, bytes_of
from hpcdist.core.call import Call
from hpcdist.core.call_log import CallLog
from hpcdist.core.call_words import COUNTED, NUMBER, SIZES, STOP, DecodedCall, is_wide, kind_word, read, with_size
from hpcdist.core.errors import CallsDifferError
from hpcdist.core.table import ALL_REDUCE, ALL_TO_ALL_SINGLE, BARRIER, BROADCAST, EXCHANGES, GATHER

SECONDS = 20


class Communicator:
    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def is_revoked(self):
        return False

    def poll(self):
        pass

    def translating(self, call):
        return nullcontext()


class Library:
    """Calls of all ranks; a root of broadcast and a leaf of gather wait for nobody."""

    def __init__(self, size):
        self.made = [[] for _ in range(size)]
        self.condition = threading.Condition()

    def make(self, rank, call):
        key = key_of(call, len(self.made))
        with self.condition:
            self.made[rank].append(key)
            at = len(self.made[rank]) - 1
            self.condition.notify_all()
            peers = range(len(self.made))
            if call.row is BROADCAST:
                peers = [] if rank == call.root else [call.root]
            elif call.row is GATHER and rank != call.root:
                peers = []
            assert self.condition.wait_for(lambda: all(len(self.made[p]) > at for p in peers), SECONDS)
        assert all(do_match(rank, key, peer, self.made[peer][at]) for peer in peers)


def key_of(call, size):
    """Return the name of a call, and what must be equal on all ranks; the shares of an exchange in its place."""
    tensor = call.tensor
    if call.row in EXCHANGES:
        sent, received = call.counts or ([tensor.numel() // size] * size,) * 2
        return "exchange", tuple(sent), tuple(received)
    return call.row.name, None if tensor is None else tensor.numel(), call.root


def do_match(one, key, other, other_key):
    """Tell whether the calls of two ranks match."""
    if key[0] == other_key[0] == "exchange":
        return key[1][other] == other_key[2][one] and key[2][other] == other_key[1][one]
    return key == other_key


def programs(rng, size):
    """Return for some rounds the calls of each rank, of which one or two differ or miss one."""
    for _ in range(rng.choice([1, 3])):
        common = [drawn(rng, size) for _ in range(rng.choice([2, 5, 140]))]
        odd = rng.sample(range(size), rng.choice([1, 1, 2]) if size > 2 else 1)
        spot = rng.randrange(len(common))
        ranks = [[*common, (ALL_REDUCE, 9, 0)] for _ in range(size)]
        for rank in odd:
            row, length, _ = common[spot]
            other = drawn(rng, size)
            if row is ALL_TO_ALL_SINGLE:
                other = row, length, (rank + rng.randrange(1, size)) % size
            ranks[rank][spot : spot + 1] = [] if rng.random() < 0.3 else [other]
        yield ranks


def drawn(rng, size):
    row = rng.choice([ALL_REDUCE, BROADCAST, BROADCAST, BARRIER, GATHER, ALL_TO_ALL_SINGLE, ALL_TO_ALL_SINGLE])
    return row, 0 if row is BARRIER else rng.randrange(1, 5), rng.randrange(size) if row.rooted else None


def exchange(rank, size, length, more_to):
    """Return an exchange of equal shares, but for one rank to which this one sends more."""
    sent, received = [length] * size, [length] * size
    if more_to is not None:
        sent[more_to] += 1
        received[rank] = sent[rank]
    return Call(
        ALL_TO_ALL_SINGLE, torch.zeros(sum(sent)), torch.zeros(sum(received)), None, None,
        None if more_to is None else (sent, received),
    )  # fmt: skip


def make(check, rank, size, row, length, root):
    if row is BARRIER:
        check.run(Call(BARRIER), kind_word(BARRIER.name))
        return
    if row is ALL_TO_ALL_SINGLE:
        check.run(exchange(rank, size, length, root), kind_word(row.name, torch.float32))
        return
    tensor, op = torch.zeros(length), ReduceOp.SUM if row.reduces else None
    output = tensor if row is not GATHER else torch.zeros(size * length) if rank == root else None
    call = Call(row, tensor, output, op, root if row.rooted else None)
    check.run(call, kind_word(row.name, tensor.dtype, op))


@pytest.fixture(autouse=True)
def _many_switches_of_threads():
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    yield
    sys.setswitchinterval(before)


class SlowCheck(CallCheck):
    """A rank that loses its core after it has seen a difference, before it says so."""

    def fail(self, number, make):
        time.sleep(random.choice([0, 0.005]))
        super().fail(number, make)


def run_rounds(size, rounds, pause, kind=CallCheck):
    """Make the calls of each round on threads in place of ranks, and check that all raise if calls differ.

    Args:
        size: how many ranks.
        rounds: by round and rank, calls as ``make`` takes them.
        pause: returns how many seconds a rank waits before a call; it takes the rank and the call's row.
        kind: the class of the check.
    """
    memory, library = mmap.mmap(-1, bytes_of(size, size)), Library(size)
    raised = [[] for _ in range(size)]
    gate = threading.Barrier(size, timeout=SECONDS)

    def run(rank):
        check = kind(Communicator(rank, size), lambda call: library.make(rank, call), None, True)
        check.is_open, check.board = True, CallBoard(memory, list(range(size)), rank, size)
        for ranks in rounds:
            failure = None
            try:
                for call in ranks[rank]:
                    if seconds := pause(rank, call[0]):
                        time.sleep(seconds)
                    make(check, rank, size, *call)
            except CallsDifferError as error:
                failure = error
            raised[rank].append(failure)
            gate.wait()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * SECONDS)
    differs = [len({tuple(map(str, calls)) for calls in ranks}) > 1 for ranks in rounds]
    assert [[failure is not None for failure in each] for each in raised] == [differs] * size
    for calls in zip(*library.made, strict=True):
        assert all(do_match(one, calls[one], other, calls[other]) for one, other in combinations(range(size), 2))


@pytest.mark.parametrize("seed", range(40))
def test_every_rank_raises_and_the_library_sees_equal_calls(seed):
    rng = random.Random(seed)
    size = rng.choice([2, 3, 4, 12])
    rounds = list(programs(rng, size))
    picks = [random.Random(size * seed + rank) for rank in range(size)]
    run_rounds(size, rounds, lambda rank, _: picks[rank].random() * 0.002 if picks[rank].random() < 0.1 else 0)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_see_a_difference_late(seed):
    """Of exchanges that do not fit between some ranks, each rank knows the same ones that are in the library."""
    rng = random.Random(seed)
    size, rounds = rng.choice([3, 4, 5]), []
    for _ in range(8):
        length = rng.randrange(1, 5)
        ranks = [[(ALL_TO_ALL_SINGLE, length, None), (ALL_REDUCE, 9, 0)] for _ in range(size)]
        for rank in rng.sample(range(size), rng.choice([1, 2, 3])):
            ranks[rank][0] = ALL_TO_ALL_SINGLE, length, (rank + rng.randrange(1, size)) % size
        rounds.append(ranks)
    run_rounds(size, rounds, lambda rank, row: 0.003 * (row is ALL_TO_ALL_SINGLE and rank > 0), SlowCheck)


def test_the_call_that_differs_stays_readable_for_other_nodes():
    """The rank that decides stops the calls after it, and is named beside the other."""
    memory = mmap.mmap(-1, bytes_of(2, 3))
    boards = [CallBoard(memory, [0, 1], rank, 3) for rank in range(2)]
    check = CallCheck(Communicator(0, 3), lambda call: None, None, True)
    check.is_open, check.board = True, boards[0]
    check.log = CallLog("", 0, [[0, 1], [2]], boards[0].whats[0], boards[0].sizes[0], check._last)
    base, tensor = kind_word(ALL_REDUCE.name, torch.float32, ReduceOp.SUM), torch.ones(3)
    boards[1].whats[1][1] = with_size(base, 4) + 1
    boards[1].failing[1] = 1  # it has seen that they differ
    with pytest.raises(CallsDifferError, match=r"rank 0: all_reduce of 3 elements.*rank 1: all_reduce of 4 elements"):
        check.run(Call(ALL_REDUCE, tensor, tensor, ReduceOp.SUM), base)
    assert boards[1].said(0, 1).size == 3
    assert boards[1].said(0, 2).name == STOP


def test_a_call_that_its_rank_has_left_is_named_and_fits_no_other():
    memory, base = mmap.mmap(-1, bytes_of(2, 2)), kind_word(ALL_REDUCE.name, torch.float32, ReduceOp.SUM)
    boards = [CallBoard(memory, [0, 1], rank, 2) for rank in range(2)]
    for rank, board in enumerate(boards):
        board.whats[rank][5] = with_size(base, 3) + 5
    assert boards[1].fit(0, 1, 5)
    boards[0].withdraw(5)
    said = boards[1].said(0, 5)
    assert str(said) == "all_reduce of 3 elements, float32, SUM, which an exception has ended in its middle"
    assert boards[1].has(0, 5)
    assert [boards[1].takes_part(rank, 5) for rank in range(2)] == [False, True]
    assert not boards[1].fit(0, 1, 5)


def test_a_rank_takes_no_part_in_a_call_that_its_maker_has_left_since_the_decision():
    """Rank 0 is in the call, rank 1 decides, rank 0 leaves it, and rank 2 comes: nobody would end a call of rank 2."""
    memory, base, made = mmap.mmap(-1, bytes_of(3, 3)), kind_word(ALL_REDUCE.name, torch.float32, ReduceOp.SUM), []
    boards = [CallBoard(memory, [0, 1, 2], rank, 3) for rank in range(3)]
    boards[0].whats[0][1] = with_size(base, 3) + 1
    boards[1].whats[1][1] = with_size(base, 4) + 1
    boards[1].decide(1, 1, [1, 0, 0])
    boards[0].withdraw(1)
    for length in (3, 5):  # the call of rank 0, and another
        check = CallCheck(Communicator(2, 3), made.append, None, True)
        check.is_open, check.board, tensor = True, boards[2], torch.ones(length)
        with pytest.raises(CallsDifferError, match=r"rank 0: all_reduce of 3 .* has ended in its middle"):
            check.run(Call(ALL_REDUCE, tensor, tensor, ReduceOp.SUM), base)
    assert made == []


def test_an_old_word_is_no_call_with_its_number_modulo_2_to_the_16():
    """Rank 0 comes first to each difference, so that it decides about none and keeps words until the numbers recur."""
    right, wrong = (ALL_REDUCE, 1, 0), (ALL_REDUCE, 2, 0)
    rounds = [[[right] * RING] * 2, *[[[right], [wrong]]] * (2**16 // (RING + 2)), [[(BARRIER, 0, 0)] * RING] * 2]
    run_rounds(2, rounds, lambda rank, row: 0.001 * (rank == (row is ALL_REDUCE)))


@pytest.mark.parametrize("size", [0, SIZES - 1, SIZES, COUNTED, COUNTED + 7, -1, -5])
@pytest.mark.parametrize("number", [0, 1, 2**16 - 1, 2**16 + 3])
def test_words_say_the_call(size, number):
    for row, op, root in ((ALL_REDUCE, ReduceOp.MAX, None), (BROADCAST, None, 2**15 - 1), (GATHER, None, 0)):
        word = with_size(kind_word(row.name, torch.float16, op, root), size) + (number & NUMBER)
        assert 0 <= word < 2**63
        assert read(word, size) == DecodedCall(
            row.name, torch.float16, "MAX" if op is not None else "", root or 0, size
        )
        assert (read(word, -99).size == size) is not is_wide(word)
