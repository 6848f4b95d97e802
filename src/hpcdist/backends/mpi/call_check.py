"""Check that all ranks of a group make the same collective: a difference is an error on every rank, not a hang.

The ranks of a node write each call on a board (``node.call_board``) before they give it to MPI, and then look at the
others' words of the same number:

1. Write the own words; a full memory barrier; read the others'. So of two ranks whose calls differ, at least one sees
   it: the barriers of both have an order, and the second reads what the first wrote before its barrier.
2. No difference, or no other rank has come yet: make the call, and then look whether a decision was made meanwhile.
3. A difference: the rank writes that it has seen one and makes no call. One of those ranks decides for all (they take
   turns). It stops the call: no rank that has not begun it enters it. Those that have begun it, and have not written
   that they see the difference, are in MPI or on their way there: the decision names them, and by step 1 their calls
   match. If there are none, all raise. Otherwise they may block, and only their own call can free them: every other
   rank takes part in theirs with memory of its own. A rank that returns from the call finds the decision, and raises
   too.

MPI has then carried out the same calls on all ranks, so that the group can be used again. Calls that do not wait for
others, such as a broadcast on its root, let a rank run ahead. It waits before its words would be lost, and the rank
that decides writes a word that stops it: all ranks carry out the calls that it has begun until then.

After an error the numbers continue at a later one, which all derive from the decision, so that old words match no call.
The next calls have other places in the ring than those that a slower rank still reads: the calls that it has to carry
out, and the word after them that stops it.

Ranks on several boards, because they are on several nodes or share no memory, compare their calls a little later
(``core.call_log``). By then MPI may have made calls that differ, so that the group is unusable: each later call raises.
Most wrong calls are of a kind that the rank has not made before: such a call first waits a moment for the other nodes'.
Only the two ranks of a pair know the size of their shares, so each exchange there compares these first (``exchange``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import combinations
from typing import Any, TypeVar

import torch

from hpcdist.backends.mpi.communicator import Communicator
from hpcdist.backends.mpi.datatypes import CUTS
from hpcdist.backends.mpi.node.call_board import COUNTS_KEPT, GONE, LAST, RING, CallBoard, open_board, stand_in_tensors
from hpcdist.backends.mpi.node.window import fence
from hpcdist.core import hooks
from hpcdist.core.call import Call
from hpcdist.core.call_log import BLOCK, LEAVE_SAID, NEW_SECONDS, CallLog, calls_differ
from hpcdist.core.call_words import (
    COUNTED,
    NUMBER,
    NUMBER_BITS,
    OBJECTS,
    SIZES,
    SPLIT,
    STOP,
    WIDE,
    counts_of,
    is_wide,
    kind_word,
    size_of,
    with_root,
)
from hpcdist.core.errors import CallsDifferError, DistBackendError, MismatchError
from hpcdist.core.ranks import format_ranks
from hpcdist.core.reduction import ALL_OPS, NAMES, PREMUL_SUM, premul_sum
from hpcdist.core.table import ALL_GATHER, ALL_TO_ALL, ALL_TO_ALL_SINGLE, EXCHANGES, ROWS
from hpcdist.core.waiting import nap

SPLIT_SAID = kind_word(SPLIT)
OPS = {NAMES[op]: op for op in ALL_OPS}
Result = TypeVar("Result")


class CallCheck:
    """The check of one group's collectives over MPI, unless a rank has switched it off.

    ``carry_out`` runs a checked collective; ``stand_in`` takes part in an object collective, given its name and root.
    """

    def __init__(
        self,
        communicator: Communicator,
        carry_out: Callable[[Call], None],
        stand_in: Callable[[str, int], None],
        is_wanted: bool,
    ) -> None:
        self._communicator = communicator
        self._carry_out, self._stand_in_for_objects = carry_out, stand_in
        self.is_asked_for = self.is_wanted = is_wanted
        self.number = 0  # of the last call
        self.handled = 0  # how many decisions were followed
        self._is_leaving = self._has_decided = False
        self._start = 0  # the number of the first call after the last error
        self.is_open = communicator.size == 1
        self.board: CallBoard = None  # type: ignore[assignment]  # until it is open, or if some rank does not want it
        self.log: CallLog | None = None  # of a group on several boards

    def _open(self) -> None:
        communicator = self._communicator
        with communicator.in_step("a group's first call"):
            board, self.is_wanted, token, nodes = open_board(communicator.comm, self.is_wanted)
        if board is not None and len(nodes) > 1:
            rings = board.whats[board.own], board.sizes[board.own]
            self.log = CallLog(token, communicator.rank, nodes, *rings, self._last)
        self.board = board  # type: ignore[assignment]
        self.is_open = True

    @property
    def has_failed(self) -> bool:
        """Whether calls differed between nodes: a rank that did not learn of it in time may still be in one."""
        return self.log is not None and self.log.was_raised

    @property
    def compares_shares(self) -> bool:
        """Whether the ranks of an exchange compare their shares by MPI: the board does not have them all.

        Without the check of calls they still do if MPI would write past a share (``exchange``).
        """
        if self.board is None:
            return not CUTS and self._communicator.size > 1
        return self.log is not None or not self.board.has_counts

    def _last(self) -> int:
        """Return the number of the last call whose words are written."""
        number, board = self.number, self.board
        return number if board.has(board.own, number) else number - 1

    # -- calls ---------------------------------------------------------------------------------------

    def run(self, call: Call, base: int) -> None:
        """Run a collective on tensors, whose first word without root is ``base``."""
        if not self.is_open:
            self._open()
        if self.board is None:
            self._carry_out(call)
            return
        communicator = self._communicator
        size = size_of(call, communicator.rank, communicator.size)
        counts = counts_of(call) if size < 0 or size >= COUNTED else None
        first = base if call.root is None and call.counts is None else with_root(base, call)
        self.make(first, size, partial(self._carry_out, call), counts)

    def compare(self, name: str, dtype: Any = None, op: Any = None, root: int | None = None, size: int = 0) -> None:
        """Compare one of the ``COMPOSED`` calls, before the calls of which it consists."""
        if self._communicator.size > 1:
            self.make(kind_word(name, dtype, op, root), size, bool)

    def make(self, first: int, size: int, make: Callable[[], Result], counts: Any = None) -> Result:
        """Make a call, given its words and the function that makes it."""
        if not self.is_open:
            self._open()
        board = self.board
        if board is None:
            return make()
        log = self.log
        if log is not None:
            log.check()
        self.number = number = self.number + 1
        if log is not None and not number % BLOCK:
            log.turn(number)
        if counts is not None:
            if number - COUNTS_KEPT >= self._start:
                self._keep_pace(number - COUNTS_KEPT + 1)
                if self._is_stopped_before(number):  # a decision that needs the counts which these would replace
                    self._follow(self.handled + 1, number - 1, None)
            else:  # since the last error no rank has read counts that these replace, except for that error itself
                self._wait(self._have_all_followed)
            board.write_counts(number, counts)
        compares = log is not None and (log.is_new(first, size) or first == SPLIT_SAID)
        if compares:  # before its word is written: until the comparison has ended this rank does not enter MPI
            board.failing[board.own] = number
        at, wide = number & LAST, not 0 <= size < SIZES
        word = (first | (WIDE if wide else size << NUMBER_BITS)) + (number & NUMBER)  # as ``with_size`` does
        board.sizes[board.own][at] = size
        board.whats[board.own][at] = word
        board.begin_fence()
        board.end_fence()
        is_due = board.are_many or not number % BLOCK
        for theirs, their_sizes in board.others:
            if is_due or theirs[at] != word or (wide and their_sizes[at] != size):
                if not self.is_clear(number):
                    self.fail(number, make)
                break
        if log is not None and compares:
            self._compare_first(log, number, make)
        try:
            return make()
        except BaseException as error:
            self.ended_by(error, number)
            raise
        finally:  # if it fails, because another rank took part with memory of its own, the difference is the reason
            if board.decided[0] != self.handled:
                self.look_back(number)
            if log is not None:
                log.check()

    def ended_by(self, error: BaseException, number: int) -> None:
        """Record that this rank has left a call, and check whether other nodes' calls are why MPI has failed."""
        if self._communicator.left_by is not None and self.board is not None:
            self.board.withdraw(number)
        if isinstance(error, DistBackendError) and self.log is not None and not self._communicator.is_revoked():
            self.log.compare_failed()

    def _compare_first(self, log: CallLog, number: int, make: Callable[[], Any]) -> None:
        """Compare a call with those of other nodes before MPI makes it.

        Meanwhile this rank is not in MPI, whatever another rank of its node decides. Such a decision is caused by a
        word that was written before it. So this rank looks again after it has written that it goes on.
        """
        board = self.board
        hooks.compare_calls(log, NEW_SECONDS)
        log.check()
        board.failing[board.own] = 0
        fence()
        if not self.is_clear(number):
            self.fail(number, make)

    def differ(self, ways: list[str]) -> None:
        """Raise because an exchange has found other ranks' calls to differ; on several nodes also inform the others."""
        failure = calls_differ(self._communicator.size, ways)
        if self.log is None:
            raise CallsDifferError(failure)
        self.log.fail(failure, True)
        hooks.compare_calls(self.log, 0.0)
        self.log.check()

    def leave(self) -> None:
        """Announce that this rank makes no more calls; CallsDifferError if another rank makes one."""
        log = self.log
        if log is not None:
            log.is_ending = True
        if self.board is not None and not (log is not None and log.was_raised) and not self._communicator.is_revoked():
            self._is_leaving = True
            board = self.board
            board.leaving[board.own] = 1
            try:
                self.make(LEAVE_SAID, 0, bool)
            finally:
                board.followed[board.own] = GONE  # nobody waits for it with the next decision
        if log is not None and not self._communicator.is_revoked():
            log.compare_last()

    def close(self) -> None:
        """Free the board's memory; there are no more calls."""
        if self.log is not None:
            self.log.close()
        self.board = None  # type: ignore[assignment]

    # -- looking at the others -----------------------------------------------------------------------

    def is_clear(self, number: int) -> bool:
        """Tell whether no other rank that has come has made another call."""
        board = self.board
        if not number % BLOCK and not self._is_leaving:
            self._keep_pace(max(number - BLOCK + 1, self._start))
        if board.are_many and board.are_equal(number):
            return True
        at = number & LAST
        word, size = board.whats[board.own][at], board.sizes[board.own][at]
        wide = is_wide(word)
        for whats, sizes in board.others:
            if (whats[at] != word or (wide and sizes[at] != size)) and not (whats[at] - number) & NUMBER:
                return all(board.fit(board.own, r, number) for r in self._begun(number))
        return True

    def _begun(self, number: int) -> list[int]:
        board = self.board
        return [r for r in range(len(board.ranks)) if r != board.own and board.has(r, number)]

    def _keep_pace(self, number: int) -> None:
        """Wait until all others have begun a call, so that no words that they have not compared are lost.

        A decision about an earlier call ends the wait: ranks that have carried it out do not begin this one any more.
        """
        board = self.board
        for r in range(len(board.ranks)):
            if r != board.own and not board.has_come_to(r, number):
                self._wait(lambda r=r: board.has_come_to(r, number) or self._is_stopped_before(number))  # type: ignore[misc]

    def _is_stopped_before(self, number: int) -> bool:
        """Tell whether there is a decision about an earlier call that this rank has not carried out."""
        board = self.board
        return board.decided[0] != self.handled and board.differs() < number

    def _have_all_followed(self) -> bool:
        """Tell whether all ranks have carried out the last decision, and so have read its words."""
        board = self.board
        return all(followed >= self.handled for followed in board.followed)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not is_over():
            with self._communicator.translating("a call"):
                self._communicator.poll()
            nap(time.monotonic() - began)

    # -- a difference --------------------------------------------------------------------------------

    def fail(self, number: int, make: Callable[[], Any]) -> None:
        """Reach a decision about a call that differs from another rank's, carry it out, and raise."""
        board = self.board
        if self._communicator.is_revoked():
            return  # MPI refuses the call
        board.failing[board.own] = number
        index = self.handled + 1
        if board.decided[0] < index:
            board.take_turn()
            try:
                self._wait(lambda: board.decided[0] >= index or board.has_turn())
                if board.decided[0] < index:
                    self._decide(index, number)
                    self._has_decided = True
            finally:
                board.end_turn()
        self._follow(index, number, make)

    def _decide(self, index: int, number: int) -> None:
        board = self.board
        # until then a slower rank may read the words that these replace
        self._wait(self._have_all_followed)
        board.stop(number, self.log is not None)  # other nodes compare the word of this call
        fence()
        reached: list[int] = []

        def is_known() -> bool:
            reached[:] = [number - 1] * len(board.ranks)
            for each in range(number, number + RING):
                begun = [r for r in self._begun(each) if board.takes_part(r, each)]
                inside = [r for r in begun if board.failing[r] != each]
                if not all(board.fit(*pair, each) for pair in combinations(inside, 2)):
                    return False  # one of them is about to see the difference
                for r in inside:
                    reached[r] = each
                if not begun:
                    break
            return True

        self._wait(is_known)
        board.decide(index, number, reached)

    def look_back(self, number: int) -> None:
        """Raise after a call if others have found it to differ from theirs."""
        index = self.handled + 1
        if self.board.differs() <= number:
            self._follow(index, number, None)

    def _follow(self, index: int, number: int, make: Callable[[], Any] | None) -> None:
        """Carry out a decision, given this rank's call and its function (None if it was made), and raise."""
        board = self.board
        differs, last = board.differs(), board.last()
        error = self._error(differs, number)
        if self.log is not None:
            self.log.was_raised = True
            self.log.fail(str(error), self._has_decided)
            hooks.compare_calls(self.log, 0)  # which tells the others
        try:
            for each in range(number + (make is None), last + 1):
                # of a new group, which lacks the ranks that stand in; of calls that other nodes do not make
                with suppress(MismatchError, *([] if self.log is None else [DistBackendError])):
                    if make is not None and each == number and self._is_own(number):
                        make()
                    else:
                        self._stand_in(board.makers(each), each)
        finally:
            board.forget(self._start)  # all ranks have carried out the decision before this one
            self._start = max(differs, last) + 2 + RING
            board.hold_left(self._start)
            self.handled = board.followed[board.own] = index
            self.number = self._start - 1
        raise error

    def _is_own(self, number: int) -> bool:
        """Tell whether this rank takes part in other ranks' call by its own, which is the same."""
        board = self.board
        makers, said = board.makers(number), board.said(board.own, number)
        return board.own in makers or (said.name != ALL_TO_ALL_SINGLE.name and said == board.said(makers[0], number))

    def _stand_in(self, makers: list[int], number: int) -> None:
        """Take part in other ranks' call with memory of its own, so that they return."""
        board, communicator, leader = self.board, self._communicator, makers[0]
        said, rank, ranks = board.said(leader, number), communicator.rank, communicator.size
        if not all(board.takes_part(each, number) for each in makers):
            return  # one has left it since the decision: it ends on no rank
        if said.name in OBJECTS:
            self._stand_in_for_objects(said.name, said.root)
        elif said.name == SPLIT:
            communicator.split([])
        elif said.name in ROWS:
            its, op = ROWS[said.name], OPS.get(said.op)
            op = premul_sum(1.0) if op == PREMUL_SUM else op
            counts = None
            if its in EXCHANGES and self.compares_shares:  # the ranks in it find that this one takes no part
                its, counts = ALL_TO_ALL, ([0] * ranks, [0] * ranks)
            elif its in EXCHANGES:
                its, counts = ALL_TO_ALL, self._shares(makers, number)
            elif said.size >= COUNTED and (theirs := board.counts(leader, number)) is not None:
                shares = theirs[1] if its is ALL_GATHER else theirs[0]
                mine = [shares[rank]]
                counts = (mine, shares) if its is ALL_GATHER else (shares, mine)
            if counts is None and not 0 <= said.size < COUNTED:
                return  # a call with ragged shares, which this rank does not know: the ranks in it do not return
            if counts is not None:
                send, recv = (torch.zeros(sum(each), dtype=said.dtype) for each in counts)
            elif its.buffers:
                send, recv = stand_in_tensors(its, said, rank, ranks)  # type: ignore[assignment]
            else:
                send = recv = None  # type: ignore[assignment]
            self._carry_out(Call(its, send, recv, op, said.root if its.rooted else None, counts))

    def _shares(self, makers: list[int], number: int) -> tuple[list[int], list[int]]:
        """Return this rank's shares, to take part in an exchange of ranks whose shares are all on the board."""
        board, me, ranks = self.board, self._communicator.rank, self._communicator.size
        sent, received = [0] * ranks, [0] * ranks
        for maker in makers:
            theirs = board.counts(maker, number)
            assert theirs is not None
            sent[board.ranks[maker]], received[board.ranks[maker]] = theirs[1][me], theirs[0][me]
        return sent, received

    def _error(self, number: int, own: int) -> CallsDifferError:
        board = self.board
        calls: dict[str, list[int]] = {}
        for index, rank in enumerate(board.ranks):
            if board.has(index, number) and (said := board.said(index, number)).name != STOP:
                call = str(said)
                counts = None if 0 <= said.size < COUNTED else board.counts(index, number)
                if counts is not None and said.name == ALL_TO_ALL_SINGLE.name:  # each rank has its own
                    call += f" (sends {counts[0]}, receives {counts[1]})"
                elif counts is not None:
                    call += f" ({counts[1] if said.name == ALL_GATHER.name else counts[0]})"
                calls.setdefault(call, []).append(rank)
        ways = [f"{format_ranks(ranks)}: {call}" for call, ranks in calls.items()]
        if own != number and board.has(board.own, own):
            ways.append(f"this rank, {self._communicator.rank}, is in {board.said(board.own, own)}")
        return CallsDifferError(calls_differ(self._communicator.size, ways))
