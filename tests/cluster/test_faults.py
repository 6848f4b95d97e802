"""Ranks, links and launchers that fail on several hosts: every fault has a bounded end, which names what happened.

ULFM is Open MPI's `mpirun --with-ft ulfm`: there the other ranks raise and may go on. Elsewhere the job ends. In every
case no process of the job is left on any host.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster
from tests.cluster.launch import Job, run
from tests.faults.launch import LAUNCHERS, PLAIN

SCRIPT = Path(__file__).parents[1] / "faults" / "job.py"
pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
smoke = pytest.mark.smoke
ULFM = [each for each in LAUNCHERS if each == "openmpi-ulfm"]

START_SECONDS = 120.0
RAISE_SECONDS = 10.0  # from a death to the last error; 0.1 to 0.3 were measured
TIMEOUT = 2.0
REPORT_SECONDS = TIMEOUT + 12.0  # from a stop to the last error or the abort; 3.1 to 3.6 were measured
GONE_SECONDS = 15.0  # from the end of a job to that of its last process
LARGE = 1 << 20  # elements: 4 MiB, which go through node-shared memory and between nodes
LAYOUTS = [(2, 2), (1, 2), (2, 1)]


def start(cluster: Cluster, launcher: str, slots: tuple[int, ...], fault: str, call: str, **more: str) -> Job:
    """Start a job whose last rank, on the last host, goes wrong, and wait until it does so."""
    options = more.pop("options", "").split()
    settings = {"FAULT_TIMEOUT": str(TIMEOUT), "FAULT_VICTIM": str(sum(slots) - 1), **more}
    job = Job(cluster, launcher, slots, SCRIPT, [fault, call], options, **settings)
    try:
        job.wait("ready", sum(slots), START_SECONDS)
        assert job.ranks_alive(), f"the ranks cannot be seen\n{job.stderr()}"
        job.wait("fault", 1, START_SECONDS)
    except BaseException:
        job.close()
        raise
    return job


def assert_gone(job: Job, seconds: float = GONE_SECONDS) -> None:
    """Assert that no rank of a job is left on any host."""
    deadline = time.monotonic() + seconds
    while alive := job.ranks_alive():
        assert time.monotonic() < deadline, f"{alive}\n{job.stderr()}"
        time.sleep(0.2)


def assert_ended(job: Job, seconds: float) -> int:
    """Assert that the launcher ends in time and leaves no rank behind, and return its status."""
    try:
        status = job.finish(seconds)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the job has not ended after {seconds} s: {job.events()}\n{job.stderr()}")
    assert_gone(job)
    return status


# -- ULFM ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize(
    ("slots", "call", "count"),
    [
        pytest.param((2, 2), "all_reduce", 8, marks=smoke),
        pytest.param((2, 2), "all_reduce", LARGE, marks=smoke),
        pytest.param((1, 2), "barrier", 8, marks=smoke),
        ((2, 2), "async", 8),
        ((2, 2), "async", LARGE),
        ((2, 2), "broadcast", 8),
        ((2, 2), "broadcast", LARGE),
        ((1, 1, 1), "all_reduce", LARGE),
        ((1, 1, 1), "broadcast", LARGE),
        ((2, 2), "all_gather_object", 8),
        ((1, 2), "all_reduce", 8),
        ((2, 1), "all_reduce", LARGE),
        ((1, 1, 1, 1), "all_reduce", LARGE),
        ((1, 1, 1, 1), "all_gather", LARGE),
        ((1, 3), "all_gather", LARGE),
        ((1, 3), "reduce_scatter", LARGE),
        ((2, 2), "new_group", 8),
        ((1, 3), "broadcast_object", LARGE),
        ((2, 2), "gather_object", LARGE),
    ],
)
def test_all_others_raise_after_a_death_on_another_host(
    cluster: Cluster, launcher: str, slots: tuple[int, ...], call: str, count: int
) -> None:
    """None of them returns, and with a wrong value least of all: Open MPI's coll/han, which does, is left out."""
    with start(cluster, launcher, slots, "kill", call, FAULT_COUNT=str(count)) as job:
        raised = job.wait("raised", sum(slots) - 1, RAISE_SECONDS)
        assert len(raised) == sum(slots) - 1, job.stderr()
        assert job.events("passed") == []
        assert all(f"rank {sum(slots) - 1} of the group died" in each["text"] for each in raised)


@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize("call", [pytest.param("all_reduce", marks=smoke), "barrier", "async"])
def test_a_wrong_result_that_mpi_hands_over_as_a_success_is_not_returned(
    cluster: Cluster, launcher: str, call: str
) -> None:
    """With coll/han, as in a program that starts MPI by itself, MPI returns success, and the check after it raises."""
    with start(cluster, launcher, (2, 2), "kill", call, options="--mca coll_han_priority 35") as job:
        raised = job.wait("raised", 3, RAISE_SECONDS)
        assert len(raised) == 3, job.events()
        assert job.events("passed") == []


@smoke
@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_large_all_reduce_on_two_levels_is_survived(cluster: Cluster, launcher: str, fault: str) -> None:
    """The revocation reaches the ranks that wait on the node and those that wait between the nodes."""
    settings = {"FAULT_COUNT": str(LARGE), "FAULT_SHRINK": "1"}
    with start(cluster, launcher, (2, 2), fault, "all_reduce", **settings) as job:
        shrunk = job.wait("shrunk", 3, START_SECONDS)
        assert [each["sum"] for each in shrunk] == [[3.0] * 4] * 3, job.stderr()


@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize("slots", [pytest.param((1, 1, 1), marks=smoke), (2, 1)], ids=str)
def test_a_revoked_broadcast_does_not_abort_the_job(cluster: Cluster, launcher: str, slots: tuple[int, ...]) -> None:
    """Open MPI does if a request was freed whose message is on its way: in the first to sixth of such rounds."""
    with Job(cluster, launcher, slots, SCRIPT.parents[1] / "cluster" / "revoked_job.py", ["400000"]) as job:
        assert job.finish(120) == 0, job.stderr()


@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize("slots", [pytest.param((2, 1), marks=smoke), (2, 2)], ids=str)
def test_a_stopped_rank_that_was_left_out_does_not_keep_the_job(
    cluster: Cluster, launcher: str, slots: tuple[int, ...]
) -> None:
    """Alone on its host, nobody sees that it is stopped: it gives no answer, which counts as much."""
    settings = {"FAULT_SHRINK": "1", "FAULT_LEAVE": "0", "FAULT_START": "5"}
    with start(cluster, launcher, slots, "stop", "all_reduce", **settings) as job:
        assert len(job.wait("shrunk", sum(slots) - 1, START_SECONDS)) == sum(slots) - 1, job.stderr()
        assert assert_ended(job, 5 + 25) != 0
        state = "does not answer" if slots[1] == 1 else "is stopped"
        assert f"on n2 {state}: the job cannot end, and is aborted" in job.stderr()


@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize("slots", [pytest.param((2, 1), marks=smoke), (1, 2)], ids=str)
def test_nobody_waits_for_a_rank_that_left_without_a_word(
    cluster: Cluster, launcher: str, slots: tuple[int, ...]
) -> None:
    """The others raise, and go on or end with the job: of a rank alone on its host, mpirun mostly ends the job."""
    settings = {"FAULT_SHRINK": "1", "FAULT_LEAVE": "0", "FAULT_TIMEOUT": "90"}
    with start(cluster, launcher, slots, "leave", "all_reduce", **settings) as job:
        others = sum(slots) - 1
        texts = [each["text"] for each in job.wait("raised", others, 40)]
        known = ("rank 2 of the group died", "its process has ended")  # by MPI, or by the watchdog
        # the news of the death may come to one of them later than that of the revocation
        assert all(any(text in each for text in (*known, "another rank gave the group up")) for each in texts), texts
        assert len(texts) < others or any(text in each for text in known for each in texts), texts
        status = assert_ended(job, 40)  # by mpirun also before they have raised, in 1 of 15 runs
        assert status != 0 or (len(texts) == len(job.events("shrunk")) == others), job.stderr()


@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize("fault", [pytest.param("exception", marks=[smoke, pytest.mark.mpich]), "exit"])
def test_an_abort_under_ulfm_leaves_no_process_behind(cluster: Cluster, launcher: str, fault: str) -> None:
    with start(cluster, launcher, (2, 2), fault, "all_reduce") as job:
        assert assert_ended(job, 40) != 0  # ranks that catch the error are given 15 s


# -- jobs that end -------------------------------------------------------------------------------------------

ENDS = {
    "kill": (RAISE_SECONDS, ""),
    "exception": (RAISE_SECONDS, "ZeroDivisionError: the victim's own"),
    "exit": (RAISE_SECONDS, "this rank has left the program"),
    "leave": (RAISE_SECONDS + 5, ""),
    "stop": (REPORT_SECONDS, "has not entered all_reduce"),
}


@pytest.mark.parametrize("launcher", PLAIN)
@pytest.mark.parametrize("fault", ENDS)
@pytest.mark.parametrize("slots", [pytest.param((2, 2), marks=smoke), (2, 1)], ids=str)
def test_the_job_ends_on_all_hosts(cluster: Cluster, launcher: str, slots: tuple[int, ...], fault: str) -> None:
    seconds, words = ENDS[fault]
    timeout = TIMEOUT if fault == "stop" else 90.0  # all but a stop end long before it
    with start(cluster, launcher, slots, fault, "all_reduce", FAULT_TIMEOUT=str(timeout)) as job:
        assert assert_ended(job, seconds + 10) != 0
        # that it is stopped can only be seen on its host
        expected = "does not answer" if fault == "stop" and slots[1] == 1 else words
        assert expected in job.stderr()


LATE = """
import sys, torch
import hpcdist as dist
dist.init_process_group()
values = torch.full((int(sys.argv[2]) << 18,), float(dist.get_rank()))
if sys.argv[1] == "broadcast":
    dist.broadcast(values, 0)
elif dist.get_rank() == 0:
    dist.send(values, 2)
elif dist.get_rank() == 2:
    dist.recv(values, 0)
assert values[-1] == (dist.get_rank() if sys.argv[1] == "send" and dist.get_rank() == 1 else 0)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("call", "size", "rate"),  # MiB, for 1.7 s; and for 34 s, of which the sender's kernel holds the last 20
    [pytest.param("broadcast", 2, "10mbit", marks=smoke), ("send", 2, "10mbit"), ("send", 4, "1mbit")],
)
def test_a_rank_that_has_done_its_part_does_not_end_the_job(
    cluster: Cluster, launcher: str, call: str, size: int, rate: str
) -> None:
    """It leaves while what it has sent is still under way to the other host."""
    program = cluster.shared / "late.py"
    program.write_text(LATE)
    cluster.shape(rate)
    chosen = [each for each in LAUNCHERS[launcher] if each != "--oversubscribe"]
    done = run(cluster, (2, 1), [sys.executable, str(program), call, str(size)], options=chosen)
    assert done.returncode == 0, done.stderr
    assert "has left the program" not in done.stderr


COMPUTING = """
import sys, time
from datetime import timedelta
import torch
import hpcdist as dist
dist.init_process_group(timeout=timedelta(seconds=4))
dist.all_reduce(torch.ones(4))
if dist.get_rank() == int(sys.argv[1]):
    time.sleep(16)
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("host", [pytest.param(0, marks=smoke), 1])
def test_a_rank_that_no_datagram_reaches_may_compute_for_long(cluster: Cluster, launcher: str, host: int) -> None:
    """The others have left, get its questions, and no answer to theirs for longer than the timeout."""
    program = cluster.shared / "computing.py"
    program.write_text(COMPUTING)
    cluster.hosts[host].block("udp")
    chosen = [each for each in LAUNCHERS[launcher] if each != "--oversubscribe"]
    done = run(cluster, (2, 1), [sys.executable, str(program), str(2 * host)], options=chosen)
    assert done.returncode == 0, done.stderr
    assert "does not answer" not in done.stderr


def assert_reported(job: Job, ranks: int, call: str, said: str) -> None:
    """Assert that some ranks' calls raise, or the job is aborted and all of its ranks go; with a report either way."""
    deadline = time.monotonic() + REPORT_SECONDS
    while len(job.events("raised")) < ranks and job.process.poll() is None and job.ranks_alive():
        assert time.monotonic() < deadline, f"{job.events()}\n{job.stderr()}"
        time.sleep(0.1)
    assert f": {call}" in job.stderr(), job.stderr()
    assert said in job.stderr(), job.stderr()
    if "the job is aborted" in job.stderr():
        assert_gone(job)


WAITS = {  # call -> how many of ranks 0 and 1 wait for rank 2 in it, and what the report calls it
    "exchange": (2, "irecv from rank 2"),
    "batch": (2, "irecv from rank 2"),
    "halo": (2, "irecv from rank 2"),
    "scatter_object": (2, "scatter_object_list #3"),
    "recv_object": (1, "recv_object_list from rank 2"),
    "subgroups": (2, "new_group #3"),
    "local_group": (2, "create_group"),
    "window": (2, "Window #3"),
    "put": (1, "Window.put to rank 2"),
    "get": (1, "Window.get from rank 2"),
    "accumulate": (2, "Window.accumulate to rank 2"),
    "fetch_and_add": (2, "Window.fetch_and_add to rank 2"),
    "signal": (1, "Window.signal to rank 2"),
    "close": (2, "Window.close #4"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("call", [pytest.param(each, marks=[smoke] * (each == "put")) for each in WAITS])
def test_every_call_to_a_stopped_rank_has_an_end(cluster: Cluster, launcher: str, call: str) -> None:
    waiting, title = WAITS[call]
    with start(cluster, launcher, (1, 2), "stop", call) as job:
        assert_reported(job, waiting, title, "its process is stopped")


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("call", ["exchange", "subgroups", "local_group", "window"])
def test_every_call_over_a_lost_link_has_an_end(cluster: Cluster, launcher: str, call: str) -> None:
    """Rank 0 does not know what became of rank 2, which does not call."""
    with start(cluster, launcher, (1, 2), "absent", call) as job:
        cluster.hosts[1].set_port(False)
        title = WAITS[call][1].partition(" rank")[0]
        assert_reported(job, 1, title, "is not known" if "#" in title else "may not have met it")


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("way", [pytest.param("link", marks=smoke), "port"])
def test_after_a_lost_link_no_rank_is_left(cluster: Cluster, launcher: str, way: str) -> None:
    """Each side reports that the other one does not answer. Open MPI's mpirun then stays, and is ended by hand."""
    with start(cluster, launcher, (2, 2), "absent", "all_reduce") as job:
        time.sleep(0.5)
        lost = cluster.hosts[1]
        lost.set_link(False) if way == "link" else lost.set_port(False)
        if launcher in ULFM:
            assert len(job.wait("raised", 2, REPORT_SECONDS)) >= 2, job.stderr()
            assert "ranks 2, 3 " in job.stderr() or "rank 2 " in job.stderr()
            return
        assert_gone(job, REPORT_SECONDS + GONE_SECONDS)
        assert "the job is aborted" in job.stderr()


@smoke
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_end_with_their_launcher(cluster: Cluster, launcher: str) -> None:
    with start(cluster, launcher, (1, 1), "absent", "recv", FAULT_TIMEOUT="90") as job:
        for host in cluster.hosts[:2]:
            for pid, text in host.processes().items():
                if not text.startswith(f"{sys.executable} {SCRIPT}"):
                    with contextlib.suppress(RuntimeError):  # it has ended with another one
                        host.signal(pid, signal.SIGKILL)
        assert_gone(job)
