"""The calls that ranks of several nodes compare: sums, words, and who speaks to whom."""

import random
from array import array

import pytest

from hpcdist.core.call_log import BLOCK, KEPT, CallLog
from hpcdist.core.errors import CallsDifferError

RING = 2 * BLOCK


class Rank:
    """A rank that writes calls, a number each for word and size."""

    def __init__(self, rank, nodes):
        self.words, self.sizes = memoryview(array("q", [0] * RING)), memoryview(array("q", [0] * RING))
        self.number = 0
        self.log = CallLog("g", rank, nodes, self.words, self.sizes, lambda: self.number, self.is_one, self.text)

    @staticmethod
    def is_one(number, word, size, other, other_size):
        return word == other and (size == other_size or min(size, other_size) < 0)

    @staticmethod
    def text(number, word, size):
        return f"call {number}: {word} of {size}"

    def call(self, word, size):
        number = self.number + 1
        if not number % BLOCK:
            self.log.turn(number)
        self.words[number % RING], self.sizes[number % RING] = word, size
        self.number = number

    def compare(self, other):
        """As ``watch.call_exchange`` does."""
        place = other.log.place()
        if self.log.agrees(other.log.rank, place):
            return None

        def fetch(block):
            return tuple(memoryview(each).cast("q").tolist() for each in other.log.words(block))

        return self.log.find(other.log.rank, other.log.starts(), fetch)


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
    wrong = calls + ahead + 1
    for one, other in (ranks, ranks[::-1]):
        assert f"rank 0: call {wrong}: 1 of 7; rank 1: call {wrong}: 1 of 8" in one.compare(other)
    ranks[0].log.close()
    assert f"rank 0: call {wrong}: 1 of 7; rank 1: call {wrong}: 1 of 8" in ranks[1].compare(ranks[0])


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
    assert f"rank 0: call {10 * BLOCK + 1}: 3 of 0" in ranks[1].compare(ranks[0])


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
