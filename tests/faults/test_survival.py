"""What a job survives, and that it continues."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import forked
from tests.faults.launch import FIRST, HERE, LAUNCHERS, PLAIN, SOURCE, ULFM, Job, some

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]


@pytest.mark.parametrize("launcher", some([*PLAIN, *ULFM], 1))
def test_what_raises_leaves_the_job_alive(launcher: str) -> None:
    with Job(launcher, 3, script=HERE / "calm_job.py") as job:
        status = job.finish(200)
        assert (status, len(job.events("calm"))) == (0, 3), job.stderr()


LATE = """
dist.init_process_group()
group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=1))
if ME == 1:
    time.sleep(60)
try:
    dist.all_gather_object([None] * 3, "here", group=group)
except dist.DistBackendError:
    os._exit(41)
"""


@pytest.mark.parametrize("launcher", FIRST)
def test_a_rank_late_for_the_first_objects_of_a_group_is_reported(launcher: str) -> None:
    with Job(launcher, 3, script=LATE) as job:
        assert job.finish(90) != 0
        assert re.search(r"has not ended after 1\.\d s", job.stderr())


MISSED = """
dist.init_process_group(timeout=timedelta(seconds=1))
if ME:
    time.sleep(4)
else:
    try:
        dist.barrier()
    except dist.DistBackendError as error:
        tell("raised", text=str(error))
os._exit(0)
"""


@pytest.mark.parametrize("launcher", ULFM)
# Open MPI gives the revoked barrier of 4 and 5 another class of error
@pytest.mark.parametrize("ranks", some([4, 3, 5], 1))
def test_a_missed_barrier_says_that_its_time_is_over(launcher: str, ranks: int) -> None:
    with Job(launcher, ranks, script=MISSED) as job:
        job.finish(120)
        (raised,) = job.events("raised")
        assert re.search(r"barrier #1 on group '0' has not ended after 1\.\d s", raised["text"])
        assert re.search("Timed out waiting 1000ms", raised["text"])  # what torch's programs look for


COMMUNICATOR = """
from hpcdist.backends.mpi.communicator import Communicator

def die(communicator):  # after the barrier that open_private begins with
    communicator.comm.Barrier()
    os.kill(os.getpid(), signal.SIGKILL)

dist.init_process_group()
younger = dist.new_group()
if ME == 1:
    Communicator.open_private = die
try:
    dist.gather_object(ME, [None] * 3 if ME == 0 else None)
except dist.DistBackendError as error:
    said = str(error)
dist.barrier(group=dist.shrink_group([1], group=younger))
tell("shrunk", said=said)
os._exit(0)
"""


@pytest.mark.parametrize("launcher", ULFM)
def test_a_death_while_a_communicator_is_made_does_not_keep_others_from_being_made(launcher: str) -> None:
    """Open MPI goes on to wait for the one that could not be made, if its parent is older."""
    with Job(launcher, 3, script=COMMUNICATOR) as job:
        job.finish(120)
        assert sorted(each["rank"] for each in job.events("shrunk")) == [0, 2], job.stderr()
        assert all("rank 1 of the group died" in each["said"] for each in job.events("shrunk"))


NODES_WINDOW = """
import warnings
from hpcdist.core import memory_file

create, names = memory_file.create, []

def note(nbytes):
    descriptor, name = create(nbytes)
    names.append(name)
    return descriptor, name

def die(_):
    for name in names:
        memory_file.remove(name)  # which a killed rank leaves behind, with no memory
    os.kill(os.getpid(), 9)

warnings.simplefilter("error")  # that of a node that cannot share memory, which is another matter
dist.init_process_group()
if ME == 1:
    memory_file.create = note
    setattr(memory_file, sys.argv[1], die)
tensor = torch.ones(1 << 20)
try:
    dist.all_reduce(tensor)
except dist.DistBackendError as error:
    assert "rank 1 of the group died" in str(error), error
else:
    sys.exit("all_reduce returned")
dist.shrink_group([1])
dist.all_reduce(tensor.fill_(1))
assert tensor.eq(2).all(), tensor
tell("went on")
"""


@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize("step", ["create", "open_by_name"])
def test_a_death_while_the_nodes_window_is_made(step: str, launcher: str) -> None:
    with Job(launcher, 3, [step], NODES_WINDOW) as job:
        job.expect("went on", 2)


@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize("count", some([100_000, 8, 100], 1), ids="{} elements".format)
@pytest.mark.parametrize(("fault", "timeout"), [("leave", 60), ("stop", 2)])
def test_a_rank_that_ulfm_does_not_count_as_dead_ends_the_wait(
    launcher: str, fault: str, timeout: int, count: int
) -> None:
    """The others raise; or where MPI is stuck in a send to that rank (100 elements), the job is aborted.

    A rank that ended by os._exit is noticed long before the timeout.
    """
    with Job(launcher, 3, [fault, "all_reduce"], FAULT_TIMEOUT=str(timeout), FAULT_COUNT=str(count)) as job:
        job.wait("fault")
        start = time.time()
        raised = job.wait("raised", 2, 2 + 5 + 8)
        assert time.time() - start < 2 + 5 + 8
        there = "is not in all_reduce #3 of group '0'; its process has ended"
        if fault == "stop":
            there = "has not entered all_reduce #3 of group '0'; its process is stopped"
        assert f"rank 1 {there}" in job.stderr()
        assert ("Timed out waiting" in job.stderr()) == (fault == "stop")
        assert len(raised) == 2 or "a call that was interrupted has not ended" in job.stderr()


def expect_a_smaller_group(job: Job, size: int) -> None:
    """Wait until the others have gone on without rank 1."""
    shrunk = job.expect("shrunk", size, 120)
    assert [each["sum"] for each in shrunk] == [[float(size)] * 4] * size, job.stderr()
    assert sorted(each["rank_now"] for each in shrunk) == list(range(size))


@pytest.mark.parametrize("launcher", ULFM)
def test_ranks_that_go_on_leave_together_and_in_bounded_time(launcher: str) -> None:
    """MPI_Finalize may hang after a death; and who leaves without it must not look dead to who is still busy."""
    with Job(launcher, 4, ["kill", "all_reduce"], FAULT_SHRINK="1", FAULT_LEAVE="3") as job:
        expect_a_smaller_group(job, 3)
        start = time.time()
        job.finish(3 + 20)
        assert time.time() - start >= 3
        assert [each["failed"] for each in job.events("late")] == [[]], job.stderr()


@pytest.mark.parametrize("launcher", ULFM)
def test_a_stopped_rank_that_was_left_out_does_not_keep_the_job_for_ever(launcher: str) -> None:
    with Job(launcher, 3, ["stop", "all_reduce"], FAULT_SHRINK="1", FAULT_LEAVE="0", FAULT_START="5") as job:
        expect_a_smaller_group(job, 2)
        assert job.finish(30) != 0
        assert "is stopped: the job cannot end" in job.stderr()


@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize(
    ("fault", "second", "nodes", "seconds"),
    [
        ("leave", "-1", "", 0),
        # MPI knows of the one, so that it can agree on the end without it, and would wait for the other for ever
        *(
            ("kill", "2", nodes, seconds)
            for nodes in some(["a,b,b,a", "a,a,a,a", "a,a,b,b"], 1)
            for seconds in (0, 3)  # rank 0 leaves so much later
        ),
    ],
)
def test_nobody_waits_at_the_end_for_a_rank_that_left_without_a_word(
    launcher: str, fault: str, second: str, nodes: str, seconds: int
) -> None:
    environment = {"FAULT_TIMEOUT": "60", "FAULT_SHRINK": "1", "FAULT_LEAVE": str(seconds), "FAULT_NODES": nodes}
    with Job(launcher, 4 if nodes else 3, [fault, "all_reduce"], FAULT_SECOND=second, **environment) as job:
        job.expect("shrunk", 2, 120)
        start = time.time()
        assert job.finish(seconds + 15) == 3
        assert time.time() - start >= seconds
        assert [each["failed"] for each in job.events("late")] == [[]], job.stderr()


REVOKING = """
dist.init_process_group(timeout=timedelta(seconds=60))
group, values = dist.new_group(), torch.ones(int(sys.argv[1]))
dist.all_reduce(values, group=group)
dist.all_gather_object([None] * 3, torch.ones(9000), group=group)
if ME == 0:
    time.sleep(1)
    dist.revoke_process_group(group)
    shared = group.cpu.collectives.node.shared
    before = shared and shared.window.step
start = time.time()
for _ in range(2):  # the call under way, and a later one
    try:
        if sys.argv[2] == "async":
            dist.all_reduce(values, group=group, async_op=True).wait()
        elif sys.argv[2] == "object":
            dist.all_gather_object([None] * 3, torch.ones(9000), group=group)
        else:
            dist.all_reduce(values, group=group)
    except dist.DistBackendError:
        tell("raised")
assert time.time() - start < 20
if ME == 0:  # its data would end the others' call under way
    assert shared is None or shared.window.step == before
dist.barrier()  # the default group lives on
tell("alive")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize("arguments", some([["1000000", "sync"], ["8", "sync"], ["8", "async"], ["8", "object"]], 2))
def test_a_revoked_group_takes_no_more_calls(launcher: str, arguments: list[str]) -> None:
    """On all its communicators: MPI's, the node's window, and the one for objects."""
    with Job(launcher, 3, arguments, REVOKING) as job:
        assert job.finish(90) == 0, job.stderr()
        assert (len(job.events("raised")), len(job.events("alive"))) == (6, 3), job.stderr()


@pytest.mark.parametrize("launcher", some(PLAIN, 1))
def test_without_ulfm_revoking_a_group_ends_the_job(launcher: str) -> None:
    with Job(launcher, 3, ["8", "sync"], REVOKING) as job:
        assert job.finish(90) != 0
        assert "was revoked by its rank 0 (revoke_process_group): without ULFM nothing ends" in job.stderr()


PREEMPTED = """
class Preempted(Exception): pass

def handle(*_):
    raise Preempted

os.environ["HPCDIST_SHM"] = "64K"
dist.init_process_group()
dist.all_reduce(torch.ones(4_000_000))
if ME:
    time.sleep(100)
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.5)
try:
    dist.all_reduce(torch.ones(4_000_000))
except Preempted:
    tell("left")
try:
    dist.all_reduce(torch.ones(4_000_000))
except dist.DistBackendError as error:
    tell("raised", text=str(error))
os._exit(1)
"""


@pytest.mark.parametrize("launcher", some(PLAIN, 1))
def test_a_rank_that_left_a_call_through_shared_memory_makes_no_others(launcher: str) -> None:
    """The others would take its next data for that of the call that it has left."""
    with Job(launcher, 2, script=PREEMPTED) as job:
        job.expect("left")
        (raised,) = job.expect("raised")
        assert "Preempted has ended an earlier call of this rank" in raised["text"]


DEATH = """
victim, before, call, after = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group()
exec(before)
if ME == victim:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    exec(call)
except dist.DistBackendError as error:
    tell("raised", text=str(error))
exec(after)
tell("goes on")
os._exit(0)
"""
# after a death MPI would leave such a receive as it is (MPI_ERR_PROC_FAILED_PENDING): it is matched no more
OF_ANYONE = """
if ME == 0:
    receive = work._request
    assert receive.message is None and receive not in receive._queue.waiting
dist.shrink_group([2])
"""
ANOTHER_WINDOW = """
window.close()
dist.shrink_group([2])
with dist.Window(4) as window:
    window.signal(1 - ME)
    window.wait_signal(1 - ME)
"""
# ranks and which of them dies, what each does before, then, and after it; which ranks raise, and their words
DEATHS = {
    "the messages of all ranks, with whomever": (
        (4, 0, "", "work = dist.irecv(torch.zeros(1_000_000), ME - 1); work.wait()", "dist.shrink_group([0])"),
        [1, 2, 3],
        "rank 0 of the group died",
    ),
    "a receive from anyone": (
        (3, 2, "", "work = dist.irecv(torch.zeros(8), None if ME == 0 else 0); work.wait()", OF_ANYONE),
        [0, 1],
        "of 3 failed: rank 2 of the group died",
    ),
    "a receive, while another rank shrinks the group": (
        (3, 2, "", "dist.irecv(torch.zeros(8), 2).wait() if ME == 0 else None", "dist.shrink_group([2])"),
        [0],
        "rank 2 of the group died",
    ),
    "a wait for a signal, not another window": (
        (3, 2, "window = dist.Window(4); dist.barrier()", "window.wait_signal(2)", ANOTHER_WINDOW),
        [0, 1],
        "failed: rank 2 of the group died",
    ),
    "a group that its members make": (
        (4, 1, "", "dist.new_group(list(range(4)), use_local_synchronization=True)", ""),
        [0, 2, 3],
        "the group takes no more calls",
    ),
    "a shrink that leaves out a rank that lives": (
        (
            4,
            1,
            "",
            "time.sleep(0 if ME < 3 else 3)\nif ME < 3: dist.shrink_group([3])",
            "ME < 3 and dist.shrink_group([1, 3])",
        ),
        [0, 2],
        "MPI counts ranks [1] of the group as dead, more than the [3] to exclude; call it again with all of them",
    ),
}


@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize("name", DEATHS)
def test_a_death_ends(name: str, launcher: str) -> None:
    (ranks, victim, *steps), raising, said = DEATHS[name]
    with Job(launcher, ranks, [str(victim), *steps], DEATH) as job:
        job.expect("goes on", ranks - 1)
        raised = {each["rank"]: each["text"] for each in job.events("raised")}
        assert sorted(raised) == raising, job.stderr()
        assert all(said in text for text in raised.values()), raised


@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize(
    ("before", "call", "said"),
    [
        ("dist.barrier()", "dist.monitored_barrier()", "[Rank 0]: Rank 2 failed to pass monitoredBarrier"),
        ("dist.destroy_process_group()", "dist.init_process_group()", "init_process_group failed in MPI"),
    ],
    ids=["monitored", "init"],
)
def test_errors_of_what_is_no_call_on_a_group_name_the_dead_rank(
    launcher: str, before: str, call: str, said: str
) -> None:
    with Job(launcher, 3, ["2", before, call, ""], DEATH) as job:
        job.finish(90)
        raised = [each["text"] for each in job.events("raised")]
        assert any(said in text and "rank 2 died" in text for text in raised), job.stderr()


STOPPED = """
dist.init_process_group()
group, values = dist.new_group(timeout=timedelta(seconds=2)), torch.ones(1_000_000)
processes = [None] * 3
dist.all_gather_object(processes, os.getpid())
dist.all_reduce(values, group=group)  # through the window
if ME == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    dist.all_reduce(values, group=group)
except dist.DistBackendError:
    pass
dist.revoke_process_group(group)
start = time.time()
dist.destroy_process_group(group)
tell("destroyed", seconds=time.time() - start)
time.sleep(6)  # the other one too
os.kill(processes[1], signal.SIGKILL)
os._exit(0)
"""


@pytest.mark.timed
@pytest.mark.parametrize("launcher", ULFM)
def test_a_group_with_a_stopped_rank_is_destroyed_in_bounded_time(launcher: str) -> None:
    """Its node's window is left: to free it would wait for the stopped rank."""
    with Job(launcher, 3, script=STOPPED) as job:
        destroyed = job.expect("destroyed", 2)
        # 1 to 20 ms; if it waits for the stopped rank, 5.7 s
        assert max(each["seconds"] for each in destroyed) < 4, job.stderr()


OVER_GLOO = """
import os, sys, time, torch
from datetime import timedelta
import hpcdist as dist

rank, number, call = int(sys.argv[1]), int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=3)
values = torch.ones(4)
dist.all_reduce(values)
dist.set_timeout(timedelta(seconds=2))
if rank == 1:
    os.kill(os.getpid(), number)
try:
    eval(call)
except dist.DistBackendError as error:
    print(error, flush=True)
time.sleep(3)  # else the other one could find that this process has ended
os._exit(41)
"""


@pytest.mark.parametrize(
    ("number", "call", "said"),
    [
        (
            signal.SIGKILL,
            "dist.all_reduce(values)",
            "rank 1 is not in all_reduce #2 of group '0'; its process has ended",
        ),
        (
            signal.SIGSTOP,
            "dist.all_reduce(values, async_op=True).wait()",
            "rank 1 has not entered all_reduce #2 of group '0'; its process is stopped",
        ),
        (signal.SIGSTOP, "dist.recv(values, 1)", "rank 1 has not met it; its process is stopped"),
    ],
    ids=["kill", "stop", "message"],
)
def test_the_error_of_gloo_says_where_a_lost_rank_is(tmp_path: Path, number: int, call: str, said: str) -> None:
    """gloo raises by itself, at once or at the timeout that was set last, and names no rank."""
    url, environment = f"file://{tmp_path}/rendezvous", {**os.environ, "PYTHONPATH": str(SOURCE)}
    lines = [[*forked.python(), "-c", OVER_GLOO, str(rank), url, str(int(number)), call] for rank in range(3)]
    ranks = [subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True) for line in lines]
    try:
        for each in (ranks[0], ranks[2]):
            assert said in each.communicate(timeout=60)[0]
            assert each.returncode == 41
    finally:
        for each in ranks:
            each.kill()
            each.communicate(timeout=10)


END = """
dist.init_process_group()
dist.barrier()
if ME == 1:
    dist.all_reduce(torch.ones(2))
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_that_all_but_one_leave_with_status_0_fails(launcher: str) -> None:
    """Open MPI's mpirun returns 0 for MPI_Abort of the last process, if the others have ended with that (ULFM)."""
    with Job(launcher, 3, script=END) as job:
        assert job.finish(60) != 0
        assert "rank 1 waits for it in all_reduce" in job.stderr()
