"""Few questions suffice for a report that names every missing rank, on every rank, across nodes too."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.faults.launch import FIRST, HERE, LAUNCHERS, PLAIN, ULFM, Job, some

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
JOBS = HERE / "asking_job.py"
TWO_NODES = "a,a,b,b"
RANKS = 6
EACH = 6  # datagrams a rank: it is asked, answers, is told, says so; the rest is for repetitions


def reports(job: Job) -> list[int]:
    """Return the ranks that wrote a report, not only that there is one."""
    text = re.sub(r"\n  ", " ", job.stderr())
    return [int(rank) for rank in re.findall(r"\[rank (\d+) of \d+\] hpcdist: .* traces: ", text)]


@pytest.mark.parametrize("launcher", FIRST)
@pytest.mark.parametrize("call", some(["async", "limit"], 1))
@pytest.mark.parametrize(("kind", "disk"), [("sleep", "0.6"), ("stop", "0")])
def test_one_rank_asks_and_every_error_names_who_is_missing(
    launcher: str, kind: str, disk: str, call: str, tmp_path: Path
) -> None:
    """A slow disk, to which each rank writes its trace, makes none look silent."""
    count = tmp_path / "count"
    with Job(launcher, RANKS, [kind, call], JOBS, COUNT=str(count), ASKING_DISK=disk) as job:
        job.wait("fault")
        raised = job.expect("raised", RANKS - 1, 20)
        where = "its process is stopped" if kind == "stop" else r"asking_job\.py:\d+ \(stay_away\)"
        for each in raised:
            assert re.search(rf"rank 1 has not entered all_reduce #2 .*{where}", each["text"]), each["text"]
            assert "ranks 0, 2 to 5 are in it" in each["text"]
        assert count.stat().st_size <= EACH * RANKS
        assert len(reports(job)) == (1 if call == "async" else 0), job.stderr()
        written = {path.name for path in job.folder.iterdir()}
        assert {f"trace_{rank}" for rank in range(RANKS) if kind != "stop" or rank != 1} <= written


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_rank_asks_for_all_that_block_inside_mpi(launcher: str, tmp_path: Path) -> None:
    count = tmp_path / "count"
    with Job(launcher, RANKS, ["sleep", "sync"], JOBS, COUNT=str(count)) as job:
        job.wait("fault")
        if launcher in PLAIN:
            assert job.finish(30) != 0
        else:
            raised = job.expect("raised", RANKS - 1, 20)
            assert all("rank 1 has not entered all_reduce #2" in each["text"] for each in raised), job.events()
        assert count.stat().st_size <= EACH * RANKS
        assert len(reports(job)) == 1, job.stderr()
        assert "rank 1 has not entered all_reduce #2" in job.stderr()


@pytest.mark.parametrize("launcher", FIRST)
def test_the_end_for_all_leaves_a_call_alone_that_ends_by_itself(launcher: str) -> None:
    with Job(launcher, 3, ["monitored", "sync"], JOBS) as job:
        job.wait("fault")
        if launcher in PLAIN:
            assert job.finish(30) != 0
        else:
            job.expect("raised", 2, 20)
            time.sleep(1)
        assert re.search(r"rank 1 .* monitored_barrier", job.stderr()), job.stderr()
        assert "Traceback" not in job.stderr()


@pytest.mark.parametrize("launcher", FIRST)
def test_another_rank_asks_where_the_one_that_asked_falls_silent(launcher: str) -> None:
    with Job(launcher, 4, ["sleep", "sync"], JOBS, ASKING_STOPS="0", ASKING_VICTIMS="3") as job:
        job.wait("fault")
        start = time.time()
        raised = job.wait("raised", 2, 4 + 2 + 10)
        assert time.time() - start < 4 + 2 + 10
        assert reports(job) in ([1], [2]), job.stderr()
        assert "rank 3 has not entered all_reduce #2" in job.stderr()
        assert "rank 0 has not entered all_reduce #2 of group '0'; its process is stopped" in job.stderr()
        if launcher not in PLAIN:
            assert all(re.search("rank 0 .* is stopped", each["text"]) for each in raised), job.events()


@pytest.mark.parametrize("launcher", ULFM)
def test_other_nodes_learn_at_once_that_a_process_has_ended(launcher: str) -> None:
    """Rank 1 ends while its node peer computes: nobody waits on the node where it can be seen."""
    settings = {"FAULT_NODES": TWO_NODES, "ASKING_TIMEOUT": "60", "ASKING_BUSY": "0"}
    with Job(launcher, 4, ["leave", "sync"], JOBS, **settings) as job:
        start = job.wait("fault")[0]["time"]
        raised = job.wait("raised", 2, 2 + 5 + 8)
        assert {each["rank"] for each in raised} == {2, 3}, job.stderr()
        assert max(each["time"] for each in raised) - start < 2 + 5 + 8
        for each in raised:
            assert re.search(r"rank 1 is not in all_reduce #2 .*its process has ended", each["text"]), each["text"]
            assert "Timed out" not in each["text"]


@pytest.mark.parametrize("launcher", FIRST)
def test_a_node_mate_says_why_a_rank_of_another_node_is_silent(launcher: str) -> None:
    settings = {"FAULT_NODES": TWO_NODES, "ASKING_VICTIMS": "2"}
    with Job(launcher, 4, ["stop", "async"], JOBS, **settings) as job:
        job.wait("fault")
        raised = job.wait("raised", 3, 20)
        assert {each["rank"] for each in raised} == {0, 1, 3}, job.stderr()
        for each in raised:
            assert re.search(r"rank 2 .*its process is stopped .* \(process \d+( on .*)?\)", each["text"]), each["text"]
