"""Calls that several threads of a rank block in, on one group, time out each for itself."""

from __future__ import annotations

import os

import pytest

from tests.faults.launch import FIRST, Job

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
SECONDS = os.environ.get("HPCDIST_TEST_THREADS", "8")  # of random calls; 600 were tried
PROGRAM = """
def receive(tag, how):
    try:
        how(torch.ones(3), 0, tag=tag)
    except dist.DistBackendError as error:
        tell("raised", tag=tag, text=str(error))

def irecv(*args, **more):
    dist.irecv(*args, **more).wait()

dist.init_process_group(timeout=timedelta(seconds=60))
dist.barrier()
dist.group.WORLD.timeout = timedelta(seconds=2)
if dist.get_rank() == 1:
    for tag, how in enumerate((dist.recv, dist.recv, irecv), 1):
        threading.Thread(target=receive, args=(tag, how)).start()
        time.sleep(0.5)
values = torch.ones(3)
for step in range(20):
    if dist.get_rank() == 1:
        dist.send(values, 0)
        dist.recv(values, 0)
        time.sleep(0.2)
    else:
        dist.recv(values, 1)
        dist.send(values, 1)
tell("passed")
time.sleep(60)
"""


@pytest.mark.parametrize("launcher", FIRST)
def test_receives_of_three_threads_beside_calls_that_end(launcher: str) -> None:
    with Job(launcher, 2, script=PROGRAM) as job:
        raised = job.expect("raised", 3)
        assert sorted(each["tag"] for each in raised) == [1, 2, 3], job.stderr()
        assert all("from rank 0 of float32 [3] on group '0' has not ended" in each["text"] for each in raised), raised
        assert all("(receive)" in each["text"] for each in raised[:2]), raised
        job.expect("passed", 2, 20)


RANDOM = """
import random

THREADS, SECONDS, LOST = 4, float(sys.argv[1]), 9
dist.init_process_group(timeout=timedelta(seconds=60))
rank = dist.get_rank()
shared = dist.new_group(timeout=timedelta(seconds=60))
groups = [(dist.new_group(timeout=timedelta(seconds=60)), dist.new_group()) for _ in range(THREADS)]
counts, failures = {}, []

def lost(made, group, tag, limit, is_blocking):
    # a receive whose message nobody sends raises in time, and no other one does
    tensor, began = torch.zeros(3), time.monotonic()
    try:
        dist.recv(tensor, 0, group, tag) if is_blocking else dist.irecv(tensor, 0, group, tag).wait()
    except dist.DistBackendError as error:
        assert "has not ended" in str(error), error
        assert f"from rank 0 of float32 [3]" in str(error), error
        assert limit - 0.1 < time.monotonic() - began < limit + 20, (limit, time.monotonic() - began)
    else:
        raise AssertionError("a message that nobody has sent")

def work(number):
    made, (calls, messages) = random.Random(number), groups[number]
    goes_on, count = torch.ones(1), 0
    while True:
        goes_on.fill_(time.monotonic() < end)
        dist.all_reduce(goes_on, dist.ReduceOp.MIN, calls)
        if not goes_on:
            return
        kind, size, limit = made.randrange(5), made.choice([1, 100, 50_000]), made.uniform(0.05, 0.6)
        is_blocking = made.random() < 0.5
        tensor, expected = torch.full((size,), float(rank + count)), 2.0 * count + 1
        counts[kind] = counts.get(kind, 0) + 1
        if kind == 0:
            dist.all_reduce(tensor, group=calls)
            assert tensor.eq(expected).all()
        elif kind == 1:
            work = dist.all_reduce(tensor, group=calls, async_op=True)
            try:
                work.wait(timedelta(seconds=made.choice([1e-6, 0.01, 30])))
            except dist.DistBackendError as error:
                assert "wait timeout" in str(error), error
            work.wait()
            assert tensor.eq(expected).all()
        elif kind == 2:
            dist.set_timeout(timedelta(seconds=limit), messages)
            if rank == 1:
                lost(made, messages, LOST, limit, is_blocking)
        else:
            group, tag = (shared, number) if kind == 3 else (messages, 0)
            dist.set_timeout(timedelta(seconds=60), messages)
            if rank == 0:
                dist.send(tensor, 1, group, tag)
            elif is_blocking:
                assert dist.recv(tensor.zero_(), 0, group, tag) == 0
            else:
                dist.irecv(tensor.zero_(), 0, group, tag).wait()
            assert tensor.eq(float(count)).all() or rank == 0
        count += 1

def run(number):
    try:
        work(number)
    except BaseException as error:
        failures.append(f"thread {number} of rank {rank}: {type(error).__name__}: {error}")

end = time.monotonic() + SECONDS
threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
for each in threads:
    each.start()
for each in threads:
    each.join()
tell("over", counts=counts, failures=failures)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", FIRST)
def test_threads_with_groups_calls_and_timeouts_of_their_own(launcher: str) -> None:
    with Job(launcher, 2, [SECONDS], RANDOM) as job:
        over = job.expect("over", 2, float(SECONDS) + 80)
        assert [each["failures"] for each in over] == [[], []], job.stderr()
        assert all(len(each["counts"]) == 5 for each in over), over
        assert job.finish(60) == 0, job.stderr()
