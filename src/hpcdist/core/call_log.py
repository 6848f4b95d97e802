"""Call log of a group: the numbers and sums by which ranks that share no call board compare the calls they have begun.

No rank sees the call board of another node over MPI, and over other libraries there is none. So these calls are
compared after they were begun: ``watch.call_exchange`` sends a rank of the next node the number of this rank's last
call and a sum over the words of all its calls. The rank that has made more calls compares, because it knows its own sum
at the other's number. Different sums mean different calls, and the words that both still have show the first of them.

The sum is made block by block, so that it costs a call almost nothing. It leaves out the shares that only some ranks
know: two ranks compare what they send each other if they are on one node. If one rank's shares are all equal and
another's are not, the sums differ although the calls match; that difference of the sums is remembered.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any, NamedTuple
from zlib import crc32

from hpcdist.core import hooks
from hpcdist.core.call import Call
from hpcdist.core.call_words import LEAVE, is_one, kind_word, read, words_of
from hpcdist.core.errors import CallsDifferError
from hpcdist.core.printing import add_hint

BLOCK = 32  # calls: half of the ring
KEPT = 256  # blocks
MODULUS = 1 << 64
NEW_KINDS = 128
NEW_SECONDS = 1.0  # seconds that a call of a new kind waits for the other ranks' calls
FAILED_SECONDS = 1.0  # the same for a call which the library has ended with an error
LEAVE_SECONDS = 0.3  # the same for the end of a group
LEAVE_SAID = kind_word(LEAVE)

Words = tuple[bytes, bytes]  # of some calls in order: the first ones, and the second ones
Read = tuple[list[int], list[int]]  # the same as numbers


class CallPosition(NamedTuple):
    """How far a rank has come."""

    number: int  # of its last call
    start: int  # the sum over the calls of the blocks before its own
    total: int  # the sum over all calls


def calls_differ(size: int, ways: list[str]) -> str:
    text = f"the ranks of a group of {size} do not make the same call. {'; '.join(ways)}"
    return add_hint(text, "calls-differ")


def part(words: Words) -> int:
    whats, sizes = words
    if any(sizes[7::8]):  # numbers below zero: shares of this rank's own
        sizes = array("q", [max(0, each) for each in memoryview(sizes).cast("q")]).tobytes()
    return crc32(whats) | crc32(sizes) << 32


class CallLog:
    """The calls that one rank has begun on a group, which ``token`` names on all of its ranks.

    ``nodes`` are its ranks by node; ``whats`` and ``sizes`` are the ring of this rank's words, whose length is a
    multiple of a block's. ``last`` returns the number of the last call whose words are written.
    """

    def __init__(
        self,
        token: str,
        rank: int,
        nodes: Sequence[Sequence[int]],
        whats: Any,
        sizes: Any,
        last: Callable[[], int],
    ) -> None:
        self.token, self.rank, self.nodes = token, rank, nodes
        self.size = sum(map(len, nodes))
        self._node = next(i for i, ranks in enumerate(nodes) if rank in ranks)
        self._rings, self.last = (whats, sizes), last
        self._starts = {0: 0}  # by block: the sum over the calls before it
        self._blocks: dict[int, Words] = {}
        self._offsets: dict[int, int] = {}  # by rank: how much larger this rank's sum is, although the calls match
        self._kinds: set[tuple[int, int]] = set()  # the words of the calls so far, without their numbers
        self.is_ending = False  # whether this rank makes no more calls
        self.failure: str | None = None  # why the group takes no more calls: the difference that was found
        self.was_raised = False  # whether this rank has raised it
        self.failed_at = 0.0  # when it was found, or received
        self.tells = False  # whether this rank still has to send it to others
        # of the exchange
        self.ranks: Sequence[int] = ()  # the group's, as the world counts them
        self.met = -1  # the number up to which the next node is known to have come
        self.comparing = Lock()  # held while a thread compares its words with another rank's

    # -- this rank's calls -----------------------------------------------------------------------------

    def turn(self, number: int) -> None:
        """Keep the words of a block of calls; a call of the next one follows."""
        block = number // BLOCK - 1
        if self.failure is None:
            words = self._read(block)
            self._starts[block + 1] = (self._starts[block] + part(words)) % MODULUS
            self._blocks[block] = words
            self._starts.pop(block - KEPT, None)
            self._blocks.pop(block - KEPT, None)

    def is_new(self, what: int, size: int) -> bool:
        """Tell whether this rank has not made such a call before, and so compares it before the library runs it.

        If sizes change all the time, that ends after ``NEW_KINDS`` calls: each waits for a datagram.
        """
        kind = what, size
        if kind in self._kinds or len(self._kinds) >= NEW_KINDS or size < 0 or self.is_ending:
            return False
        self._kinds.add(kind)
        return True

    def close(self) -> None:
        """Record that there are no more calls; the ring is not read again."""
        number = self.last()
        self.last = lambda: number
        self._blocks[number // BLOCK] = self.words(number // BLOCK, number)
        self._rings = (memoryview(b""), memoryview(b""))

    def check(self) -> None:
        if self.failure is not None:
            self.was_raised = True
            raise CallsDifferError(self.failure)

    def compare_failed(self) -> None:
        """Compare the calls now, because the library has ended one with an error; CallsDifferError if that is why."""
        hooks.compare_calls(self, FAILED_SECONDS)
        self.check()

    def compare_last(self) -> None:
        """Compare the calls now, the last ones; raise a difference that this rank has not raised yet."""
        hooks.compare_calls(self, LEAVE_SECONDS)
        if not self.was_raised:
            self.check()

    def fail(self, failure: str, tells: bool) -> None:
        """Record that calls differ; ``tells`` as the attribute."""
        if self.failure is None:
            self.failure, self.tells, self.failed_at = failure, tells, time.monotonic()

    def _read(self, block: int) -> Words:
        whats, sizes = self._rings
        begin = block * BLOCK % (len(whats) or BLOCK)
        return whats[begin : begin + BLOCK].tobytes(), sizes[begin : begin + BLOCK].tobytes()

    def words(self, block: int, number: int | None = None) -> Words:
        """Return the words of a block's calls, up to a number; empty if they are not kept."""
        number = self.last() if number is None else number
        words = self._blocks.get(block)
        if words is None and block == number // BLOCK:
            words = self._read(block)
            words = self._blocks.get(block, words)  # if it has ended meanwhile, the ring may have been written again
        length = 8 * max(0, number + 1 - block * BLOCK)
        return (words[0][:length], words[1][:length]) if words is not None else (b"", b"")

    def at(self, number: int) -> CallPosition | None:
        """Return this rank's position at a call; None if it has not made that call, or does not know any more."""
        block = number // BLOCK
        start = self._starts.get(block)
        words = self.words(block, number)
        if start is None or number > self.last() or not words[0]:
            return None
        return CallPosition(number, start, (start + part(words)) % MODULUS)

    def place(self) -> CallPosition | None:
        return self.at(self.last())

    def starts(self) -> dict[int, int]:
        """Return by block the sum over all calls before it."""
        return self._starts.copy()

    # -- others ----------------------------------------------------------------------------------------

    @property
    def leader(self) -> int:
        """The rank of this node that exchanges with other nodes."""
        return self.nodes[self._node][0]

    def neighbours(self) -> list[int]:
        """Return a rank of the next node, and one of the previous node."""
        peers = self.nodes[self._node]
        found = [self.nodes[(self._node + step) % len(self.nodes)] for step in (1, -1)]
        return list(dict.fromkeys(ranks[peers.index(self.rank) % len(ranks)] for ranks in found))

    def listeners(self) -> list[int]:
        """Return the ranks to inform about a failure: those of its node, and one on each node 1, 2, 4, … further on."""
        found = [each for each in self.nodes[self._node] if each != self.rank]
        step, count = 1, len(self.nodes)
        while step < count:
            found.append(self.nodes[(self._node + step) % count][0])
            step *= 2
        return found

    def agrees(self, rank: int, place: CallPosition) -> bool:
        """Tell whether another rank has made the same calls as this one, as far as both are known."""
        own, offset = self.at(place.number), self._offsets.get(rank, 0)
        return own is None or (own.start, own.total) == (
            (place.start + offset) % MODULUS,
            (place.total + offset) % MODULUS,
        )

    def find(self, rank: int, starts: dict[int, int], fetch: Callable[[int], Read]) -> str | None:
        """Return the first call that differs between this rank and another, in words; None if there is none.

        ``starts`` are those of the other rank, and ``fetch`` returns its words of a block's calls, as far as it has
        them.
        """
        own, offset = self.starts(), self._offsets.get(rank, 0)
        for block in sorted(own.keys() & starts.keys()):
            if own[block] != (starts[block] + offset) % MODULUS:
                if block > 0:
                    return self._earlier(rank, block)
            elif block + 1 in own and own[block + 1] == (starts.get(block + 1, -1) + offset) % MODULUS:
                continue
            for mine, theirs in self._pairs(block, fetch(block)):
                if not is_one(*mine, *theirs):
                    return self._difference({self.rank: mine, rank: theirs})
            if block + 1 in own and block + 1 in starts:
                self._offsets[rank] = offset = (own[block + 1] - starts[block + 1]) % MODULUS
        return None

    def _pairs(self, block: int, theirs: Read) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        mine = [memoryview(each).cast("q") for each in self.words(block)]
        for pair in zip(*mine, *theirs, strict=False):
            yield (pair[0], pair[1]), (pair[2], pair[3])

    def _difference(self, calls: dict[int, tuple[int, int]]) -> str:
        ways = [f"rank {rank}: {read(*calls[rank])}" for rank in sorted(calls)]
        return calls_differ(self.size, ways)

    def _earlier(self, rank: int, block: int) -> str:
        ranks = " and ".join(map(str, sorted((self.rank, rank))))
        return calls_differ(
            self.size, [f"ranks {ranks} differ in one of the first {block * BLOCK:,}, whose words are not kept"]
        )


class Apart(Sequence[tuple[int, ...]]):
    """The ranks of a group by node, as if each was alone on its own."""

    def __init__(self, size: int) -> None:
        self._ranks = range(size)

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, index: Any) -> Any:
        return (self._ranks[index],)


class OwnCallLog(CallLog):
    """Call log of a rank on no board, which has a ring of its own: each rank compares with the next one.

    With ``waits`` a call of a new kind is compared before the library runs it; that waits for the other ranks.
    """

    def __init__(self, token: str, rank: int, size: int, waits: bool = False) -> None:
        self.number = 0  # of the last call whose words are written
        self._waits = waits
        whats, sizes = (memoryview(array("q", [0] * 2 * BLOCK)) for _ in range(2))
        super().__init__(token, rank, Apart(size), whats, sizes, lambda: self.number)

    def add(self, word: int, size: int) -> None:
        """Record a call that this rank makes next; CallsDifferError if one is known to differ."""
        if self.failure is not None:
            self.check()
        number = self.number + 1
        if not number % BLOCK:
            self.turn(number)
        whats, sizes = self._rings
        at = number % len(whats)
        whats[at], sizes[at] = word, size
        self.number = number
        if self._waits and self.is_new(word, max(0, size)):  # below zero: shares of this rank's own
            hooks.compare_calls(self, NEW_SECONDS)
            self.check()

    def add_call(self, call: Call) -> None:
        """Record a collective on tensors, as ``add``."""
        self.add(*words_of(call, self.rank, self.size))

    def leave(self) -> None:
        """Record that this rank makes no more calls, and compare the last ones."""
        if not self.is_ending:
            self.is_ending = True
            if not self.was_raised:
                self.add(LEAVE_SAID, 0)
            self.compare_last()
