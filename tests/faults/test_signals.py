"""A signal is noticed while every rank is inside MPI, and all ranks stop at the same step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.launch import FIRST, IS_WHOLE, LAUNCHERS, Job
from tests.faults.signal_job import HELD
from tests.programs import is_alive

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]
JOBS = Path(__file__).with_name("signal_job.py")


@pytest.mark.quick
@pytest.mark.parametrize("launcher", FIRST)
def test_all_ranks_stop_at_the_step_at_which_one_was_told_to(launcher: str) -> None:
    with Job(launcher, 3, ["stop"], JOBS, is_forked=False) as job:
        job.expect("ready", 3)
        time.sleep(0.3)
        os.kill(job.pids()[2], signal.SIGTERM)
        stopped = job.expect("stopped", 3, 20)
        assert len({each["step"] for each in stopped}) == 1
        assert job.finish(30) == 0


@pytest.mark.parametrize("launcher", LAUNCHERS if IS_WHOLE else FIRST)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_rank_inside_mpi_hears_of_it_and_all_stop_at_that_step(launcher: str, number: int, tmp_path: Path) -> None:
    """Ranks 1 and 2 are in an all_reduce that rank 0 keeps from ending, while rank 2 gets the signal."""
    gate = tmp_path / "gate"
    with Job(launcher, 3, ["block", str(gate)], JOBS, is_forked=False) as job:
        job.wait("held")
        job.wait("blocks", 2, 20)
        time.sleep(0.5)
        os.kill(job.pids()[2], number)
        job.until((job.folder / "trace_2").exists)  # the watchdog has it; the main thread is still in MPI
        assert not job.events("stopped")
        gate.touch()
        stopped = job.wait("stopped", 3, 20)
        assert [each["step"] for each in stopped] == [HELD] * 3, job.stderr()
        assert job.finish(30) == 0, job.stderr()


@pytest.mark.parametrize("launcher", FIRST)
def test_a_trace_is_written_while_the_main_thread_is_inside_mpi_and_sigterm_ends_it(launcher: str) -> None:
    """All but rank 0 wait in a barrier; each is asked for its trace, and torch's own tool reads them."""
    with Job(launcher, 3, ["wait"], JOBS, is_forked=False) as job:
        job.expect("ready", 3)
        time.sleep(0.5)
        for pid in job.pids().values():
            os.kill(pid, signal.SIGUSR1)
        traces = [job.folder / f"trace_{rank}" for rank in range(3)]
        job.until(lambda: all(each.exists() for each in traces))
        assert not job.events("passed")  # nobody left the call for it
        text = torchfrtrace(job.folder, "trace_")
        assert "Not all ranks joining collective, sequence number: 3" in text
        assert "collective: gloo:barrier" in text  # the tool knows no library of the name mpi
        assert "missing ranks: {0}" in text
        assert "signal_job.py:" in text  # the line that waits
        assert "signal_job.py:" in job.stderr()
        traces[1].unlink()
        os.kill(job.pids()[1], signal.SIGTERM)  # which ends a program that does not ask
        job.until(lambda: not is_alive(job.pids()[1]))
        assert traces[1].exists()
        if launcher != "openmpi-ulfm":  # there the other ranks live on
            assert job.finish(30) != 0


def torchfrtrace(folder: Path, prefix: str) -> str:
    """Run torch's own tool on the traces of a folder and return what it says."""
    keep = folder / "read"
    keep.mkdir(exist_ok=True)
    for trace in folder.glob(f"{prefix}*"):
        (keep / trace.name).write_bytes(trace.read_bytes())
    tool = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(keep), "-p", prefix]
    run = subprocess.run(tool, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


@pytest.mark.parametrize("launcher", FIRST)
def test_ctrl_c_ends_a_receive_and_a_collective_that_block(launcher: str) -> None:
    """The receive raises, also in a coroutine, after which the group is as before; the collective ends the job."""
    with Job(launcher, 2, ["interrupt"], JOBS, is_forked=False) as job:
        for before, after in (("ready", "interrupted"), ("in a loop", "interrupted in a loop"), ("again", "")):
            job.wait(before)
            time.sleep(0.5)
            os.kill(job.pids()[1], signal.SIGINT)
            if after:
                job.expect(after, 1, 20)
        assert job.finish(30) != 0
        assert "SIGINT: recv from rank 0 on group '0', called at signal_job.py:" in job.stderr()
        assert "SIGINT: all_reduce #" in job.stderr()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ctrl_c_on_a_rank_that_has_left_ends_the_job(launcher: str) -> None:
    with Job(launcher, 2, ["leave"], JOBS, is_forked=False) as job:
        job.expect("ready", 2)
        time.sleep(0.5)
        os.kill(job.pids()[1], signal.SIGINT)
        assert job.finish(20) != 0
        assert "[rank 1 of 2] uncaught exception" in job.stderr()
        assert "KeyboardInterrupt" in job.stderr()
