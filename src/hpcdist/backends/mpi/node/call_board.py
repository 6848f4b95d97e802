"""Call board of a node: shared memory in which each rank of a group writes the collective that it is about to make.

The two words of each of a rank's last calls (``core.call_words``) lie in a ring; call n of a rank is at n modulo the
ring's length. ``call_check`` describes the protocol of writes and reads.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from hpcdist.backends.mpi.node.window import fence, fences
from hpcdist.core import memory_file
from hpcdist.core.call_log import BLOCK, LEAVE_SAID
from hpcdist.core.call_words import COUNTED, LEFT, NUMBER, NUMBER_BITS, STOP, WIDE, DecodedCall, kind_word, read
from hpcdist.core.ranks import ranks_by_value
from hpcdist.core.table import ALL_TO_ALL_SINGLE, Counts, Row, Shape
from hpcdist.launch.environment import NODE_KEY

# Calls of each rank that can be read. A rank may be almost 2 blocks ahead: a root may block in MPI if it is 66 ahead,
# which no death ends. The rest is for the next calls after an error that slower ranks have not raised yet.
RING = 4 * BLOCK
LAST = RING - 1
COUNTS_KEPT = 8  # the calls among them whose counts can be read
COUNTS_BYTES = 1 << 20  # the most memory for counts, in bytes; larger groups write none
AHEAD = 1 << NUMBER_BITS - 1  # a difference of two numbers from here on is negative
CELL = struct.Struct("=qq")  # the two words
FEW = 8  # up to so many ranks are compared one by one
STOP_SAID = kind_word(STOP)
GONE = 1 << 62  # decisions: a rank that has ended the group carries out no more


class CallBoard:
    """The words of the ranks of one group on one node."""

    def __init__(self, memory: mmap.mmap, ranks: list[int], own: int, size: int) -> None:
        self.ranks, self.own = ranks, own  # the group's ranks on this node; the lists below have their order
        count = len(ranks)
        cells = memoryview(memory).cast("q")
        self._bytes, self._row_bytes = memoryview(memory), CELL.size * count
        self.whats = [cells[2 * r : 2 * RING * count : 2 * count] for r in range(count)]
        self.sizes = [cells[2 * r + 1 : 2 * RING * count : 2 * count] for r in range(count)]
        self.others = [(self.whats[r], self.sizes[r]) for r in range(count) if r != own]
        begin = 2 * RING * count
        # for each rank: the number of the call in which it has found a difference, how many decisions it has carried
        # out, whether it ends the group, the last call that it carries out by itself, and its word in whose place it
        # has written ``STOP``
        self.failing, self.followed, self.leaving, self._reached, self._replaced, self._choosing, self._tickets = (
            cells[begin + i * count : begin + (i + 1) * count] for i in range(7)
        )
        begin += 7 * count
        self.decided = cells[begin : begin + 1]  # the number of decisions
        self._differs = cells[begin + 1 : begin + 2]  # the number of the call in which ranks differ, of the last one
        begin += 2
        length = 2 * size
        self._counts = None
        self.has_counts = has_counts(count, size)
        if self.has_counts:
            self._counts = [cells[begin + r * COUNTS_KEPT * length :][: COUNTS_KEPT * length] for r in range(count)]
        self._length = length
        self.begin_fence, self.end_fence = fences()
        self.are_many = count > FEW
        self._past = [bytes(CELL.size)] * RING  # the last words of this rank

    def are_equal(self, number: int) -> bool:
        """Tell whether each rank has made the same call as this one, or has not come to it.

        If not, the calls may still fit. It takes 1 µs for 128 ranks; to compare them one by one takes 15.
        """
        at = number & LAST
        row = bytes(self._bytes[at * self._row_bytes : (at + 1) * self._row_bytes])
        mine = CELL.pack(self.whats[self.own][at], self.sizes[self.own][at])
        past, self._past[at] = self._past[at], mine
        return row.count(mine) + row.count(past) == len(self.ranks)

    def has(self, index: int, number: int) -> bool:
        """Tell whether a rank has begun a call whose place in the ring is not used again yet."""
        return not (self.whats[index][number & LAST] - number) & NUMBER

    def has_come_to(self, index: int, number: int) -> bool:
        """Tell whether a rank has begun a call or a later one."""
        return (self.whats[index][number & LAST] - number) & NUMBER < AHEAD

    def said(self, index: int, number: int) -> DecodedCall:
        at = number & LAST
        word = self.whats[index][at]
        if word == STOP_SAID + (number & NUMBER) and not (self._replaced[index] - number) & NUMBER:
            word = self._replaced[index]
        return read(word, self.sizes[index][at])

    def takes_part(self, index: int, number: int) -> bool:
        """Tell whether a rank makes a call, neither stopped before it nor ended in its middle."""
        said = self.said(index, number)
        return said.name != STOP and not said.was_left

    def stop(self, number: int, keeps_word: bool) -> None:
        """Let no rank begin a call from this one on before it has seen the decision; after it, if its word is kept."""
        mine = self.whats[self.own]
        self._replaced[self.own] = mine[number & LAST]
        for each in range(number + keeps_word, number + RING):
            mine[each & LAST] = STOP_SAID + (each & NUMBER)

    def forget(self, start: int) -> None:
        """Erase the words of this rank's calls before a number, so that they match no later call.

        Otherwise a word that no other call has replaced would match the call 2^16 numbers later. The place of the call
        of that number stays: another rank may have written there (``hold_left``).
        """
        mine = self.whats[self.own]
        for each in range(start - RING + 1, start):
            if (mine[each & LAST] - start) & NUMBER >= AHEAD:
                mine[each & LAST] = each & NUMBER

    def hold_left(self, number: int) -> None:
        """Let the first call after an error differ from the end of the group on the ranks that end it."""
        fence()
        for r, is_leaving in enumerate(self.leaving):
            if is_leaving:
                self.sizes[r][number & LAST] = 0
                self.whats[r][number & LAST] = LEAVE_SAID + (number & NUMBER)

    def withdraw(self, number: int) -> None:
        """Record that this rank has left a call, so that it is not in MPI any more."""
        self.whats[self.own][number & LAST] |= LEFT
        fence()

    # -- counts --------------------------------------------------------------------------------------

    def write_counts(self, number: int, counts: Counts) -> None:
        """Write the elements of a call to and from each rank."""
        if self._counts is not None:
            begin = number % COUNTS_KEPT * self._length
            mine, half = self._counts[self.own], self._length // 2
            for side, shares in enumerate(counts):
                for rank in range(half):
                    mine[begin + side * half + rank] = shares[rank % len(shares)]

    def counts(self, index: int, number: int) -> tuple[list[int], list[int]] | None:
        """Return the elements of a rank's call to and from each rank; None if they are not known."""
        half, said = self._length // 2, self.said(index, number)
        if 0 <= said.size < COUNTED:
            return [said.size] * half, [said.size] * half
        if self._counts is None:
            return None
        begin = number % COUNTS_KEPT * self._length
        both = self._counts[index][begin : begin + self._length].tolist()
        return both[:half], both[half:]

    def fit(self, one: int, other: int, number: int) -> bool:
        """Tell whether the calls of two ranks match."""
        at = number & LAST
        if (self.whats[one][at] ^ self.whats[other][at]) & ~WIDE:
            return False
        said = self.said(one, number)
        if said.size == self.said(other, number).size:
            return True
        if said.name != ALL_TO_ALL_SINGLE.name:
            return False
        mine, theirs = self.counts(one, number), self.counts(other, number)
        if mine is None or theirs is None:
            return True
        me, them = self.ranks[one], self.ranks[other]
        return mine[0][them] == theirs[1][me] and mine[1][them] == theirs[0][me]

    # -- decisions -----------------------------------------------------------------------------------

    def differs(self) -> int:
        """Return the number of the call in which ranks differ, of the last decision."""
        return self._differs[0]

    def makers(self, number: int) -> list[int]:
        """Return the ranks that carry out a call by themselves, by the last decision; others take part in theirs."""
        return [r for r, reached in enumerate(self._reached) if reached >= number]

    def last(self) -> int:
        """Return the last call that a rank carries out by itself, by the last decision."""
        return max(self._reached)

    def decide(self, index: int, number: int, reached: list[int]) -> None:
        self._differs[0] = number
        for r, each in enumerate(reached):
            self._reached[r] = each
        fence()
        self.decided[0] = index

    def take_turn(self) -> None:
        """Ask for the turn to decide (Lamport's bakery algorithm)."""
        own = self.own
        self._choosing[own] = 1
        fence()
        self._tickets[own] = 1 + max(self._tickets.tolist())
        self._choosing[own] = 0
        fence()

    def has_turn(self) -> bool:
        mine = (self._tickets[self.own], self.own)
        fence()
        return not any(self._choosing) and not any(
            ticket and (ticket, r) < mine for r, ticket in enumerate(self._tickets) if r != self.own
        )

    def end_turn(self) -> None:
        self._tickets[self.own] = 0


def has_counts(count: int, size: int) -> bool:
    """Tell whether a group of so many ranks on a node writes counts."""
    return 16 * size * COUNTS_KEPT * count <= COUNTS_BYTES


def bytes_of(count: int, size: int) -> int:
    cells = count * (2 * RING + 7) + 2
    return 8 * (cells + (2 * size * COUNTS_KEPT * count if has_counts(count, size) else 0))


def shared_memory_id() -> tuple[str, str, int] | None:
    """Return an identifier that is the same for ranks that can share memory; None without /dev/shm."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return os.environ.get(NODE_KEY, ""), boot, memory_file.device_id()
    except OSError:
        return None


def open_board(comm: MPI.Intracomm, is_wanted: bool) -> tuple[CallBoard | None, bool, str, list[list[int]]]:
    """Make the boards of a group; every rank calls this, whatever its setting.

    Returns this rank's board, which it shares with the ranks of its node if they share memory, None unless all ranks
    want one; whether they do; an identifier of the group, the same on all ranks; and its ranks by board.
    """
    told: list[tuple[bool, Any, str]] = comm.allgather(
        (is_wanted, shared_memory_id() if is_wanted else None, secrets.token_hex(8))
    )
    if not all(wanted for wanted, *_ in told):
        return None, False, "", []
    rank, size = comm.Get_rank(), comm.Get_size()
    nodes = ranks_by_value(r if each is None else each for r, (_, each, _) in enumerate(told))
    ranks = next(each for each in nodes.values() if rank in each)
    name, descriptor, memory = "", -1, None
    nbytes = bytes_of(len(ranks), size)
    try:
        try:
            if len(ranks) > 1 and ranks[0] == rank:
                descriptor, name = memory_file.create(nbytes)
                memory_file.reserve(descriptor, nbytes)
        except OSError:
            memory_file.remove(name)
            name = ""
        names = comm.allgather(name)
        shared = names[ranks[0]]
        if shared:
            try:
                if descriptor < 0:
                    descriptor = memory_file.open_by_name(shared)
                memory = mmap.mmap(descriptor, nbytes)
            except OSError:
                pass
        have = comm.allgather(memory is not None)
    finally:
        memory_file.remove(name)
        if descriptor >= 0:
            os.close(descriptor)
    boards = [
        shares for each in nodes.values() for shares in ([each] if all(have[r] for r in each) else [[r] for r in each])
    ]
    ranks = next(each for each in boards if rank in each)
    if memory is None or len(ranks) == 1:
        memory = mmap.mmap(-1, bytes_of(1, size))
    return CallBoard(memory, ranks, ranks.index(rank), size), True, told[0][2], sorted(boards)


def stand_in_tensors(
    row: Row, said: DecodedCall, rank: int, ranks: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return memory with which this rank takes part in another rank's call: its input and its output."""
    is_root = not row.rooted or rank == said.root
    share = torch.zeros(said.size, dtype=said.dtype)
    if row.shape is Shape.SAME:
        return share, share if is_root or row.buffers == 1 else None
    everything = torch.zeros(ranks * said.size, dtype=said.dtype) if is_root else None
    if row.shape is Shape.GATHER:
        return share, everything
    if row.shape is Shape.SCATTER:
        return everything, share
    return everything, torch.zeros(ranks * said.size, dtype=said.dtype)
