"""The calls that ranks without a common board compare: sums, words, and who sends to whom."""

import random
from array import array

import pytest
import torch
from torch.distributed import ReduceOp

from hpcdist.core import hooks
from hpcdist.core.call import Call
from hpcdist.core.call_log import BLOCK, KEPT, CallLog, OwnCallLog
from hpcdist.core.call_words import ROOT, kind_word, with_size
from hpcdist.core.errors import CallsDifferError
from hpcdist.core.table import ALL_REDUCE, BARRIER, BROADCAST

RING = 2 * BLOCK
EXCHANGE = kind_word("all_to_all_single", torch.float32)


class Rank:
    """A rank that writes exchanges, told apart by a number in the place of a root."""

    def __init__(self, rank, nodes):
        self.words, self.sizes = memoryview(array("q", [0] * RING)), memoryview(array("q", [0] * RING))
        self.number = 0
        self.log = CallLog("g", rank, nodes, self.words, self.sizes, lambda: self.number)

    def call(self, which, size):
        number = self.number + 1
        if not number % BLOCK:
            self.log.turn(number)
        self.words[number % RING] = with_size(EXCHANGE + which * ROOT, size)
        self.sizes[number % RING] = size
        self.number = number

    def compare(self, other):
        return compare(self.log, other.log)


def compare(log, other):
    """As ``watch.call_exchange`` does."""
    if log.agrees(other.rank, other.place()):
        return None

    def fetch(block):
        return tuple(memoryview(each).cast("q").tolist() for each in other.words(block))

    return log.find(other.rank, other.starts(), fetch)


@pytest.fixture
def ranks():
    return [Rank(rank, [[0], [1]]) for rank in range(2)]


@pytest.mark.parametrize("calls", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
@pytest.mark.parametrize("ahead", [0, 1, BLOCK + 3])
def test_equal_calls_agree_and_the_first_other_one_is_named(ranks, calls, ahead):
    for number in range(1, calls + 1):
        for each in ranks:
            each.call(number % 5, 3)
    for number in range(ahead):
        ranks[1].call(number, 4)
    assert ranks[1].compare(ranks[0]) is None
    for number in range(ahead):
        ranks[0].call(number, 4)
    for size, each in zip((7, 8), ranks, strict=True):
        each.call(1, size)
        each.call(1, 2)
    first = r"rank 0: all_to_all_single of 7 elements a rank, float32; rank 1: all_to_all_single of 8 "
    for one, other in (ranks, ranks[::-1]):
        assert first in one.compare(other)
    ranks[0].log.close()
    assert first in ranks[1].compare(ranks[0])


def test_a_rank_that_is_behind_learns_nothing(ranks):
    ranks[1].call(1, 1)
    ranks[0].call(2, 1)
    ranks[0].call(2, 1)
    assert ranks[1].log.at(2) is None
    assert ranks[1].log.agrees(0, ranks[0].log.place())
    assert ranks[0].compare(ranks[1]) is not None


def test_shares_of_a_ranks_own_are_one_call_with_equal_ones(ranks):
    draw = random.Random(0)
    for number in range(10 * BLOCK):
        for each in ranks:
            each.call(3, -1 - each.log.rank if draw.random() < 0.5 else 5)
        if number % 17 == 0:
            assert ranks[0].compare(ranks[1]) is None
            assert ranks[1].compare(ranks[0]) is None
    for each in ranks:
        each.call(3, each.log.rank)
    assert "rank 0: all_to_all_single of 0 elements" in ranks[1].compare(ranks[0])


def test_words_that_are_kept_no_more(ranks):
    for each in ranks:
        each.call(each.log.rank, 0)
        for _ in range((KEPT + 5) * BLOCK):
            each.call(1, 1)
    assert "ranks 0 and 1 differ in one of the first" in ranks[0].compare(ranks[1])
    assert len(ranks[0].log.starts()) <= KEPT + 1


def test_who_speaks_to_whom():
    nodes = [list(range(3 * node, 3 * node + 3)) for node in range(300)]
    nodes[1] = [3]
    for rank in (0, 3, 6, 897, 899):
        log = Rank(rank, nodes).log
        assert len(log.neighbours()) == 2
        assert len(log.listeners()) <= 2 + 9  # the others of the node, and the nodes' logarithm
    assert Rank(1, nodes).log.neighbours() == [3, 898]
    assert Rank(1, [[0, 1], [2, 3]]).log.neighbours() == [3]
    told, new = {0}, [0]
    while new:
        new = [each for rank in new for each in Rank(rank, nodes).log.listeners() if each not in told]
        told.update(new)
        new = [each for each in set(new) if each in {node[0] for node in nodes}]
    assert told >= {rank for node in nodes for rank in node}


def test_a_failure_raises_at_each_check(ranks):
    log = ranks[0].log
    log.check()
    log.fail("first", True)
    log.fail("second", True)
    assert not log.was_raised
    for _ in range(2):
        with pytest.raises(CallsDifferError, match="first"):
            log.check()
    assert log.was_raised


@pytest.fixture
def own():
    return [OwnCallLog("g", rank, 3) for rank in range(3)]


def test_a_log_of_its_own_names_the_call_that_differs(own):
    values = torch.ones(5, dtype=torch.complex64)
    for _ in range(3 * BLOCK):
        for log in own:
            log.add_call(Call(BARRIER))
            log.add_call(Call(ALL_REDUCE, values, values, ReduceOp.SUM))
    assert compare(own[0], own[1]) is None
    for log in own:
        log.add_call(Call(BROADCAST, values, values, root=log.rank // 2))
        log.add(kind_word("barrier"), 0)
    assert compare(own[0], own[1]) is None
    for one, other in ((0, 2), (2, 0)):
        assert (
            "rank 0: broadcast of 10 elements, float32, root 0; rank 2: broadcast of 10 elements, float32, root 1"
            in (compare(own[one], own[other]))
        )


def test_the_end_of_a_group_is_its_last_call(own, monkeypatch):
    compared = []
    monkeypatch.setattr(hooks, "compare_calls", lambda log, seconds: compared.append(log))
    own[0].leave()
    own[0].leave()
    own[1].add_call(Call(BARRIER))
    assert compared == [own[0]]
    assert "rank 0: destroy_process_group; rank 1: barrier" in compare(own[1], own[0])
    own[1].fail("they differ", tells=False)
    with pytest.raises(CallsDifferError, match="they differ"):
        own[1].add_call(Call(BARRIER))
    own[1].leave()  # raised before
    own[2].fail("they differ", tells=False)
    with pytest.raises(CallsDifferError, match="they differ"):
        own[2].leave()
    assert own[1].number == own[2].number + 1 == 1


def test_ranks_without_nodes_compare_with_the_next_one():
    log = OwnCallLog("g", 299, 300)
    assert (log.leader, log.neighbours()) == (299, [0, 298])
    assert log.listeners() == [(299 + 2**k) % 300 for k in range(9)]
    assert OwnCallLog("g", 1, 2).neighbours() == [0]
