"""The watchdog's state machines under a clock of the test's own: no processes, no threads, no time."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest

from hpcdist.watch import calls_under_way
from hpcdist.watch.calls_under_way import State, UnderWay, under_way
from hpcdist.watch.endpoint import Endpoint
from hpcdist.watch.escalation import (
    AGAIN_SECONDS,
    NEWS_SECONDS,
    STUCK_SECONDS,
    YIELD_SECONDS,
    end_blocked,
    end_in_background,
)
from hpcdist.watch.exit import Decision, ExitStates, Look
from hpcdist.watch.liveness import next_node
from hpcdist.watch.report import PATIENCE_SECONDS, Collective, Report, Reports

LIMIT = 10.0


class Fake:
    """A call under way, whose ways to end are noted; those in ``fails`` take no effect, or raise."""

    def __init__(self, facts: str = "", fails: str = "") -> None:
        def way(name: str) -> Any:
            def use(*_: Any) -> bool:
                self.used.append(name)
                if name in fails.split():
                    raise OSError
                return True

            return use

        has = set(facts.split())
        self.used: list[str] = []
        self.is_reported = "reported" in has
        record = ("a call",)
        work = SimpleNamespace(_interrupt=way("cancel"), _call=record)
        blocked = SimpleNamespace(call=record, work=work if "work" in has else None)
        group = SimpleNamespace(journal=SimpleNamespace(blocked=lambda: [blocked]))
        backend = SimpleNamespace(
            ends_waits="ends_waits" in has,
            faults=SimpleNamespace(
                interrupts_all=lambda: "ulfm" in has, interrupt=way("interrupt"), set_revoke_reason=way("reason")
            ),
            queue=SimpleNamespace(running=work if "running" in has else None, fail=way("give up")),
            outstanding=lambda: work if "on_device" in has else None,
        )
        self.call = UnderWay(group, record, backend)  # type: ignore[arg-type]
        self.abort = way("abort")

    def attempt(self, action: Any, *arguments: Any) -> bool:
        try:
            return action(*arguments) is not False
        except OSError:
            return False

    def in_background(self) -> bool:
        return end_in_background(self.call, "why", self.is_reported, self.attempt)

    def blocked(self) -> list[str | float]:
        """Return what is done, and the seconds that are given."""
        found: list[str | float] = []
        self.call.thread = 1
        ways = end_blocked(self.call, "why", self.is_reported, self.attempt, self.abort)
        for seconds in chain(ways, [None]):
            found += self.used
            self.used.clear()
            found += [] if seconds is None else [seconds]
        return found


# -- calls ---------------------------------------------------------------------------------------------------


def seen(now: float) -> UnderWay:
    """Return a call that was first seen at a moment."""
    return UnderWay(None, object(), None, first_seen=now)  # type: ignore[arg-type]


def test_a_call_is_due_when_its_limit_is_over_until_it_is_asked_about() -> None:
    watched = seen(0.0)
    assert [watched.is_due(now, LIMIT) for now in (0.0, 5.0, 9.9, 10.0, 10.5)] == [False] * 3 + [True] * 2
    assert watched.since == 10.0
    watched.state = State.ASKING
    assert not watched.is_due(30.0, LIMIT)
    watched.make_due(31.0)  # a lower rank asks too
    assert watched.is_due(31.0, LIMIT)
    assert watched.since == 31.0


def test_a_call_that_goes_on_is_the_same_object_and_one_that_ended_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, now = seen(0.0), [seen(0.0)]
    now[0].record, now[0].thread = first.record, 7
    monkeypatch.setattr(calls_under_way, "blocking", lambda: now)
    assert under_way([first]) == [first]
    assert first.thread == 7  # another thread waits for it
    assert under_way([]) == now


def test_a_call_is_not_overdue_any_more_once_the_rank_that_was_known_to_have_ended_has_answered() -> None:
    watched = seen(0.0)
    assert watched.is_due(2.0, 2.0)
    watched.state = State.RUNNING
    assert not watched.is_due(3.0, LIMIT)
    assert watched.is_due(LIMIT, LIMIT)


@pytest.mark.parametrize(
    ("facts", "fails", "expected"),
    [
        ("", "", ["interrupt", STUCK_SECONDS, "abort"]),
        ("", "interrupt", ["interrupt", AGAIN_SECONDS, "interrupt", "abort"]),
        ("work", "", ["cancel", STUCK_SECONDS, "interrupt", STUCK_SECONDS, "abort"]),
        ("work", "cancel", ["cancel", "interrupt", STUCK_SECONDS, "abort"]),
        ("reported", "", ["reason", YIELD_SECONDS, "interrupt", STUCK_SECONDS, "abort"]),
        ("reported ulfm", "", ["reason", NEWS_SECONDS, "interrupt", STUCK_SECONDS, "abort"]),
        ("ends_waits", "", []),
        ("ends_waits work", "", ["cancel", STUCK_SECONDS]),
    ],
)
def test_the_ways_to_end_a_blocked_call_gentlest_first(facts: str, fails: str, expected: list[str | float]) -> None:
    assert Fake(facts, fails).blocked() == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ("work running", ["interrupt", "give up"]),
        ("work running ends_waits", ["give up"]),
        ("work running reported", ["reason", "give up"]),
        ("work running reported ulfm", ["reason", "give up", "interrupt"]),
        ("work on_device", ["interrupt"]),
        ("work", []),
    ],
)
def test_the_ways_to_end_a_queued_call(facts: str, expected: list[str]) -> None:
    for fails in ("", "interrupt", "reason"):
        call = Fake(facts, fails)
        assert call.in_background() == bool(expected)
        assert call.used == expected


# -- many ranks ----------------------------------------------------------------------------------------------


class Simulated:
    """Ranks that wait in one call, each with its own state machine; datagrams arrive at once."""

    def __init__(self, ranks: int, absent: set[int]) -> None:
        self.now = 0.0
        self.collective = Collective("0", 1, "all_reduce")
        self.waiting = [rank for rank in range(ranks) if rank not in absent]
        self.size = ranks
        self.watched = {rank: seen(0.0) for rank in self.waiting}
        self.reports = {rank: Reports(lambda: self.now) for rank in self.waiting}
        self.asked: list[tuple[int, float]] = []
        self.ended: dict[int, float] = {}

    def run(self, seconds: float, dies_after_asking: int = -1) -> None:
        """Let time pass in steps of 20 ms; one rank may fall silent once it has asked."""
        dead: set[int] = set()
        while self.now < seconds and len(self.ended) + len(dead) < len(self.waiting):
            for rank in [each for each in self.waiting if each not in self.ended and each not in dead]:
                watched, reports = self.watched[rank], self.reports[rank]
                if not watched.is_due(self.now, LIMIT):
                    continue
                if reports.find(self.collective) is None:
                    if self.now < reports.turn(self.collective, rank, watched.since):
                        continue
                    watched.state = State.ASKING
                    self.asked.append((rank, self.now))
                    for other in self.waiting:
                        self.reports[other].note_asker(self.collective, rank, self.size)
                    if rank == dies_after_asking:
                        dead.add(rank)
                        continue
                    for other in self.waiting:
                        self.reports[other].add(Report(self.collective, rank, "", [], True, True))
                self.ended[rank] = self.now
            self.now += 0.02


@pytest.mark.parametrize("absent", [{7}, {0, 1, 2}, {1}], ids=str)
def test_one_of_many_ranks_asks_and_all_end_soon(absent: set[int]) -> None:
    ranks = Simulated(64, absent)
    ranks.run(30.0)
    assert len(ranks.asked) == 1
    assert ranks.asked[0][0] == min(ranks.waiting)
    assert set(ranks.ended) == set(ranks.waiting)
    assert max(ranks.ended.values()) < Reports().turn(None, min(ranks.waiting), LIMIT) + 0.1


def test_an_asker_that_falls_silent_is_followed_by_another() -> None:
    ranks = Simulated(8, {7})
    ranks.run(30.0, dies_after_asking=0)
    assert [rank for rank, _ in ranks.asked] == [0, 1]
    assert PATIENCE_SECONDS <= ranks.asked[1][1] - ranks.asked[0][1] < PATIENCE_SECONDS + 0.5
    assert set(ranks.ended) == set(range(1, 7))


# -- the exit ------------------------------------------------------------------------------------------------

CALM = Look({}, [], False, True)


def exit_after(states: ExitStates, looks: list[tuple[float, Look]]) -> list[Decision]:
    return [states.decide(look, now) for now, look in looks]


def test_a_rank_that_leaves_waits_for_those_that_are_busy_and_looks_ever_more_rarely() -> None:
    states = ExitStates(LIMIT, 0.0)
    pauses = []
    for now in range(100):
        assert states.decide(CALM, float(now)) is Decision.WAIT
        pauses.append(states.pause)
    assert pauses[0] < pauses[1] < pauses[2]
    assert pauses[-1] == 5.0


def test_a_call_that_waits_for_this_rank_at_two_looks_aborts_the_job() -> None:
    waits = CALM._replace(waits={(2, "0", 7): "rank 2 waits for it in barrier #7"})
    states = ExitStates(LIMIT, 0.0)
    assert exit_after(states, [(0.2, waits), (0.4, waits)]) == [Decision.WAIT, Decision.END]
    assert "rank 2 waits for it in barrier #7" in states.reason
    passing = ExitStates(LIMIT, 0.0)
    assert exit_after(passing, [(0.2, waits), (0.4, CALM), (0.6, waits)]) == [Decision.WAIT] * 3


def test_a_process_that_is_stuck_is_waited_for_until_the_limit_though_others_come_and_go() -> None:
    stuck = CALM._replace(stuck=["process 12 on n2 does not answer"])
    states = ExitStates(LIMIT, 0.0)
    looks = [(float(now), stuck._replace(lacks_one=now % 2 == 0)) for now in range(11)]
    decisions = exit_after(states, looks)
    assert decisions == [Decision.WAIT] * 10 + [Decision.ABORT]
    assert "process 12 on n2 does not answer" in states.reason


def test_a_process_that_goes_on_starts_the_limit_again() -> None:
    stuck = CALM._replace(stuck=["process 12 on n2 is stopped"])
    states = ExitStates(LIMIT, 0.0)
    looks = [(1.0, stuck), (9.0, stuck), (9.5, CALM), (19.0, stuck), (28.9, stuck)]
    assert set(exit_after(states, looks)) == {Decision.WAIT}
    assert states.decide(stuck, 29.0) is Decision.ABORT


def test_a_process_that_misses_an_answer_is_asked_again_soon_and_not_given_up_for_the_pause_before() -> None:
    silent = CALM._replace(stuck=["process 12 on vm does not answer"])
    states = ExitStates(2.0, 0.0)
    exit_after(states, [(float(now), CALM) for now in range(0, 50, 5)])
    assert states.pause == 5.0
    assert states.decide(silent, 50.0) is Decision.WAIT
    assert states.pause == 1.0
    assert exit_after(states, [(51.0, silent), (51.5, CALM), (56.5, silent)]) == [Decision.WAIT] * 3


def test_after_a_death_a_rank_leaves_once_nobody_else_stays() -> None:
    alone = Look({}, [], True, False)
    states = ExitStates(LIMIT, 0.0)
    busy = alone._replace(others_stay=True)
    assert exit_after(states, [(1.0, busy), (2.0, busy), (3.0, alone)]) == [
        Decision.WAIT,
        Decision.WAIT,
        Decision.LEAVE,
    ]
    at_once = ExitStates(LIMIT, 0.0)  # it may have ended with all others, whose end is on its way
    assert exit_after(at_once, [(1.0, alone), (2.0, alone)]) == [Decision.WAIT, Decision.LEAVE]


# -- the next node -------------------------------------------------------------------------------------------


def endpoints(nodes: str) -> dict[int, Endpoint]:
    return {rank: Endpoint((), 0, 0, "", rank, "", node, "", node) for rank, node in enumerate(nodes)}


@pytest.mark.parametrize("nodes", ["aabb", "aab", "abb", "abcd", "abcabc", "aaaabc", "abbbbbbb"])
def test_every_rank_is_watched_by_one_rank_of_another_node(nodes: str) -> None:
    where = endpoints(nodes)
    watched = [each for rank in where for each in next_node(rank, where)]
    assert sorted(watched) == list(where)
    assert all(nodes[rank] != nodes[each] for rank in where for each in next_node(rank, where))


def test_the_node_after_one_that_has_ended_is_watched_too() -> None:
    where = endpoints("aabbcc")
    watched = [each for rank in (0, 1, 4, 5) for each in next_node(rank, where, ended=[2, 3])]
    assert sorted(watched) == [0, 1, 4, 5]


def test_on_one_node_nobody_watches() -> None:
    assert next_node(0, endpoints("aaa")) == []
    assert next_node(0, endpoints("abb"), ended=[1, 2]) == []
