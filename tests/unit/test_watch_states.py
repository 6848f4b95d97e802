"""The watchdog's state machines under a clock of the test's own: no processes, no threads, no time."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hpcdist.watch.call_states import (
    NEWS_SECONDS,
    STUCK_SECONDS,
    YIELD_SECONDS,
    CallStates,
    Decision,
    Facts,
    Means,
    State,
    means_for,
)
from hpcdist.watch.channel import Endpoint
from hpcdist.watch.inquiry import PATIENCE_SECONDS, Inquiries, Subject, Verdict, turn
from hpcdist.watch.liveness import next_node
from hpcdist.watch.process_exit import Decision as ExitDecision
from hpcdist.watch.process_exit import ExitStates, Look

SYNC = Facts(
    has_work=False,
    in_background=False,
    on_device=False,
    is_running=False,
    ends_waits=False,
    interrupts_all=False,
    is_reported=False,
)
QUEUED = SYNC._replace(has_work=True, in_background=True, is_running=True)
LIMIT = 10.0


def at_once(since: float) -> float:
    return since


def kinds(facts: Facts) -> list[Means]:
    return [means for means, _ in means_for(facts)]


# -- calls ---------------------------------------------------------------------------------------------------


def test_a_call_is_asked_about_once_when_its_limit_is_over() -> None:
    states, record = CallStates(), object()
    decisions = []
    for now in (0.0, 5.0, 9.9, 10.0, 10.5, 30.0):
        states.see([record], now)
        decisions.append(states.decide(record, now, LIMIT, False, at_once))
    wait, ask = Decision.WAIT, Decision.ASK
    assert decisions == [wait, wait, wait, ask, wait, wait]
    assert states.state(record) is State.ASKING
    assert states.seconds(record, 30.0) == 30.0


def test_a_call_that_ended_is_forgotten_and_one_with_its_place_in_memory_begins_anew() -> None:
    states, record = CallStates(), object()
    states.see([record], 0.0)
    states.see([], 5.0)
    states.see([record], 9.0)
    assert states.decide(record, 12.0, LIMIT, False, at_once) is Decision.WAIT
    assert states.seconds(record, 12.0) == 3.0


def test_a_rank_waits_for_its_turn_and_takes_the_verdict_that_comes_before() -> None:
    states, record = CallStates(), object()
    states.see([record], 0.0)
    later = lambda since: since + 0.3  # noqa: E731
    assert states.decide(record, 10.0, LIMIT, False, later) is Decision.WAIT
    assert states.any_due()
    assert states.decide(record, 10.2, LIMIT, True, later) is Decision.ACCEPT
    assert states.decide(record, 10.3, LIMIT, False, later) is Decision.ASK
    assert not states.any_due()


def test_of_two_that_ask_the_higher_one_waits_again() -> None:
    states, record = CallStates(), object()
    states.see([record], 0.0)
    assert states.decide(record, 10.0, LIMIT, False, at_once) is Decision.ASK
    states.yield_to_lower(record, 11.0)
    assert states.decide(record, 11.0, LIMIT, True, at_once) is Decision.ACCEPT


def test_a_call_that_is_being_ended_is_not_asked_about() -> None:
    states, record = CallStates(), object()
    states.see([record], 0.0)
    states.end(record, 10.0, SYNC)
    assert states.state(record) is State.ENDING
    assert states.decide(record, 20.0, LIMIT, True, at_once) is Decision.WAIT


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (SYNC, [Means.INTERRUPT, Means.ABORT]),
        (SYNC._replace(has_work=True), [Means.CANCEL, Means.INTERRUPT, Means.ABORT]),
        (SYNC._replace(is_reported=True), [Means.SET_REASON, Means.INTERRUPT, Means.ABORT]),
        (SYNC._replace(ends_waits=True), []),
        (SYNC._replace(ends_waits=True, has_work=True), [Means.CANCEL]),
        (QUEUED, [Means.INTERRUPT, Means.GIVE_UP]),
        (QUEUED._replace(ends_waits=True), [Means.GIVE_UP]),
        (QUEUED._replace(is_reported=True), [Means.SET_REASON, Means.GIVE_UP]),
        (QUEUED._replace(is_reported=True, interrupts_all=True), [Means.SET_REASON, Means.GIVE_UP, Means.INTERRUPT]),
        (QUEUED._replace(is_running=False), []),
        (QUEUED._replace(is_running=False, on_device=True), [Means.INTERRUPT]),
    ],
)
def test_the_means_to_end_a_wait_gentlest_first(facts: Facts, expected: list[Means]) -> None:
    assert kinds(facts) == expected


def test_no_blocked_call_is_without_an_end() -> None:
    """Whatever the facts, a blocked call that no library ends comes to an abort, or its wait is given up."""
    flags = [False, True]
    for has_work, on_device, is_running, interrupts_all, is_reported in (
        (a, b, c, d, e) for a in flags for b in flags for c in flags for d in flags for e in flags
    ):
        blocked = Facts(has_work, False, False, is_running, False, interrupts_all, is_reported)
        assert kinds(blocked)[-1] is Means.ABORT
        assert all(math.isfinite(seconds) for _, seconds in means_for(blocked)[:-1])
        queued = Facts(True, True, on_device, True, False, interrupts_all, is_reported)
        assert {Means.GIVE_UP, Means.INTERRUPT} & set(kinds(queued))


def use(states: CallStates, record: Any, now: float, fails: set[Means]) -> list[Means]:
    """Use the means that are due, of which some take no effect."""
    used = []
    while (means := states.next_means(record, now)) is not None:
        used.append(means)
        states.note(record, now, means not in fails)
    return used


def test_each_means_gets_its_time_and_the_next_one_follows() -> None:
    states, record = CallStates(), object()
    states.see([record], 0.0)
    states.end(record, 10.0, SYNC._replace(has_work=True, is_reported=True, interrupts_all=True))
    assert use(states, record, 10.0, {Means.CANCEL}) == [Means.CANCEL, Means.SET_REASON]
    assert use(states, record, 10.0 + NEWS_SECONDS / 2, set()) == []
    assert use(states, record, 10.0 + NEWS_SECONDS, set()) == [Means.INTERRUPT]
    assert states.was_interrupted(record)
    assert use(states, record, 10.0 + NEWS_SECONDS + STUCK_SECONDS - 0.1, set()) == []
    assert use(states, record, 10.0 + NEWS_SECONDS + STUCK_SECONDS, set()) == [Means.ABORT]
    assert use(states, record, math.inf, set()) == []


def test_where_mpi_cannot_interrupt_the_job_is_aborted_at_once_or_after_the_reporter_had_its_time() -> None:
    for is_reported, first in ((False, [Means.INTERRUPT, Means.ABORT]), (True, [Means.SET_REASON])):
        states, record = CallStates(), object()
        states.see([record], 0.0)
        states.end(record, 10.0, SYNC._replace(is_reported=is_reported))
        assert use(states, record, 10.0, {Means.INTERRUPT}) == first
        assert not states.was_interrupted(record)
        if is_reported:
            assert use(states, record, 10.0 + YIELD_SECONDS, {Means.INTERRUPT}) == [Means.INTERRUPT, Means.ABORT]


# -- many ranks ----------------------------------------------------------------------------------------------


class Simulated:
    """Ranks that wait in one call, each with its own state machine; datagrams arrive at once."""

    def __init__(self, ranks: int, absent: set[int]) -> None:
        self.now = 0.0
        self.record, self.subject = object(), Subject("0", 1, "all_reduce")
        self.waiting = [rank for rank in range(ranks) if rank not in absent]
        self.size = ranks
        self.states = {rank: CallStates() for rank in self.waiting}
        self.inquiries = {rank: Inquiries(lambda: self.now) for rank in self.waiting}
        self.asked: list[tuple[int, float]] = []
        self.ended: dict[int, float] = {}

    def run(self, seconds: float, dies_after_asking: int = -1) -> None:
        """Let time pass in steps of 20 ms; one rank may fall silent once it has asked."""
        dead: set[int] = set()
        while self.now < seconds and len(self.ended) + len(dead) < len(self.waiting):
            for rank in [each for each in self.waiting if each not in self.ended and each not in dead]:
                states, inquiries = self.states[rank], self.inquiries[rank]
                states.see([self.record], self.now)
                own_turn = lambda since, rank=rank, known=inquiries: max(  # noqa: E731
                    since + turn(rank), known.next_turn(self.subject, rank)
                )
                verdict = inquiries.verdict(self.subject)
                decision = states.decide(self.record, self.now, LIMIT, verdict is not None, own_turn)
                if decision is Decision.ASK:
                    self.asked.append((rank, self.now))
                    for other in self.waiting:
                        self.inquiries[other].note(self.subject, rank, self.size)
                    if rank == dies_after_asking:
                        dead.add(rank)
                        continue
                    for other in self.waiting:
                        self.inquiries[other].conclude(Verdict(self.subject, rank, "", [], True))
                if decision is not Decision.WAIT:
                    self.ended[rank] = self.now
            self.now += 0.02


@pytest.mark.parametrize("absent", [{7}, {0, 1, 2}, {1}], ids=str)
def test_one_of_many_ranks_asks_and_all_end_soon(absent: set[int]) -> None:
    ranks = Simulated(64, absent)
    ranks.run(30.0)
    assert len(ranks.asked) == 1
    assert ranks.asked[0][0] == min(ranks.waiting)
    assert set(ranks.ended) == set(ranks.waiting)
    assert max(ranks.ended.values()) < LIMIT + turn(min(ranks.waiting)) + 0.1


def test_an_asker_that_falls_silent_is_followed_by_another() -> None:
    ranks = Simulated(8, {7})
    ranks.run(30.0, dies_after_asking=0)
    assert [rank for rank, _ in ranks.asked] == [0, 1]
    assert PATIENCE_SECONDS <= ranks.asked[1][1] - ranks.asked[0][1] < PATIENCE_SECONDS + 0.5
    assert set(ranks.ended) == set(range(1, 7))


# -- the exit ------------------------------------------------------------------------------------------------

CALM = Look({}, [], False, True)


def exit_after(states: ExitStates, looks: list[tuple[float, Look]]) -> list[ExitDecision]:
    return [states.decide(look, now) for now, look in looks]


def test_a_rank_that_leaves_waits_for_those_that_are_busy_and_looks_ever_more_rarely() -> None:
    states = ExitStates(LIMIT, 0.0)
    pauses = []
    for now in range(100):
        assert states.decide(CALM, float(now)) is ExitDecision.WAIT
        pauses.append(states.pause)
    assert pauses[0] < pauses[1] < pauses[2]
    assert pauses[-1] == 5.0


def test_a_call_that_waits_for_this_rank_at_two_looks_aborts_the_job() -> None:
    waits = CALM._replace(waits={(2, "0", 7): "rank 2 waits for it in barrier #7"})
    states = ExitStates(LIMIT, 0.0)
    assert exit_after(states, [(0.2, waits), (0.4, waits)]) == [ExitDecision.WAIT, ExitDecision.END]
    assert "rank 2 waits for it in barrier #7" in states.reason
    passing = ExitStates(LIMIT, 0.0)
    assert exit_after(passing, [(0.2, waits), (0.4, CALM), (0.6, waits)]) == [ExitDecision.WAIT] * 3


def test_a_process_that_is_stuck_is_waited_for_until_the_limit_though_others_come_and_go() -> None:
    stuck = CALM._replace(stuck=["process 12 on n2 does not answer"])
    states = ExitStates(LIMIT, 0.0)
    looks = [(float(now), stuck._replace(lacks_one=now % 2 == 0)) for now in range(11)]
    decisions = exit_after(states, looks)
    assert decisions == [ExitDecision.WAIT] * 10 + [ExitDecision.ABORT]
    assert "process 12 on n2 does not answer" in states.reason


def test_a_process_that_goes_on_starts_the_limit_anew() -> None:
    stuck = CALM._replace(stuck=["process 12 on n2 is stopped"])
    states = ExitStates(LIMIT, 0.0)
    assert set(exit_after(states, [(1.0, stuck), (9.0, stuck), (9.5, CALM), (19.0, stuck)])) == {ExitDecision.WAIT}
    assert states.decide(stuck, 19.5) is ExitDecision.ABORT


def test_after_a_death_a_rank_leaves_once_nobody_else_stays() -> None:
    alone = Look({}, [], True, False)
    states = ExitStates(LIMIT, 0.0)
    busy = alone._replace(others_stay=True)
    assert exit_after(states, [(1.0, busy), (2.0, busy), (3.0, alone)]) == [
        ExitDecision.WAIT,
        ExitDecision.WAIT,
        ExitDecision.LEAVE,
    ]
    at_once = ExitStates(LIMIT, 0.0)  # it may have ended with all others, whose end is on its way
    assert exit_after(at_once, [(1.0, alone), (2.0, alone)]) == [ExitDecision.WAIT, ExitDecision.LEAVE]


def test_a_call_is_not_overdue_any_more_once_the_rank_that_was_said_to_have_ended_has_answered() -> None:
    states, record = CallStates(), object()
    states.see([record], 0.0)
    assert states.decide(record, 2.0, 2.0, False, at_once) is Decision.ASK
    states.withdraw(record)
    assert states.decide(record, 3.0, LIMIT, False, at_once) is Decision.WAIT
    assert states.decide(record, LIMIT, LIMIT, False, at_once) is Decision.ASK


# -- the next node -------------------------------------------------------------------------------------------


def places(nodes: str) -> dict[int, Endpoint]:
    return {rank: Endpoint((), 0, 0, "", "", rank, "", node, "", node) for rank, node in enumerate(nodes)}


@pytest.mark.parametrize("nodes", ["aabb", "aab", "abb", "abcd", "abcabc", "aaaabc", "abbbbbbb"])
def test_every_rank_is_watched_by_one_rank_of_another_node(nodes: str) -> None:
    where = places(nodes)
    watched = [each for rank in where for each in next_node(rank, where)]
    assert sorted(watched) == list(where)
    assert all(nodes[rank] != nodes[each] for rank in where for each in next_node(rank, where))


def test_the_node_after_one_that_has_ended_is_watched_too() -> None:
    where = places("aabbcc")
    watched = [each for rank in (0, 1, 4, 5) for each in next_node(rank, where, ended=[2, 3])]
    assert sorted(watched) == [0, 1, 4, 5]


def test_on_one_node_nobody_watches() -> None:
    assert next_node(0, places("aaa")) == []
    assert next_node(0, places("abb"), ended=[1, 2]) == []
