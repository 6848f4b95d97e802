"""A group that ends while another thread of the rank is in a call on it: the call raises, passes or is reported."""

from __future__ import annotations

import pytest

from tests.faults.launch import FIRST, LAUNCHERS, PLAIN, Job

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
PROGRAM = """
from hpcdist.core import shutdown

def call(how, tag):
    try:
        how(torch.ones(3), 0, tag)
    except RuntimeError as error:
        tell("raised", text=str(error))
    else:
        tell("passed")

def recv(tensor, src, tag):
    dist.recv(tensor, src, group, tag)

def irecv(tensor, src, tag):
    dist.irecv(tensor, src, group, tag).wait()

def objects(_, src, tag):
    dist.recv_object_list([None], src, group)

def reduce(tensor, *_):
    dist.all_reduce(tensor, group=group)

end, what = sys.argv[1:]
dist.init_process_group()
group = dist.new_group(timeout=timedelta(seconds=3))
dist.barrier()
threads = []
if ME == 1:
    ways = {"receive": (recv, recv, irecv), "objects": (objects,)}.get(what, (reduce,))
    is_daemon = what == "daemon"
    threads = [threading.Thread(target=call, args=(how, tag), daemon=is_daemon) for tag, how in enumerate(ways)]
    for each in threads:
        each.start()
        time.sleep(0.3)
else:
    time.sleep(1.5)
    if what == "late":
        reduce(torch.ones(3))
if ME == 1 or what == "late":
    dist.destroy_process_group(group) if end == "destroy" else group.abort()
    tell("ended")
if what == "daemon":
    if ME == 0:  # Hydra would kill it meanwhile
        shutdown.register(shutdown.Stage.PROGRESS, lambda: time.sleep(1))
    sys.exit()
for each in threads:
    each.join()
if what == "absent":
    time.sleep(60)
"""


@pytest.mark.parametrize("launcher", FIRST)
@pytest.mark.parametrize(
    ("end", "what", "count"), [("destroy", "receive", 3), ("abort", "receive", 3), ("destroy", "objects", 1)]
)
def test_receives_raise(end: str, what: str, count: int, launcher: str) -> None:
    with Job(launcher, 2, [end, what], PROGRAM) as job:
        raised = job.expect("raised", count)
        assert all(f"was {end}ed" in each["text"] for each in raised), raised
        assert job.finish(30) == 0, job.stderr()


@pytest.mark.parametrize("launcher", FIRST)
def test_destroy_waits_for_a_collective(launcher: str) -> None:
    with Job(launcher, 2, ["destroy", "late"], PROGRAM) as job:
        assert job.finish(90) == 0, job.stderr()
        events = [each["event"] for each in job.wait("ended", 2, 1) + job.wait("passed", 1, 1)]
        assert events == ["ended", "ended", "passed"], job.stderr()


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("end", ["destroy", "abort"])
def test_a_collective_that_a_rank_never_makes(end: str, launcher: str) -> None:
    with Job(launcher, 2, [end, "absent"], PROGRAM) as job:
        if launcher in PLAIN:  # nothing takes a thread out of MPI
            assert job.finish(3 + 20) != 0, job.stderr()
        else:
            job.expect("raised", 1, 3 + 15)
        if launcher in PLAIN or end == "destroy":
            assert "rank 0 has not entered all_reduce" in job.stderr(), job.stderr()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_daemon_in_a_collective_keeps_no_rank(launcher: str) -> None:
    with Job(launcher, 2, ["destroy", "daemon"], PROGRAM) as job:
        assert job.finish(90) == 0, job.stderr()
        said = "a thread is still in all_reduce" in job.stderr()
        assert said if launcher in PLAIN else job.events("raised"), job.stderr()
