"""A group that is destroyed with a call under way ends in bounded time and names who is missing."""

from __future__ import annotations

import pytest

from tests.faults.launch import FIRST, LAUNCHERS, Job, some

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
PROGRAM = """
from contextlib import suppress
def again():
    # rank 2 misses a call of the first default group, and rank 0 the same of the second
    for absent in (2, 0):
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # which raises by itself
        dist.barrier()
        dist.group.WORLD.timeout = timedelta(seconds=1)
        if ME == absent:
            time.sleep(2.5)
        else:
            with suppress(RuntimeError):
                dist.all_reduce(torch.ones(4))
        with suppress(RuntimeError):  # the rank that misses the call learns here that the others' differ
            dist.destroy_process_group()
    os._exit(0)

if (what := sys.argv[1]) == "again":
    again()
dist.init_process_group(timeout=timedelta(seconds=2))
group = dist.new_group(timeout=timedelta(seconds=2)) if what != "world" else None
dist.barrier()
if ME == 1:
    tell("away")
    time.sleep(60)
work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
while (group or dist.group.WORLD).cpu.queue.running is None:
    time.sleep(0.001)  # until the worker is in it: this thread would carry out one that has not begun
if what == "drain":
    try:
        dist.all_reduce(torch.ones(4), group=group)  # waits for the call that is queued
    except dist.DistBackendError as error:
        tell("raised", text=str(error))
dist.destroy_process_group(group)
tell("destroyed")
time.sleep(2)  # the launcher ends the others with the first that ends
os._exit(1)
"""


@pytest.mark.parametrize("launcher", FIRST)
@pytest.mark.parametrize("what", some(["subgroup", "world"], 1))
def test_a_call_under_way_that_a_rank_never_makes(launcher: str, what: str) -> None:
    with Job(launcher, 3, [what], PROGRAM) as job:
        job.wait("away")
        job.expect("destroyed", 2, 2 + 5 + 8)  # nothing takes the worker out of MPI: it is left in it
        assert "rank 1 has not entered all_reduce" in job.stderr()


@pytest.mark.parametrize("launcher", FIRST)
def test_a_call_behind_one_that_is_given_up_raises(launcher: str) -> None:
    with Job(launcher, 3, ["drain"], PROGRAM) as job:
        job.wait("away")
        raised = job.expect("raised", 2, 2 + 5 + 8)
        assert all("rank 1 has not entered all_reduce" in each["text"] for each in raised), raised


@pytest.mark.parametrize("launcher", FIRST)
def test_a_report_after_another_init_is_about_its_own_call(launcher: str) -> None:
    with Job(launcher, 3, ["again"], PROGRAM) as job:
        job.finish(90)
        for absent in (2, 0):
            assert f"rank {absent} has not entered all_reduce #2 of group '0'" in job.stderr(), job.stderr()


UNUSED = """
dist.init_process_group()
group, used = dist.new_group([1, 2, 3]), dist.new_group()  # errors name the ranks as the group counts them
dist.barrier(used)
if ME in (0, 2):
    if ME == 2:
        dist.destroy_process_group(group)
    for _ in range(2):  # this rank makes other calls meanwhile
        dist.barrier(used)
    tell("away")
    time.sleep(60)
for _ in range(2):
    dist.barrier(used)
try:
    dist.recv(torch.ones(4), 2, group=group)
except dist.DistBackendError as error:
    tell("received", text=str(error))
try:
    work = dist.all_reduce(torch.ones(4), group=group, async_op=sys.argv[1] == "async")
    if work is not None:
        work.wait()
except dist.DistBackendError as error:
    tell("raised", text=str(error))
time.sleep(60)
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("how", some(["blocking", "async"], 1))
def test_a_group_that_a_rank_destroys_before_its_first_message_and_call(launcher: str, how: str) -> None:
    """The group has no call board yet; its timeout is half an hour."""
    with Job(launcher, 4, [how], UNUSED) as job:
        job.wait("away")
        received = job.expect("received", 2, 20)
        assert all("rank 1: destroy_process_group" in each["text"] for each in received), received
        if launcher == "openmpi-ulfm":
            raised = job.expect("raised", 2, 20)  # the first one's revocation may end the other's call
            assert any("rank 1: destroy_process_group" in each["text"] for each in raised), raised
        else:
            assert job.finish(20) != 0
        ways = "rank 0: all_reduce; rank 1: destroy_process_group", "rank 1: destroy_process_group; rank 2: all_reduce"
        assert any(each in job.stderr() for each in ways)


LEGAL = """
dist.init_process_group()
if ME == 2:
    dist.destroy_process_group()  # the shrunken group leaves this rank out
    tell("destroyed")
    sys.exit()
pair = torch.distributed.group.WORLD.split_group([0, 1], group_name="pair")
torch.distributed.group.WORLD.split_group([0, 1], group_name="pair").shutdown()
if ME == 1:
    time.sleep(4)
pair.barrier().wait()
if ME == 1:
    time.sleep(4)
dist.shrink_group([2])
dist.barrier()
tell("shrunken")
"""


@pytest.mark.parametrize("launcher", FIRST)
def test_a_first_call_waits_for_a_late_rank_although_groups_were_destroyed(launcher: str) -> None:
    """One of the same name, and the group that is shrunken, on the rank that is left out."""
    with Job(launcher, 3, [], LEGAL) as job:
        job.expect("destroyed")
        job.expect("shrunken", 2)
        assert job.finish(30) == 0, job.stderr()
