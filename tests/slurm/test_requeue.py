"""A job that is warned comes back and continues: real signals from an operator, and from Slurm before the limit."""

import re
import time
from pathlib import Path

import pytest

TRAIN = Path(__file__).parents[2] / "slurm/jobs/train_digits.py"


def wait_for_text(cluster, job, text, timeout=90):
    """Wait until a job has written a text."""
    deadline = time.monotonic() + timeout
    while text not in (output := cluster.output(job)):
        assert time.monotonic() < deadline, f"no {text!r} after {timeout} s in:\n{output}"
        time.sleep(0.1)


def size(seconds_before_limit=60):
    return ["--nodes=2", "--ntasks-per-node=1", f"--signal=B:USR1@{seconds_before_limit}"]


@pytest.mark.parametrize("to", [["--batch"], []], ids=["script", "ranks"])
def test_a_warned_job_is_requeued_and_resumes_at_its_step(to, cluster, submit, jobs, any_mpi, tmp_path):
    """Also if Slurm warns only the ranks, as by ``--signal=USR1@60`` without ``B:``."""
    checkpoint = tmp_path / "run.ckpt"
    number = submit("requeue", jobs / "stopping.py", "--checkpoint", checkpoint, options=size(), **any_mpi)
    wait_for_text(cluster, number, "starts at step 0")
    time.sleep(1)
    assert cluster.run("scancel", "--signal=USR1", *to, number).returncode == 0
    wait_for_text(cluster, number, "it is requeued")
    stopped = int(checkpoint.read_text())
    assert 0 < stopped < 60
    job = cluster.wait(number)
    assert (job.state, job.exit_status, job.facts["Restarts"]) == ("COMPLETED", 0, "1"), job.output
    assert f"stopped at step {stopped}\n" in job.output
    assert f"starts at step {stopped}\n" in job.output
    assert job.output.count("finished 60 steps") == 1


def test_training_reaches_the_same_accuracy_as_if_it_had_not_been_stopped(cluster, submit, any_mpi, tmp_path):
    pytest.importorskip("sklearn")
    arguments = ["--epochs", "20", "--checkpoint"]
    number = submit("requeue", TRAIN, *arguments, tmp_path / "run.ckpt", options=size(), **any_mpi)
    wait_for_text(cluster, number, "\n    3 ")
    assert cluster.run("scancel", "--signal=USR1", "--batch", number).returncode == 0
    stopped = cluster.wait(number)
    assert (stopped.state, stopped.facts["Restarts"]) == ("COMPLETED", "1"), stopped.output
    assert stopped.output.count("stopped by a signal; --resume goes on from the checkpoint") == 1
    whole = cluster.wait(submit("cpu", TRAIN, *arguments, tmp_path / "whole.ckpt", options=size()[:2], **any_mpi))
    epochs = [re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) ", job.output, re.MULTILINE) for job in (stopped, whole)]
    assert len(epochs[0]) == 20
    assert epochs[0] == epochs[1], "each epoch once, with the loss and the accuracy of the run that was left alone"


def test_a_warning_before_the_ranks_listen_is_not_lost(cluster, submit, jobs, any_mpi):
    number = submit("requeue", jobs / "late_listener.py", options=size(), HPCDIST_MAX_RESTARTS="0", **any_mpi)
    wait_for_text(cluster, number, f"job {number} on ")
    assert cluster.run("scancel", "--signal=USR1", "--batch", number).returncode == 0
    job = cluster.wait(number)
    assert job.exit_status == 75, job.output  # it heard, and would have been requeued
    assert job.output.count(" warned ") == 1
    assert "run 1 stopped unfinished" in job.output


def test_slurm_warns_before_the_limit_and_the_job_outlives_it(cluster, submit, jobs, any_mpi, tmp_path):
    arguments = ["--checkpoint", tmp_path / "run.ckpt", "--steps", "500", "--status", "75"]
    # Slurm looks at limits twice a minute: with a limit of one minute, the warning comes at the first look.
    number = submit("requeue", jobs / "stopping.py", *arguments, options=[*size(55), "--time=1"], **any_mpi)
    wait_for_text(cluster, number, "it is requeued")
    wait_for_text(cluster, number, "run 2 of this job: added --resume")
    wait_for_text(cluster, number, f"starts at step {(tmp_path / 'run.ckpt').read_text()}")
    cluster.run("scancel", number)
    job = cluster.wait(number)
    assert job.state == "CANCELLED"
    assert "warned" in job.output
    assert job.output.count("it is requeued") == 1


def test_a_job_that_never_gets_anywhere_ends(cluster, submit, jobs, any_mpi):
    one = ["--nodes=1", "--ntasks-per-node=1"]
    number = submit("requeue", jobs / "exit_with.py", "75", options=one, HPCDIST_MAX_RESTARTS="1", **any_mpi)
    job = cluster.wait(number)
    assert (job.state, job.exit_status, job.facts["Restarts"]) == ("FAILED", 75, "1"), job.output
    assert "run 2 stopped unfinished; HPCDIST_MAX_RESTARTS is 1" in job.output


def test_a_job_that_finishes_is_not_started_again(completed, jobs, any_mpi, tmp_path):
    arguments = ["--checkpoint", tmp_path / "run.ckpt", "--steps", "3"]
    job = completed("requeue", jobs / "stopping.py", *arguments, options=size(), **any_mpi)
    assert job.facts["Restarts"] == "0"
    assert "finished 3 steps" in job.output
