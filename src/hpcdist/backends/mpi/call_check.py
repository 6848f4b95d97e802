"""Check that all ranks of a group make the same collective: a difference is an error on every rank, not a hang.

The ranks of a node write each call on a board (``node.call_board``) before they give it to MPI, and then look at the
others' words of the same number:

1. write the own words; a full memory barrier; read the others'. So of two ranks whose calls differ, at least one sees
   it: the barriers of both have an order, and who comes second reads what the other has written before its own.
2. No difference, or nobody else has come yet: make the call, and then look whether something was decided meanwhile.
3. A difference: the rank says that it has seen one and makes no call. One of those decides for all (they take turns).
   A rank that has begun the call and has not said that it sees the difference is in MPI or on its way there. All such
   ranks make one and the same call, by 1. If there are none, all raise. Otherwise they may block, and what frees them
   is their own call: every rank that has made another one takes part in theirs with memory of its own.
   Who returns sees that there is a decision, and raises too.

MPI has then carried out the same calls on all ranks, so that the group can be used again. Calls that do not wait for
others, such as a broadcast on its root, let a rank run ahead. It waits before its words would be lost, and the one that
decides leaves a word that stops it: what it has begun until then is carried out by all.

After an error the numbers go on at a later one, which all derive from the decision: an old word looks like no call.
The next calls have other places in the ring than those that a slower rank still reads: what it is to carry out, and the
word after it that stops it.

Ranks on several boards, because they are on several nodes or share no memory, compare their calls a little later
(``core.call_log``). By then MPI may have made calls that differ, so that the group takes no more: each raises. Most
wrong calls are of a kind that the rank has not made before: such a call first waits a moment for the other nodes'.
What two ranks exchange is known to them only, so that each exchange there compares it first (``exchange``).
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
from hpcdist.backends.mpi.node.call_board import (
    COUNTED,
    COUNTS_KEPT,
    LAST,
    LEAVE,
    NO_CALLS,
    NUMBER,
    NUMBER_BITS,
    OBJECTS,
    RING,
    SIZES,
    SPLIT,
    STOP,
    WIDE,
    CallBoard,
    counted,
    is_wide,
    open_board,
    size_of,
    tensors_of,
    what,
    with_root,
)
from hpcdist.backends.mpi.node.window import fence
from hpcdist.core import hooks
from hpcdist.core.call import Call
from hpcdist.core.call_log import BLOCK, CallLog, calls_differ
from hpcdist.core.errors import CallsDifferError, DistBackendError, MismatchError
from hpcdist.core.ranks import listed
from hpcdist.core.reduction import ALL_OPS, NAMES, PREMUL_SUM, multiplied_by
from hpcdist.core.table import ALL_GATHER, ALL_TO_ALL, ALL_TO_ALL_SINGLE, EXCHANGES, ROWS
from hpcdist.core.waiting import nap

LEAVE_SAID, SPLIT_SAID = what(LEAVE), what(SPLIT)
NEW_SECONDS = 1.0  # how long a call whose like this rank has not made on the group waits for the other nodes' calls
FAILED_SECONDS = 1.0  # how long a call that MPI has ended with an error waits for the other nodes' calls
LEAVE_SECONDS = 0.3  # the same for the end of a group
OPS = {NAMES[op]: op for op in ALL_OPS}
Result = TypeVar("Result")


class CallCheck:
    """The check of one group's collectives over MPI, unless some rank does not want it.

    ``carry_out`` runs a collective that was checked; ``stand_in`` takes part in one on objects, of a name and a root.
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
            self.log = board.log(token, nodes, communicator.rank, self._last)
        self.board = board  # type: ignore[assignment]
        self.is_open = True

    @property
    def has_failed(self) -> bool:
        """Whether calls differed between nodes: a rank that was not told in time may still be in one."""
        return self.log is not None and self.log.was_raised

    @property
    def compares_shares(self) -> bool:
        """Whether the ranks of an exchange compare their shares by MPI: the board does not have them all.

        Those that compare no calls do so too if MPI would write past a share (``exchange``).
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
        counts = counted(call) if size < 0 or size >= COUNTED else None
        first = base if call.root is None and call.counts is None else with_root(base, call)
        self.make(first, size, partial(self._carry_out, call), counts)

    def compare(self, name: str, dtype: Any = None, op: Any = None, root: int | None = None, size: int = 0) -> None:
        """Compare one of the ``COMPOSED`` calls, before what it is made of is compared."""
        if self._communicator.size > 1:
            self.make(what(name, dtype, op, root), size, bool)

    def make(self, first: int, size: int, make: Callable[[], Result], counts: Any = None) -> Result:
        """Make a call, given its words and what makes it."""
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
                if self._is_stopped_before(number):  # by what needs the counts that these would replace
                    self._follow(self.handled + 1, number - 1, None)
            else:  # since the last error nobody has read counts that these replace, but for that error itself
                self._wait(self._have_all_followed)
            board.write_counts(number, counts)
        compares = log is not None and (log.is_new(first, size) or first == SPLIT_SAID)
        if compares:  # before its word is there: until the comparison has ended this rank does not enter MPI
            board.failing[board.own] = number
        at, wide = number & LAST, not 0 <= size < SIZES
        word = (first | (WIDE if wide else size << NUMBER_BITS)) + (number & NUMBER)  # as with_size does
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
        """Say that this rank has left a call, and find out whether other nodes' calls are why MPI has failed."""
        if self._communicator.left_by is not None and self.board is not None:
            self.board.withdraw(number)
        if isinstance(error, DistBackendError) and self.log is not None and not self._communicator.is_revoked():
            hooks.compare_calls(self.log, FAILED_SECONDS)

    def _compare_first(self, log: CallLog, number: int, make: Callable[[], Any]) -> None:
        """Compare a call with those of other nodes before MPI makes it.

        Meanwhile this rank is not in MPI, whatever another one of its node decides. What makes such a decision is a
        word that was written before it. So this rank looks again when it has said that it goes on.
        """
        board = self.board
        hooks.compare_calls(log, NEW_SECONDS)
        log.check()
        board.failing[board.own] = 0
        fence()
        if not self.is_clear(number):
            self.fail(number, make)

    def differ(self, ways: list[str]) -> None:
        """Raise because an exchange has found other ranks' calls to differ; on several nodes the others are told."""
        failure = calls_differ(self._communicator.size, ways)
        if self.log is None:
            raise CallsDifferError(failure)
        self.log.fail(failure, True)
        hooks.compare_calls(self.log, 0.0)
        self.log.check()

    def leave(self) -> None:
        """Say that this rank makes no more calls; CallsDifferError if another one does."""
        log = self.log
        if log is not None:
            log.is_ending = True
        if self.board is not None and not (log is not None and log.was_raised) and not self._communicator.is_revoked():
            self._is_leaving = True
            self.make(LEAVE_SAID, 0, bool)
        if log is not None and not self._communicator.is_revoked():
            hooks.compare_calls(log, LEAVE_SECONDS)
            if not log.was_raised:
                log.check()

    def close(self) -> None:
        """Give the board's memory back; there are no more calls."""
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
        """Wait until all others have begun a call, so that no words are lost that they have not compared.

        A decision about an earlier call ends the wait: ranks that have carried it out do not begin this one any more.
        """
        board = self.board
        for r in range(len(board.ranks)):
            if r != board.own and not board.has_come_to(r, number):
                self._wait(lambda r=r: board.has_come_to(r, number) or self._is_stopped_before(number))  # type: ignore[misc]

    def _is_stopped_before(self, number: int) -> bool:
        """Tell whether a decision that this rank has not carried out is about an earlier call than this one."""
        board = self.board
        return board.decided[0] != self.handled and board.decision(self.handled + 1)[0] < number

    def _have_all_followed(self) -> bool:
        """Tell whether all ranks have carried out the last decision, and so read what it is about."""
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
        """Have it decided what becomes of a call that differs from another rank's, do that, and raise."""
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
        # until then a slower rank may read what the words are about to replace
        self._wait(self._have_all_followed)
        board.stop(number)
        fence()
        found: list[tuple[int, int]] = []

        def is_known() -> bool:
            last, leader, each = number - 1, board.own, number
            while each < number + RING:
                begun = [r for r in self._begun(each) if board.said(r, each).name not in NO_CALLS]
                inside = [r for r in begun if board.failing[r] != each]
                if not all(board.fit(*pair, each) for pair in combinations(inside, 2)):
                    return False  # one of them is about to see the difference
                if inside:
                    last, leader = each, inside[0]
                if not begun:
                    break
                each += 1
            found[:] = [(last, leader)]
            return True

        self._wait(is_known)
        ((last, leader),) = found
        board.decide(index, number, last, leader)

    def look_back(self, number: int) -> None:
        """Raise after a call that others have found to differ from theirs."""
        index = self.handled + 1
        if self.board.decision(index)[0] <= number:
            self._follow(index, number, None)

    def _follow(self, index: int, number: int, make: Callable[[], Any] | None) -> None:
        """Carry out a decision, given this rank's call and what makes it (None if it was made), and raise."""
        board = self.board
        differs, last, leader = board.decision(index)
        board.stopped[board.own] = number
        error = self._error(differs, number)
        if self.log is not None:
            self.log.was_raised = True
            self.log.fail(str(error), self._has_decided)
            hooks.compare_calls(self.log, 0)  # which tells the others
        try:
            for each in range(number + (make is None), last + 1):
                # of a new group, in which those that stand in are missing; of calls that other nodes do not make
                with suppress(MismatchError, *([] if self.log is None else [DistBackendError])):
                    if make is not None and each == number and board.own in self._makers(leader, number):
                        make()
                    else:
                        self._stand_in(leader, each)
        finally:
            board.forget(self._start)  # all ranks have carried out the decision before this one
            self.handled = board.followed[board.own] = index
            self._start = max(differs, last) + 2 + RING
            self.number = self._start - 1
        raise error

    def _makers(self, leader: int, number: int) -> list[int]:
        """Return the ranks that carry out a call by themselves, while others take part in it by ``_stand_in``."""
        board = self.board
        if board.said(leader, number).name == ALL_TO_ALL_SINGLE.name:  # whose shares are those of two ranks
            differs = board.decision(self.handled + 1)[0]
            for r in range(len(board.ranks)):
                self._wait(lambda r=r: board.has_come_to(r, number) or board.stopped[r] >= differs)  # type: ignore[misc]
        makers = [leader]
        for is_failing in (False, True):
            for r in range(len(board.ranks)):
                if board.has(r, number) and (board.failing[r] == number) is is_failing and r not in makers:
                    makers += [r] if all(board.fit(r, maker, number) for maker in makers) else []
        return makers

    def _stand_in(self, leader: int, number: int) -> None:
        """Take part in a call of another rank's with memory of its own, so that the ranks in it return."""
        board, communicator = self.board, self._communicator
        said, rank, ranks = board.said(leader, number), communicator.rank, communicator.size
        if said.name in OBJECTS:
            self._stand_in_for_objects(said.name, said.root)
        elif said.name == SPLIT:
            communicator.split([])
        elif said.name in ROWS:
            its, op = ROWS[said.name], OPS.get(said.op)
            op = multiplied_by(1.0) if op == PREMUL_SUM else op
            counts = None
            if its in EXCHANGES and self.compares_shares:  # those in it find that this rank takes no part
                its, counts = ALL_TO_ALL, ([0] * ranks, [0] * ranks)
            elif its in EXCHANGES and (said.size < 0 or ranks == 2):
                its, counts = ALL_TO_ALL, self._shares(leader, number)
            elif said.size >= COUNTED and (theirs := board.counts(leader, number)) is not None:
                shares = theirs[1] if its is ALL_GATHER else theirs[0]
                mine = [shares[rank]]
                counts = (mine, shares) if its is ALL_GATHER else (shares, mine)
            if counts is None and not 0 <= said.size < COUNTED:
                return  # a call of ragged shares, which this rank does not know: the ranks in it do not return
            if counts is not None:
                send, recv = (torch.zeros(sum(each), dtype=said.dtype) for each in counts)
            elif its.buffers:
                send, recv = tensors_of(its, said, rank, ranks)  # type: ignore[assignment]
            else:
                send = recv = None  # type: ignore[assignment]
            self._carry_out(Call(its, send, recv, op, said.root if its.rooted else None, counts))

    def _shares(self, leader: int, number: int) -> tuple[list[int], list[int]] | None:
        """Return what this rank sends and receives to take part in an exchange; None if it does not know."""
        board, me, ranks = self.board, self._communicator.rank, self._communicator.size
        sent, received = [0] * ranks, [0] * ranks
        for maker in self._makers(leader, number):
            theirs = board.counts(maker, number)
            if theirs is None or len(board.ranks) < ranks:
                return None
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
        ways = [f"{listed(ranks)}: {call}" for call, ranks in calls.items()]
        if own != number and board.has(board.own, own):
            ways.append(f"this rank, {self._communicator.rank}, is in {board.said(board.own, own)}")
        return CallsDifferError(calls_differ(self._communicator.size, ways))
