"""Elastic jobs that lose ranks anywhere: they end with the result of a job without failures, and leave none behind."""

from __future__ import annotations

import json
import os
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.faults.launch import HERE, PLAIN, ULFM, Job, some
from tests.programs import is_alive

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
SCRIPT = HERE / "elastic_job.py"
RANKS = 6
REPETITIONS = int(os.environ.get("HPCDIST_ELASTIC_RUNS", "1"))  # of each kind of random fault


def run(launcher: str, plan: dict[str, Any], ranks: int = RANKS) -> tuple[int, list[dict[str, Any]], str]:
    """Run a job to its end; return its status, what the ranks have told, and what they wrote to stderr."""
    with Job(launcher, ranks, [json.dumps(plan)], SCRIPT) as job:
        status = job.finish(150)
        pids = job.pids().values()
        job.until(lambda: not any(map(is_alive, pids)))
        return status, job.events(), job.stderr()


def ends(events: list[dict[str, Any]], stderr: str) -> list[dict[str, Any]]:
    """Return what the surviving ranks told at the end, by their last rank, once it is right."""
    found = [each for each in events if each["event"] == "end"]
    dead = {each["rank"] for each in events if each["event"] == "dies"}
    assert {each["rank"] for each in found} | dead == {each["rank"] for each in events}, stderr
    members = sorted((each for each in found if each["now"] is not None), key=lambda each: each["now"])
    assert [each["now"] for each in members] == list(range(members[0]["size"])), members
    assert all(each["right"] for each in members), members
    assert all(each["sizes"] == members[0]["sizes"] for each in members)
    return members


def seconds_to_next_step(events: list[dict[str, Any]]) -> float | None:
    """Return the time from the last death to the end of the first step after it on the last rank, if there is one."""
    died = max(each["time"] for each in events if each["event"] == "dies")
    after: dict[int, float] = {}
    for each in events:
        if each["event"] == "resumed" and each["time"] > died:
            after.setdefault(each["rank"], each["time"])
    return max(after.values()) - died if after else None


@pytest.mark.parametrize("launcher", ULFM)
def test_spares_take_the_places_of_the_dead_and_then_the_job_goes_on_smaller(launcher: str) -> None:
    """Two die at once, rank 0 among them, a third one in the recovery, and a fourth one later, in an async call."""
    die = {"0": {"step": 5}, "2": {"step": 5}, "1": {"setup": 2}, "3": {"step": 20}}
    status, events, stderr = run(launcher, {"spares": 2, "die": die, "async": True})
    members = ends(events, stderr)
    assert status == 0
    assert [each["rank"] for each in members] == [4, 5]
    assert members[0]["sizes"] == [4] * 5 + [3] * 15 + [2] * 10


@pytest.mark.parametrize("launcher", some(ULFM, 0))
def test_spares_may_die_in_the_first_meeting_and_in_the_last_one(launcher: str) -> None:
    """The default group, to which they do not belong, goes on after the first, and is still there after the last."""
    status, events, stderr = run(launcher, {"spares": 2, "die": {"2": {"meeting": 1}, "3": {"meeting": 3}}}, 4)
    assert status == 0, stderr
    assert [each["rank"] for each in ends(events, stderr)] == [0, 1]
    assert all(each["changes"] == 0 for each in events if each["event"] == "end")


def random_plan(kind: str, seed: int) -> dict[str, Any]:
    """Return a job with faults of a kind: who dies follows from the seed, and when in part from the machine."""
    chance = random.Random(seed)
    plan: dict[str, Any] = {"spares": chance.choice([0, 1, 2]), "steps": 40, "min_size": 2}
    plan["by"], plan["async"] = chance.choice(["mpi", "window"]), chance.random() < 0.5
    workers = RANKS - plan["spares"]
    first, second = chance.sample(range(workers), 2)
    moment = chance.uniform(0.02, 0.5)
    kept = chance.randrange(workers)  # has the state
    several = {
        each: chance.choice(
            [
                {"seconds": 2 * moment},
                {"step": chance.randrange(40)},
                {"setup": 2},
                {"saving": chance.randrange(3, 40, 4)},
            ]
        )
        for each in chance.sample([rank for rank in range(RANKS) if rank != kept], 4)
    }
    plan["die"] = {
        "several": several,
        "one": {first: {"seconds": moment}},
        "two": {first: {"seconds": moment}, second: {"seconds": moment}},
        "zero": {0: {"seconds": moment}},
        "step": {first: {"step": chance.randrange(40)}},
        "save": {first: {"saving": chance.randrange(3, 40, 4)}},
        "recovery": {first: {"step": chance.randrange(40)}, second: {"setup": 2}},
        "spare": {first: {"seconds": moment}, workers: {"spare": moment}} if plan["spares"] else {0: {"step": 39}},
    }[kind]
    return plan


@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize("kind", some(["several", "two", "recovery", "save", "one", "zero", "step", "spare"], 1))
def test_a_job_that_loses_ranks_at_random_ends_with_the_right_result(launcher: str, kind: str, tmp_path: Path) -> None:
    """HPCDIST_FAULTS=all takes every kind, HPCDIST_ELASTIC_RUNS=N each of them N times."""
    took = []
    for repetition in range(REPETITIONS):
        plan = random_plan(kind, repetition)
        if kind in ("several", "save"):
            plan["save"] = str(tmp_path / str(repetition))
        status, events, stderr = run(launcher, plan)
        assert status == 0, f"{plan}\n{events}\n{stderr}"
        assert ends(events, f"{plan}\n{stderr}")
        seconds = seconds_to_next_step(events)
        took += [] if seconds is None else [seconds]
    if path := os.environ.get("HPCDIST_FAULTS_FIGURES"):
        with open(path, "a") as file:
            file.write(json.dumps({"elastic": kind, "seconds": took, "median": statistics.median(took or [0])}) + "\n")


@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize(
    ("plan", "words"),
    some(
        [
            (
                {"spares": 1, "die": {"0": {"step": 3}, "1": {"step": 3}}},
                "all 2 ranks of the job have died, and its state",
            ),
            ({"min_size": 3, "die": {"2": {"step": 3}}}, "rank 2 of 3 died and 2 are left, fewer than min_size=3"),
            ({"limit": 0, "die": {"1": {"step": 3}}}, "rank 1 died after 0 other changes within an hour"),
        ],
        1,
    ),
)
def test_a_job_that_cannot_go_on_says_why(launcher: str, plan: dict[str, Any], words: str) -> None:
    """The status is mpirun's, which returns 0 now and then after a death."""
    _, events, stderr = run(launcher, plan, 3)
    assert f"the elastic job cannot go on: {words}" in stderr
    assert not [each for each in events if each["event"] == "end"]


# a job, how many processes it has, and which of them are its ranks at the end
REPLACED = {
    # another spare knows of the process whose place was taken, which MPI does not count any more
    "and the others take long to recover": (
        {"spares": 2, "steps": 12, "slow": 3, "unknown": 1, "die": {"1": {"step": 5}}},
        4,
        [0, 2],
    ),
    "stopped in a meeting": ({"spares": 1, "steps": 5, "signal": "SIGSTOP", "die": {"1": {"meeting": 1}}}, 3, [0, 2]),
    "stopped in a step": ({"spares": 1, "timeout": 3, "signal": "SIGSTOP", "die": {"1": {"step": 5}}}, 4, [0, 3, 2]),
}


@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize("how", some([*REPLACED], 2))
def test_a_rank_that_dies_or_is_stopped_is_replaced(launcher: str, how: str) -> None:
    plan, processes, left = REPLACED[how]
    status, events, stderr = run(launcher, plan, processes)
    assert status == 0, stderr
    assert [each["rank"] for each in ends(events, stderr)] == left


@pytest.mark.parametrize("launcher", PLAIN)
def test_a_rank_that_does_not_come_to_the_job_is_reported(launcher: str) -> None:
    plan = {"spares": 1, "timeout": 2, "die": {"1": {"late": 60}}}
    status, events, stderr = run(launcher, plan, 3)
    assert status != 0
    assert "rank 1 has not entered elastic #" in stderr
    assert not [each for each in events if each["event"] == "end"]


@pytest.mark.parametrize("launcher", PLAIN)
def test_without_ulfm_the_same_program_runs_and_says_what_it_cannot_survive(launcher: str) -> None:
    status, events, stderr = run(launcher, {"spares": 1, "steps": 5}, 3)
    assert status == 0, stderr
    assert [each["rank"] for each in ends(events, stderr)] == [0, 1]
    assert stderr.count("this job ends when a rank dies: its MPI does not survive that") == 1


@pytest.mark.parametrize("launcher", some(PLAIN, 0))
def test_without_ulfm_a_death_ends_the_job(launcher: str) -> None:
    status, events, _ = run(launcher, {"spares": 1, "die": {"1": {"step": 3}}}, 3)
    assert status != 0
    assert not [each for each in events if each["event"] == "end"]
