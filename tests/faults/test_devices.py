"""A call that a device never ends, and that no host waits for, ends with a report of who is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.launch import FIRST, HERE, Job

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
JOBS = HERE / "device_job.py"


@pytest.mark.parametrize("launcher", FIRST)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_rank_that_never_comes_is_named_and_the_communicator_is_ended(
    launcher: str, kind: str, tmp_path: Path
) -> None:
    with Job(launcher, 3, [kind], JOBS, FOLDER=str(tmp_path)) as job:
        job.wait("fault")
        raised = job.wait("raised", 2, 10)
        assert [each["rank"] for each in sorted(raised, key=lambda each: each["rank"])] == [0, 2], job.stderr()
        for each in raised:
            assert "all_reduce #1 of float32 [8]" in each["text"]
            assert "rank 1 has not entered all_reduce #1" in each["text"], each["text"]
            assert "ranks 0, 2 are in it" in each["text"]
        assert "device_job.py" in job.stderr()


@pytest.mark.parametrize("launcher", FIRST)
def test_a_rank_that_comes_late_is_waited_for(launcher: str, tmp_path: Path) -> None:
    with Job(launcher, 3, ["late"], JOBS, FOLDER=str(tmp_path)) as job:
        job.expect("done", 3)
        assert job.finish(20) == 0
        assert "has not ended" not in job.stderr()
