"""Decisions of an elastic job's meetings, and snapshots of a state, without processes."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from hpcdist.beyond.elastic import elastic
from hpcdist.beyond.membership import Report, Status, count_rivals, decide
from hpcdist.beyond.snapshot import Snapshot


def report(number: int, status: Status = Status.FAILED, step: int = 7, **more: int) -> Report:
    made = Report(number, status, epoch=3, size=4, step=step, made=5, changes=1, recent=1)
    return made._replace(**more)


def spare(number: int, step: int = -1) -> Report:
    return report(number, Status.AGAIN, step)


def test_spares_take_the_places_of_the_dead_lowest_first():
    found = decide([report(0), report(3), spare(4), spare(5), spare(6)], [0, 1, 2, 3], 1, 20)
    assert not found.ends
    assert not found.reason
    assert (found.members, found.lost, found.epoch, found.changes, found.remakes) == ([0, 4, 5, 3], [1, 2], 4, 2, True)


def test_without_spares_the_ranks_behind_move_up_and_the_farthest_is_the_source():
    found = decide([report(1), report(3, step=8), report(2)], [0, 1, 2, 3], 1, 20)
    assert (found.members, found.source) == ([1, 2, 3], 2)


def test_a_spare_that_has_the_state_saves_the_job_if_all_ranks_have_died():
    found = decide([spare(4), spare(5, step=9)], [0, 1], 1, 20)
    assert (found.ends, found.reason, found.members, found.source) == (False, "", [5, 4], 0)
    assert "all 2 ranks of the job have died" in decide([spare(4), spare(5)], [0, 1], 1, 20).reason


@pytest.mark.parametrize(
    ("reports", "least", "most", "words"),
    [
        ([report(0)], 2, 20, "rank 1 of 2 died and 1 are left, fewer than min_size=2"),
        ([report(0, recent=4)], 1, 4, "rank 1 died after 4 other changes within an hour"),
        ([report(0, Status.LEFT), report(1)], 1, 20, "a rank has left the loop"),
        ([report(0), report(1, Status.FINISHED)], 1, 20, "a step has failed though no rank was lost"),
    ],
)
def test_errors(reports, least, most, words):
    found = decide(reports, [0, 1], least, most)
    assert not found.ends
    assert words in found.reason
    assert not found.remakes


def test_the_end_and_a_beginning_need_no_new_group():
    for status, ends in ((Status.FINISHED, True), (Status.BEGINS, False)):
        found = decide([report(0, status), report(1, status), spare(2)], [0, 1], 1, 20)
        assert (found.ends, found.reason, found.members, found.remakes) == (ends, "", [0, 1], False)


def test_a_rank_that_has_finished_makes_the_last_step_again_with_the_others():
    found = decide([report(0, Status.FINISHED, step=8), report(1, step=7)], [0, 1, 2], 1, 20)
    assert (found.ends, found.reason, found.source, found.remakes) == (False, "", 0, True)


def test_a_part_that_others_may_go_on_without_ends():
    found = decide([report(0), spare(2)], [0, 1], 1, 20, rivals=3)
    assert (found.ends, found.remakes) == (False, False)
    assert "2 processes are left here, and 3 that they cannot reach may go on" in found.reason


def test_of_two_parts_at_most_one_goes_on_whatever_each_knows_of_the_dead():
    for living in product("ab", repeat=5):  # the part in which each process is
        for dead in product((False, True), repeat=5):
            part = {name: {i for i in range(5) if living[i] == name and not dead[i]} for name in "ab"}
            lost = {name: {i for i in range(5) if living[i] == name and dead[i]} for name in "ab"}
            if not all(part.values()):
                continue
            rivals = [count_rivals(part[own], part[other] | lost[other]) for own, other in ("ab", "ba")]
            assert any(rivals), (part, lost)
            if not any(dead):
                assert not all(rivals), (part, lost)


def test_of_two_halves_the_one_with_the_lowest_process_goes_on():
    assert count_rivals([0, 3], [1, 2]) == 0
    assert count_rivals([1, 2], [0, 3]) == 2
    assert count_rivals([4], []) == 0


@pytest.mark.parametrize(
    "reports",
    [
        [report(0, Status.AGAIN, recent=20), report(1, Status.AGAIN, recent=20)],
        [report(0), report(1, Status.AGAIN)],
        [report(0), report(1, Status.BEGINS)],
    ],
)
def test_ranks_that_could_not_begin_together_make_the_group_again(reports):
    found = decide(reports, [0, 1], 1, 20)
    assert (found.ends, found.reason, found.members, found.remakes) == (False, "", [0, 1], True)


@pytest.mark.parametrize("status", [Status.FINISHED, Status.LEFT])
def test_nobody_takes_the_place_of_one_that_dies_at_the_end(status):
    found = decide([report(0, Status.FINISHED), report(1, status), spare(3)], [0, 1, 2], 1, 20)
    assert (found.ends, found.reason, found.members, found.lost) == (True, "", [0, 1], [2])


def test_the_one_that_knows_most_counts_of_changes_and_meetings():
    found = decide([report(0, epoch=2, changes=1), report(1, epoch=5, changes=4)], [0, 1, 2], 1, 20)
    assert (found.epoch, found.changes) == (6, 5)
    recent = decide([report(0, recent=0), report(1, recent=4)], [0, 1, 2], 1, 4)
    assert "rank 2 died after 4 other changes within an hour" in recent.reason


def test_a_snapshot_restores_every_bit_and_is_no_view():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    snapshot = Snapshot({"model": model, "optimizer": optimizer})

    def train():
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    train()
    snapshot.take(1)
    train()
    after = model.weight.detach().clone()
    for _ in range(2):
        snapshot.restore()
        train()
        assert torch.equal(model.weight, after)
    snapshot.take(2)
    assert snapshot.step == 2


def test_arguments_are_checked_before_they_are_needed() -> None:
    """``max_changes_per_hour`` is, when a rank has died."""
    for given in ({"spares": 1.0}, {"min_size": None}, {"max_changes_per_hour": None}):
        with pytest.raises(TypeError, match="expected an int"):
            elastic(**given)
    for given in ({"stop": 3.0}, {"stop": 3, "start": None}, {"stop": 3, "snapshot_every": 1.5}):
        with pytest.raises(TypeError, match="expected an int"):
            next(elastic().steps({}, **given))
    for state in (None, {"model": torch.nn.Linear(1, 1).state_dict()}):
        with pytest.raises(TypeError, match="has no state_dict and load_state_dict; expected a module"):
            next(elastic().steps(state, 3))
    with pytest.raises(ValueError, match="snapshot_every >= 1"):
        next(elastic().steps({}, 3, snapshot_every=0))
