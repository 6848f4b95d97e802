"""``python -m hpcdist debug JOBID``: a running job of Slurm's, found from outside it."""

from tests.slurm.test_requeue import size, wait_for_text


def test_a_late_rank_of_a_job_is_found_by_the_jobs_number(cluster, submit, jobs, any_mpi, tmp_path):
    wake = tmp_path / "wake"
    number = submit("cpu", jobs / "late_rank.py", wake, options=size()[:2], **any_mpi)
    wait_for_text(cluster, number, "begun")
    command = [any_mpi["HPCDIST_PYTHON"], "-m", "hpcdist", "debug", number, "--once", "--seconds", "1"]
    seen = [cluster.run(*command, seconds=60) for _ in range(2)][-1]  # rank 0 has waited for a second by the last one
    wake.touch()
    assert seen.returncode == 0, seen.stderr
    assert "late_rank.py" in seen.stdout.splitlines()[0]
    assert "in all_reduce #" in seen.stdout
    assert "LATE  not in a call of hpcdist, at late_rank.py:" in seen.stdout
    job = cluster.wait(number)
    assert (job.state, job.exit_status) == ("COMPLETED", 0), job.output
