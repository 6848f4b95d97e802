"""``python -m hpcdist submit`` submits and writes job scripts that Slurm runs."""

import re
import sys

CALL = "import sys; from hpcdist.cli import submit; sys.exit(submit.run(sys.argv[1:]))"
SIZE = ["--nodes", "2", "--ntasks-per-node", "1"]


def call(cluster, tmp_path, *arguments):
    return cluster.run(sys.executable, "-c", CALL, *arguments, folder=tmp_path)


def options(any_mpi):
    return ["--mpi", any_mpi["HPCDIST_MPI"], "--python", any_mpi["HPCDIST_PYTHON"]]


def test_submit_submits(cluster, jobs, any_mpi, tmp_path):
    said = call(cluster, tmp_path, *SIZE, "-J", "mine", *options(any_mpi), jobs / "mpi_sum.py", "a b").stdout
    number = re.fullmatch(r"Submitted batch job (\d+)\n", said)
    assert number, said
    job = cluster.wait(number[1])
    assert job.exit_status == 0, job.output
    assert job.facts["StdOut"] == str(tmp_path / f"mine-{job.id}.out")
    assert "world=2 sum=1 nodes=2 threads=1 arguments=['a b']" in job.output


def test_a_written_job_script_takes_more_arguments(cluster, jobs, any_mpi, tmp_path):
    file = tmp_path / "job.sbatch"
    given = [*SIZE, "--exclusive", "--dry-run", *options(any_mpi), jobs / "mpi_sum.py", "--epochs", "3"]
    file.write_text(call(cluster, tmp_path, *given).stdout)
    job = cluster.wait(cluster.submit(file, "--lr", "0.1", folder=tmp_path))
    assert job.exit_status == 0, job.output
    assert "world=2 sum=1 nodes=2 threads=1 arguments=['--epochs', '3', '--lr', '0.1']" in job.output


def test_submit_ends_with_the_status_of_sbatch(cluster, jobs, tmp_path):
    result = call(cluster, tmp_path, "--partition", "nowhere", jobs / "mpi_sum.py")
    assert result.returncode == 1
    assert "invalid partition" in result.stderr
