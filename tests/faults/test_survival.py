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
from tests.faults.launch import FIRST, HERE, LAUNCHERS, PLAIN, SOURCE, Job, some

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
ULFM = [each for each in LAUNCHERS if each == "openmpi-ulfm"]


@pytest.mark.parametrize("launcher", some([*PLAIN, *ULFM], 1))
def test_what_raises_leaves_the_job_alive(launcher: str) -> None:
    with Job(launcher, 3, [], HERE / "calm_job.py") as job:
        status = job.finish(200)
        assert (status, len(job.events("calm"))) == (0, 3), job.stderr()


@pytest.mark.parametrize("launcher", FIRST)
def test_a_rank_late_for_the_first_objects_of_a_group_is_reported(launcher: str, tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    program.write_text(
        "import os, time\n"
        "from datetime import timedelta\n"
        "import hpcdist as dist\n"
        "dist.init_process_group()\n"
        "group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=1))\n"
        "if dist.get_rank() == 1: time.sleep(60)\n"
        "try: dist.all_gather_object([None] * 3, 'here', group=group)\n"
        "except dist.DistBackendError: os._exit(41)\n"
    )
    with Job(launcher, 3, [], program) as job:
        assert job.finish(90) != 0
        assert re.search(r"has not ended after 1\.\d s", job.stderr())


@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize(
    "ranks", some([4, 3, 5], 1)
)  # Open MPI gives the revoked barrier of 4 and 5 another class of error
def test_a_missed_barrier_says_that_its_time_is_over(launcher: str, ranks: int, tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    program.write_text(
        "import os, sys, time\n"
        "from datetime import timedelta\n"
        "import hpcdist as dist\n"
        "dist.init_process_group(timeout=timedelta(seconds=1))\n"
        "if dist.get_rank(): time.sleep(4)\n"
        "else:\n"
        "    try: dist.barrier()\n"
        "    except dist.DistBackendError as error: print('raised:', error, file=sys.stderr)\n"
        "os._exit(0)\n"
    )
    with Job(launcher, ranks, [], program) as job:
        job.finish(120)
        raised = next(line for line in job.stderr().splitlines() if line.startswith("raised:"))
        assert re.search(r"barrier #1 on group '0' has not ended after 1\.\d s", raised)
        assert re.search(" Timed out waiting 1000ms", raised)  # what torch's programs look for


@pytest.mark.parametrize("launcher", ULFM)
def test_a_death_while_a_communicator_is_made_does_not_keep_others_from_being_made(
    launcher: str, tmp_path: Path
) -> None:
    """Open MPI goes on to wait for the one that could not be made, if its parent is older."""
    program = tmp_path / "job.py"
    program.write_text(
        "import json, os, signal\n"
        "import hpcdist as dist\n"
        "from hpcdist.backends.mpi.communicator import Communicator\n"
        "dist.init_process_group()\n"
        "rank, younger = dist.get_rank(), dist.new_group()\n"
        "def die(communicator):\n"  # after the barrier that open_private begins with
        "    communicator.comm.Barrier()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if rank == 1: Communicator.open_private = die\n"
        "try: dist.gather_object(rank, [None] * 3 if rank == 0 else None)\n"
        "except dist.DistBackendError as error: told = str(error)\n"
        "dist.barrier(group=dist.shrink_group([1], group=younger))\n"
        "print(json.dumps({'rank': rank, 'event': 'shrunk', 'pid': os.getpid(), 'told': told}), flush=True)\n"
        "os._exit(0)\n"
    )
    with Job(launcher, 3, [], program) as job:
        job.finish(120)
        assert [each["rank"] for each in sorted(job.events("shrunk"), key=lambda each: each["rank"])] == [0, 2], (
            job.stderr()
        )
        assert all("rank 1 of the group died" in each["told"] for each in job.events("shrunk"))


@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize("step", ["create", "open_by_name"])
def test_a_death_while_the_nodes_window_is_made(step: str, launcher: str, tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    program.write_text(
        "import json, os, sys, warnings\n"
        "import torch\n"
        "import hpcdist as dist\n"
        "from hpcdist.core import memory_file\n"
        "warnings.simplefilter('error')\n"  # that of a node that cannot share memory, which is another matter
        "dist.init_process_group()\n"
        "create, names = memory_file.create, []\n"
        "def note(nbytes):\n"
        "    descriptor, name = create(nbytes)\n"
        "    names.append(name)\n"
        "    return descriptor, name\n"
        "def die(_):\n"
        "    for name in names: memory_file.remove(name)\n"  # which a killed rank leaves behind, with no memory
        "    os.kill(os.getpid(), 9)\n"
        "if dist.get_rank() == 1: memory_file.create = note; setattr(memory_file, sys.argv[1], die)\n"
        "tensor = torch.ones(1 << 20)\n"
        "try: dist.all_reduce(tensor)\n"
        "except dist.DistBackendError as error: assert 'rank 1 of the group died' in str(error), error\n"
        "else: sys.exit('all_reduce returned')\n"
        "dist.shrink_group([1])\n"
        "dist.all_reduce(tensor.fill_(1))\n"
        "assert tensor.eq(2).all(), tensor\n"
        "print(json.dumps({'rank': dist.get_rank(), 'event': 'went on', 'pid': os.getpid()}), flush=True)\n"
    )
    with Job(launcher, 3, [step], program) as job:
        assert len(job.wait("went on", 2, 120)) == 2, job.stderr()


@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_the_others_go_on_in_a_smaller_group(launcher: str, fault: str) -> None:
    with Job(launcher, 4, [fault, "all_reduce"], FAULT_SHRINK="1") as job:
        shrunk = job.wait("shrunk", 3, 120)
        assert [each["sum"] for each in shrunk] == [[3.0] * 4] * 3, job.stderr()
        assert sorted(each["rank_now"] for each in shrunk) == [0, 1, 2]
        if path := os.environ.get("HPCDIST_FAULTS_FIGURES"):
            with open(path, "a") as file:
                file.write(f'{{"shrink": "{fault}", "seconds": {max(each["seconds"] for each in shrunk)}}}\n')


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
        job.wait("fault", 1, 90)
        start = time.time()
        raised = job.wait("raised", 2, 2 + 5 + 8)
        assert time.time() - start < 2 + 5 + 8
        there = "is not in all_reduce #3 of group '0'; its process has ended"
        if fault == "stop":
            there = "has not entered all_reduce #3 of group '0'; its process is stopped"
        assert f"rank 1 {there}" in job.stderr()
        assert len(raised) == 2 or "a call that was interrupted has not ended" in job.stderr()


@pytest.mark.parametrize("launcher", ULFM)
def test_ranks_that_go_on_leave_together_and_in_bounded_time(launcher: str) -> None:
    """MPI_Finalize may hang after a death; and who leaves without it must not look dead to who is still busy."""
    with Job(launcher, 4, ["kill", "all_reduce"], FAULT_SHRINK="1", FAULT_LEAVE="3") as job:
        assert len(job.wait("shrunk", 3, 120)) == 3, job.stderr()
        start = time.time()
        job.finish(3 + 20)
        assert time.time() - start >= 3
        late = job.events("late")
        assert [each["failed"] for each in late] == [[]], job.stderr()


@pytest.mark.parametrize("launcher", ULFM)
def test_nobody_waits_at_the_end_for_a_rank_that_left_without_a_word(launcher: str) -> None:
    environment = {"FAULT_TIMEOUT": "60", "FAULT_SHRINK": "1", "FAULT_LEAVE": "0"}
    with Job(launcher, 3, ["leave", "all_reduce"], **environment) as job:
        assert len(job.wait("shrunk", 2, 120)) == 2, job.stderr()
        assert job.finish(30) == 3


@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize("nodes", some(["a,b,b,a", "a,a,a,a", "a,a,b,b"], 1))
@pytest.mark.parametrize("seconds", ["0", "3"], ids="rank 0 leaves {} s later".format)
def test_nobody_waits_at_the_end_where_one_was_killed_and_another_left_without_a_word(
    launcher: str, seconds: str, nodes: str
) -> None:
    """MPI knows of the one, so that it can agree on the end without it, and would wait for the other for ever."""
    environment = {"FAULT_TIMEOUT": "60", "FAULT_SHRINK": "1", "FAULT_LEAVE": seconds, "FAULT_SECOND": "2"}
    with Job(launcher, 4, ["kill", "all_reduce"], FAULT_NODES=nodes, **environment) as job:
        assert len(job.wait("shrunk", 2, 120)) == 2, job.stderr()
        start = time.time()
        assert job.finish(int(seconds) + 15) == 3
        assert time.time() - start >= int(seconds)
        assert [each["failed"] for each in job.events("late")] == [[]], job.stderr()


@pytest.mark.parametrize("launcher", ULFM)
def test_a_stopped_rank_that_was_left_out_does_not_keep_the_job_for_ever(launcher: str) -> None:
    with Job(launcher, 3, ["stop", "all_reduce"], FAULT_SHRINK="1", FAULT_LEAVE="0", FAULT_START="5") as job:
        assert len(job.wait("shrunk", 2, 120)) == 2, job.stderr()
        assert job.finish(30) != 0
        assert "is stopped: the job cannot end" in job.stderr()


REVOKING = (
    "import os, sys, time, torch\n"
    "from datetime import timedelta\n"
    "import hpcdist as dist\n"
    "dist.init_process_group(timeout=timedelta(seconds=60))\n"
    "group, values = dist.new_group(), torch.ones(int(sys.argv[1]))\n"
    "dist.all_reduce(values, group=group)\n"
    "dist.all_gather_object([None] * 3, torch.ones(9000), group=group)\n"
    "if dist.get_rank() == 0:\n"
    "    time.sleep(1)\n"
    "    dist.revoke_process_group(group)\n"
    "    shared = group.cpu.collectives.node.shared\n"
    "    before = shared and shared.window.step\n"
    "start = time.time()\n"
    "for _ in range(2):\n"  # the call under way, and a later one
    "    try:\n"
    "        if sys.argv[2] == 'async': dist.all_reduce(values, group=group, async_op=True).wait()\n"
    "        elif sys.argv[2] == 'object': dist.all_gather_object([None] * 3, torch.ones(9000), group=group)\n"
    "        else: dist.all_reduce(values, group=group)\n"
    "    except dist.DistBackendError as error: print('raised:', error, file=sys.stderr)\n"
    "assert time.time() - start < 20\n"
    "if dist.get_rank() == 0:\n"  # its data would end the others' call under way
    "    assert shared is None or shared.window.step == before\n"
    "dist.barrier()\n"  # the default group lives on
    "print('alive', file=sys.stderr)\n"
    "dist.destroy_process_group()\n"
)


@pytest.mark.parametrize("launcher", ULFM)
@pytest.mark.parametrize("arguments", some([["1000000", "sync"], ["8", "sync"], ["8", "async"], ["8", "object"]], 2))
def test_a_revoked_group_takes_no_more_calls(launcher: str, arguments: list[str], tmp_path: Path) -> None:
    """On all its communicators: MPI's, the node's window, and the one for objects."""
    program = tmp_path / "job.py"
    program.write_text(REVOKING)
    with Job(launcher, 3, arguments, program) as job:
        assert job.finish(90) == 0, job.stderr()
        assert (job.stderr().count("raised:"), job.stderr().count("alive")) == (6, 3), job.stderr()


@pytest.mark.parametrize("launcher", some(PLAIN, 1))
def test_a_rank_that_left_a_call_through_shared_memory_makes_no_others(launcher: str, tmp_path: Path) -> None:
    """The others would take its next data for that of the call that it has left."""
    program = tmp_path / "job.py"
    program.write_text(
        "import os, signal, sys, time, torch\n"
        "import hpcdist as dist\n"
        "class Preempted(Exception): pass\n"
        "def handle(*_): raise Preempted\n"
        "os.environ['HPCDIST_SHM'] = '64K'\n"
        "dist.init_process_group()\n"
        "dist.all_reduce(torch.ones(4_000_000))\n"
        "if dist.get_rank(): time.sleep(100)\n"
        "signal.signal(signal.SIGALRM, handle)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.5)\n"
        "try: dist.all_reduce(torch.ones(4_000_000))\n"
        "except Preempted: print('left', file=sys.stderr, flush=True)\n"
        "try: dist.all_reduce(torch.ones(4_000_000))\n"
        "except dist.DistBackendError as error: print('raised:', error, file=sys.stderr, flush=True)\n"
        "os._exit(1)\n"
    )
    with Job(launcher, 2, [], program) as job:
        job.finish(120)
        assert "left" in job.stderr()
        assert "Preempted has ended an earlier call of this rank" in job.stderr()


@pytest.mark.parametrize("launcher", ULFM)
def test_a_death_ends_the_messages_of_all_ranks(launcher: str, tmp_path: Path) -> None:
    """Those of ranks 2 and 3 too, which have none with the dead one, but with ranks that have."""
    program = tmp_path / "job.py"
    program.write_text(
        "import os, sys, time, torch\n"
        "import hpcdist as dist\n"
        "dist.init_process_group()\n"
        "rank, size = dist.get_rank(), dist.get_world_size()\n"
        "if rank == 0: os.kill(os.getpid(), 9)\n"
        "received = torch.zeros(1_000_000)\n"
        "work = dist.irecv(received, rank - 1)\n"
        "try: work.wait()\n"
        "except dist.DistBackendError as error: print('raised:', error, file=sys.stderr)\n"
        "assert dist.shrink_group([0]).size() == 3\n"
        "os._exit(0)\n"
    )
    with Job(launcher, 4, [], program) as job:
        job.finish(120)
        raised = [line for line in job.stderr().splitlines() if line.startswith("raised:")]
        assert len(raised) == 3, job.stderr()
        assert all("rank 0 of the group died" in line for line in raised)


@pytest.mark.parametrize("launcher", ULFM)
def test_the_memory_of_a_receive_from_anyone_is_not_written_after_it_has_failed(launcher: str, tmp_path: Path) -> None:
    """After a death MPI would leave such a receive as it is (MPI_ERR_PROC_FAILED_PENDING): it is matched no more."""
    program = tmp_path / "job.py"
    program.write_text(
        "import os, sys, torch\n"
        "import hpcdist as dist\n"
        "dist.init_process_group()\n"
        "rank = dist.get_rank()\n"
        "if rank == 2: os.kill(os.getpid(), 9)\n"
        "if rank == 0:\n"
        "    work = dist.irecv(torch.zeros(8))\n"
        "    try: work.wait()\n"
        "    except dist.DistBackendError as error: print('raised:', error, file=sys.stderr)\n"
        "    receive = work._request\n"
        "    ended = receive.message is None and receive not in receive._queue.waiting\n"
        "    print('ended:', ended, file=sys.stderr)\n"
        "dist.shrink_group([2])\n"
        "os._exit(0)\n"
    )
    with Job(launcher, 3, [], program) as job:
        job.finish(120)
        assert "raised: irecv on rank 0 of 3 failed: rank 2 of the group died" in job.stderr()
        assert "ended: True" in job.stderr()


@pytest.mark.timed
@pytest.mark.parametrize("launcher", ULFM)
def test_a_group_with_a_stopped_rank_is_destroyed_in_bounded_time(launcher: str, tmp_path: Path) -> None:
    """Its node's window is left: to free it would wait for the stopped rank."""
    program = tmp_path / "job.py"
    program.write_text(
        "import os, signal, sys, time, torch\n"
        "from datetime import timedelta\n"
        "import hpcdist as dist\n"
        "dist.init_process_group()\n"
        "group, values = dist.new_group(timeout=timedelta(seconds=2)), torch.ones(1_000_000)\n"
        "processes = [None] * 3\n"
        "dist.all_gather_object(processes, os.getpid())\n"
        "dist.all_reduce(values, group=group)\n"  # through the window
        "if dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "try: dist.all_reduce(values, group=group)\n"
        "except dist.DistBackendError: pass\n"
        "dist.revoke_process_group(group)\n"
        "start = time.time()\n"
        "dist.destroy_process_group(group)\n"  # 1 to 20 ms; if it waits for the stopped rank, 5.7 s
        "print('destroyed' if time.time() - start < 4 else 'late', file=sys.stderr, flush=True)\n"
        "time.sleep(6)\n"  # the other one too
        "os.kill(processes[1], signal.SIGKILL)\n"
        "os._exit(0)\n"
    )
    with Job(launcher, 3, [], program) as job:
        job.finish(120)
        assert job.stderr().count("destroyed") == 2, job.stderr()


@pytest.mark.parametrize("launcher", some(PLAIN, 1))
def test_without_ulfm_revoking_a_group_ends_the_job(launcher: str, tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    program.write_text(REVOKING)
    with Job(launcher, 3, ["8", "sync"], program) as job:
        assert job.finish(90) != 0
        assert "was revoked by its rank 0 (revoke_process_group): without ULFM nothing ends" in job.stderr()


@pytest.mark.parametrize(
    ("number", "call", "said"),
    [
        (signal.SIGKILL, "all_reduce(values)", "rank 1 is not in all_reduce #2 of group '0'; its process has ended"),
        (
            signal.SIGSTOP,
            "all_reduce(values, async_op=True).wait()",
            "rank 1 has not entered all_reduce #2 of group '0'; its process is stopped",
        ),
        (signal.SIGSTOP, "recv(values, 1)", "rank 1 has not met it; its process is stopped"),
    ],
    ids=["kill", "stop", "message"],
)
def test_the_error_of_gloo_says_where_a_lost_rank_is(tmp_path: Path, number: int, call: str, said: str) -> None:
    """gloo raises by itself, at once or at the timeout that was set last, and names no rank."""
    program = tmp_path / "job.py"
    program.write_text(
        "import os, sys, time, torch\n"
        "from datetime import timedelta\n"
        "import hpcdist as dist\n"
        "rank = int(sys.argv[1])\n"
        "dist.init_process_group('gloo', init_method=sys.argv[2], rank=rank, world_size=3)\n"
        "values = torch.ones(4)\n"
        "dist.all_reduce(values)\n"
        "dist.set_timeout(timedelta(seconds=2))\n"
        f"if rank == 1: os.kill(os.getpid(), {int(number)})\n"
        f"try: dist.{call}\n"
        "except dist.DistBackendError as error: print(error, flush=True)\n"
        "time.sleep(3)\n"  # else the other one could find that this process has ended
        "os._exit(41)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    ranks = [
        subprocess.Popen(
            [*forked.python(), str(program), str(rank), f"file://{tmp_path}/rendezvous"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for each in (ranks[0], ranks[2]):
            assert said in each.communicate(timeout=60)[0]
            assert each.returncode == 41
    finally:
        for each in ranks:
            each.kill()
            each.communicate(timeout=10)


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
    launcher: str, before: str, call: str, said: str, tmp_path: Path
) -> None:
    program = tmp_path / "job.py"
    program.write_text(
        "import os, sys\n"
        "import hpcdist as dist\n"
        "dist.init_process_group()\n"
        "rank = dist.get_rank()\n"
        f"{before}\n"
        "if rank == 2: os.kill(os.getpid(), 9)\n"
        f"try: {call}\n"
        "except dist.DistBackendError as error: print('raised:', error, file=sys.stderr)\n"
        "os._exit(0)\n"
    )
    with Job(launcher, 3, [], program) as job:
        job.finish(90)
        raised = [line for line in job.stderr().splitlines() if line.startswith("raised:")]
        assert any(said in line and "rank 2 died" in line for line in raised), job.stderr()


@pytest.mark.parametrize("launcher", ULFM)
def test_a_wait_for_the_signal_of_a_dead_rank_raises_and_a_new_window_works(launcher: str, tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    program.write_text(
        "import os, signal, sys\n"
        "import hpcdist as dist\n"
        "dist.init_process_group()\n"
        "rank = dist.get_rank()\n"
        "window = dist.Window(4)\n"
        "dist.barrier()\n"
        "if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "try: window.wait_signal(2)\n"
        "except dist.DistBackendError as error: print('raised:', error, file=sys.stderr)\n"
        "window.close()\n"
        "dist.shrink_group([2])\n"
        "with dist.Window(4) as window:\n"
        "    window.signal(1 - rank)\n"
        "    window.wait_signal(1 - rank)\n"
        "print('goes on', file=sys.stderr)\n"
        "dist.destroy_process_group()\n"
    )
    with Job(launcher, 3, [], program) as job:
        job.finish(120)
        assert job.stderr().count("failed: rank 2 of the group died") == 2, job.stderr()
        assert job.stderr().count("goes on") == 2, job.stderr()
