"""The default group reconfigured by torch's names: ranks chosen anew, in other orders and after a kill; refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from tests.faults.launch import HERE, LAUNCHERS, PLAIN, Job, Started

SCRIPT = HERE / "reconfigure_job.py"
MODEL = hasattr(torch.distributed, "_reconfigure")  # torch 2.14 has it on gloo
LOSING = ["torch" if MODEL else "hpcdist", "train", "lose"]
REFUSALS = {
    "none": "at least one handle",
    "twice": "handles must be unique",
    "unreadable": "Invalid reconfigure handle: 'xxx'",
    "used": "was already used",
}
EVERYONE = {rank: [rank, 4, 10.0, [0, 1, 2, 3]] for rank in range(4)}
pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


def told(started: Started) -> dict[str, dict[int, list[Any]]]:
    """Return what the ranks of a job have told when it has ended, by event and rank."""
    with started as job:
        assert job.finish(150) == 0, job.stderr()
        found: dict[str, dict[int, list[Any]]] = {}
        for each in job.events():
            found.setdefault(each["event"], {})[each["rank"]] = each["values"]
        return found


def check_planned(found: dict[str, dict[int, list[Any]]]) -> None:
    assert found["four"] == EVERYONE
    assert found["two"] == {
        3: [0, 2, 3.0, [3, 1]], 1: [1, 2, 3.0, [3, 1]], 0: [0, 2, 3.0, [0, 2]], 2: [1, 2, 3.0, [0, 2]]
    }  # fmt: skip
    assert found["one"] == {rank: [0, 1, 1.0, [rank]] for rank in range(4)}
    assert found["again"] == {rank: [4] for rank in range(4)}
    for event in ("old", "none", "twice", "unreadable", "used"):
        assert len(found[event]) == 4
    assert len(found["end"]) == 4


def check_left(found: dict[str, dict[int, list[Any]]]) -> None:
    assert found["trained four"] == {rank: [2.5] for rank in range(4)}
    assert set(found["dead"]) == {0, 1, 3}
    assert all("rank 2 when the job began has died" in text for _, text in found["dead"].values())
    left = [3, 1, 0]
    assert found["without 2"] == {rank: [left.index(rank), 3, 6.0, left] for rank in left}
    assert found["trained without 2"] == {rank: [2.0] for rank in left}
    assert found["without 0"] == {3: [0, 2, 3.0, [3, 1]], 1: [1, 2, 3.0, [3, 1]]}
    assert found["trained without 0"] == {1: [1.5], 3: [1.5]}
    assert set(found["end"]) == {1, 3}


@pytest.mark.parametrize("launcher", PLAIN)
def test_ranks_are_chosen_anew(launcher: str, tmp_path: Path) -> None:
    found = told(Job(launcher, 4, [str(tmp_path), "hpcdist"], SCRIPT))
    check_planned(found)
    assert found["four again"] == found["four at last"] == EVERYONE
    for rank, (is_dist_error, text) in found["old"].items():
        assert not is_dist_error
        assert f":{rank}:1:" in text.partition("is not among")[0]
        assert f"an older one is: hpcdist:{text.split(':')[1]}:{rank}:-1:" in text
    for event, words in REFUSALS.items():
        assert all(words in text for _, text in found[event].values()), found[event]
    assert len({name for (name,) in found["name"].values()}) == 1
    assert found["absent"][3][0]
    assert "rank 1 when the job began has not come within 0.5 s" in found["absent"][3][1]
    assert set(found["different"]) == {0, 2}
    assert all("was given another list of handles" in text for _, text in found["different"].values())


@pytest.mark.parametrize("launcher", [each for each in LAUNCHERS if each == "openmpi-ulfm"])
def test_the_ranks_that_are_left_go_on_with_the_group_and_its_module(launcher: str, tmp_path: Path) -> None:
    check_left(told(Job(launcher, 4, [str(tmp_path), *LOSING], SCRIPT)))


@pytest.mark.skipif(not MODEL, reason="torch has these names since 2.14")
@pytest.mark.parametrize("door", ["gloo", "torch"])
@pytest.mark.parametrize("launcher", PLAIN)
def test_the_same_by_torch_on_its_gloo_and_on_hpcdist(launcher: str, door: str, tmp_path: Path) -> None:
    found = told(Job(launcher, 4, [str(tmp_path), door, "train"], SCRIPT))
    check_planned(found)
    assert found["trained two"] == {rank: [1.5] for rank in range(4)}
    assert not any(is_dist_error for event in ("old", "none", "used") for is_dist_error, _ in found[event].values())
