"""A start that a rank never comes to ends in bounded time."""

from __future__ import annotations

import pytest

from tests.faults.launch import FIRST, PLAIN, Job

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
PROGRAM = """
from hpcdist.backends.mpi.process import runtime

runtime.START_LEAST = timedelta(0)
comm, what = None, sys.argv[1]
if what == "inside":  # after MPI has connected the ranks
    from hpcdist.watch import watchdog
    watch = watchdog.watch
    watchdog.watch = lambda group: time.sleep(60 if ME == 1 else 0) or watch(group)
if what == "comm":
    from mpi4py import MPI
    MPI.Init()  # runtime, imported above, keeps the import from it
    comm = MPI.COMM_WORLD
tell("here")
if ME == 1 and what == "raise":
    time.sleep(1)
    raise ZeroDivisionError("before MPI")
if ME == 1 and what != "inside":
    time.sleep(1 if what == "late" else 60)
dist.init_process_group(comm=comm, timeout=timedelta(seconds={"late": 5, "raise": 60}.get(what, 3)))
time.sleep(6 if what == "late" else 0)
dist.barrier()
tell("done")
"""


@pytest.mark.parametrize("launcher", FIRST)
@pytest.mark.parametrize("what", ["init", "comm", "inside"])
def test_a_rank_that_never_calls_it_or_stays_in_it(launcher: str, what: str) -> None:
    with Job(launcher, 3, [what], PROGRAM) as job:
        job.wait("here", 3)
        assert job.finish(3 + 10) != 0
        assert "Timeout (0:00:03)" in job.stderr()
        assert "in init_process_group" in job.stderr()


@pytest.mark.parametrize("launcher", FIRST)
def test_a_rank_that_comes_late_is_waited_for_and_nothing_is_left_of_the_limit(launcher: str) -> None:
    with Job(launcher, 3, ["late"], PROGRAM) as job:
        job.expect("done", 3)
        assert job.finish(20) == 0
        assert "Timeout" not in job.stderr()


@pytest.mark.parametrize("launcher", PLAIN)
def test_a_rank_that_an_exception_ends_before_ends_the_job(launcher: str) -> None:
    """MPICH's mpirun ends a job for processes only that have begun MPI_Init, Open MPI's none under ULFM."""
    with Job(launcher, 3, ["raise"], PROGRAM, is_forked=False) as job:
        job.wait("here", 3)
        assert job.finish(50) == 1
        assert "ZeroDivisionError: before MPI" in job.stderr()
        assert "Timeout" not in job.stderr()
