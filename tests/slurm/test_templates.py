"""Every template as it is, one test each, on each MPI that it is made for."""

import re
import signal
from pathlib import Path

import pytest

from tests.cluster.slurm import wait_until

TRAIN = Path(__file__).parents[2] / "slurm/jobs/train_digits.py"


def lines(job, pattern):
    """Find the lines of a job's output that begin with a pattern."""
    return re.findall(rf"^{pattern}.*$", job.output, re.MULTILINE)


TWO_A_NODE = ["--ntasks-per-node=2"]
# template, fixture of the MPI, options, and what rank 0 of the job prints
WORLDS = [
    ("cpu", "mpich", [], "world=8 sum=28 nodes=2 threads=1"),
    ("cpu", "intel_mpi", TWO_A_NODE, "world=4 sum=6 nodes=2 threads=1"),
    ("cpu", "openmpi", ["--nodes=1", *TWO_A_NODE], "world=2 sum=1 nodes=1 threads=1"),
    # No more than two a node: PMIx in Slurm 22.05 does not tell Open MPI 5 which ranks are on its node.
    ("cpu", "openmpi", TWO_A_NODE, "world=4 sum=6 nodes=2 threads=1"),
    ("hybrid", "any_mpi", [], "world=4 sum=6 nodes=2 threads=2"),
    ("gpu", "any_mpi", [], "world=2 sum=1 nodes=1 threads=1"),
]


@pytest.mark.parametrize(("template", "mpi", "options", "world"), WORLDS)
def test_the_ranks_are_one_world_of_the_size_that_was_asked_for(
    template, mpi, options, world, completed, jobs, request
):
    job = completed(template, jobs / "mpi_sum.py", "--epochs", "3", options=options, **request.getfixturevalue(mpi))
    assert lines(job, "world") == [f"{world} arguments=['--epochs', '3']"]
    assert ("2 ranks, 2 GPUs a node" in job.output) == (template == "gpu")


def test_hpcdist_finds_its_world_on_two_nodes_by_itself(each_mpi, completed, jobs):
    job = completed("cpu", jobs / "facade_sum.py", options=["--ntasks-per-node=1"], **each_mpi)
    assert lines(job, "world") == ["world=2 sum=1 backend=mpi"]


def test_arguments_reach_the_script_unharmed(completed, jobs, any_mpi, tmp_path):
    script = tmp_path / "a script's $HOME.py"
    script.write_text((jobs / "mpi_sum.py").read_text())
    arguments = ["a b", "$HOME", "`id`", "*", "it's", 'say "x"', "", "--x=1;2", "back\\slash"]
    job = completed("cpu", script, *arguments, options=["--nodes=1", "--ntasks-per-node=1"], **any_mpi)
    assert f"arguments={arguments}" in job.output


def test_the_log_says_where_and_when_the_job_ran(completed, jobs, any_mpi, tmp_path):
    job = completed("cpu", jobs / "mpi_sum.py", options=["--nodes=2", "--ntasks-per-node=1"], **any_mpi)
    assert job.facts["StdOut"] == str(tmp_path / f"cpu-{job.id}.out")
    started, ended = lines(job, f"job {job.id}")
    assert "n[1-2], 2 ranks" in started
    assert started.endswith(f"in {tmp_path}")
    assert ended.endswith("with status 0")


@pytest.mark.parametrize(
    ("names", "mpi"),
    [(["cpu", "hybrid", "store", "requeue", "array", "torchrun"], "openmpi"), (["elastic"], "ulfm")],
    ids=["", "ulfm"],
)
def test_the_status_of_the_script_is_that_of_the_job(names, mpi, cluster, submit, jobs, request):
    one = ["--nodes=1", "--ntasks-per-node=1"]
    environment = request.getfixturevalue(mpi) | {"HPCDIST_NPROC_PER_NODE": "1"}
    numbers = {
        name: submit(
            name, jobs / "exit_with.py", "7", options=[*one, "--array=0"] if name == "array" else one, **environment
        )
        for name in names
    }
    for name, number in numbers.items():
        job = cluster.wait(number)
        # torchrun's agent ends with 1 whatever its ranks end with.
        assert (job.state, job.exit_status) == ("FAILED", 1 if name == "torchrun" else 7), job.output
        assert f"with status {job.exit_status}" in job.output


def test_gpu_refuses_more_tasks_than_gpus(cluster, submit, jobs, any_mpi):
    job = cluster.wait(submit("gpu", jobs / "mpi_sum.py", options=["--ntasks-per-node=3"], **any_mpi))
    assert (job.state, job.exit_status) == ("FAILED", 2)
    assert "error: 3 tasks a node on 2 GPUs; ask for as many: --ntasks-per-node=2" in job.output


def test_store_runs_without_mpi_on_two_nodes_and_beside_another_job(cluster, submit, jobs):
    sizes = (["--ntasks-per-node=2"], ["--ntasks=3"])
    numbers = [submit("store", jobs / "store_sum.py", options=size) for size in sizes]
    even, uneven = (cluster.wait(number) for number in numbers)
    assert (even.state, uneven.state) == ("COMPLETED", "COMPLETED"), even.output + uneven.output
    assert lines(even, "world") == ["world=4 sum=6 nodes=2"]
    assert lines(uneven, "world") == ["world=3 sum=3 nodes=2"]


def test_array_runs_each_line_of_its_sweep(cluster, submit, jobs, any_mpi, tmp_path):
    sweep = tmp_path / "sweep.txt"
    sweep.write_text("--lr 0.1\n--name \"a first try\" --note 'it is $HOME'\n--lr 0.3\n")
    number = submit("array", jobs / "mpi_sum.py", "--epochs", "3", HPCDIST_SWEEP=str(sweep), **any_mpi)
    tasks = [cluster.wait(f"{number}_{task}") for task in range(4)]
    assert [task.exit_status for task in tasks] == [0, 0, 0, 2], [task.output for task in tasks]
    assert [task.state for task in tasks] == ["COMPLETED"] * 3 + ["FAILED"]
    settings = [["--lr", "0.1"], ["--name", "a first try", "--note", "it is $HOME"], ["--lr", "0.3"]]
    for task, extra in zip(tasks, settings, strict=False):
        assert f"world=2 sum=1 nodes=1 threads=1 arguments={['--epochs', '3', *extra]}" in task.output
    assert "has no line for task 3" in tasks[3].output
    assert len({task.facts["StdOut"] for task in tasks}) == 4


def test_elastic_goes_on_after_a_rank_is_killed(completed, jobs, ulfm):
    by = ulfm | {"HPCDIST_LAUNCHER": "mpirun"}  # the script does not use hpcdist.elastic
    job = completed("elastic", jobs / "elastic_sum.py", options=TWO_A_NODE, **by)
    assert lines(job, "started") == ["started=4 left=3"]


def is_rank(host, pid, number):
    """Tell whether a process of a host is of the rank that PMIx gave this number."""
    return host.run(["grep", "-qzx", f"PMIX_RANK={number}", f"/proc/{pid}/environ"]).returncode == 0


def test_elastic_trains_on_after_a_rank_is_killed(cluster, submit, ulfm):
    pytest.importorskip("sklearn")
    arguments = ["--elastic", "--spares", "1", "--epochs", "20"]
    number = submit("elastic", TRAIN, *arguments, options=["--ntasks-per-node=2"], **ulfm)
    assert wait_until(lambda: "\n    3 " in cluster.output(number), seconds=180), cluster.output(number)
    third = [(host, pid) for host in cluster.hosts for pid in host.processes() if is_rank(host, pid, 2)]
    host, pid = max(third, key=lambda each: each[1])  # after the shell that started it
    host.signal(pid, signal.SIGKILL)
    job = cluster.wait(number)
    assert (job.state, job.exit_status) == ("COMPLETED", 0), job.output
    assert "a rank has died, going on with 3" in job.output
    (accuracy,) = re.findall(r"held-out accuracy ([\d.]+) after 20 epochs on 3 ranks", job.output)
    assert float(accuracy) > 0.95


def test_apptainer_says_what_is_missing(cluster, submit, jobs, tmp_path):
    absent = submit("apptainer", jobs / "mpi_sum.py", HPCDIST_CONTAINER="no-such-apptainer")
    imageless = submit("apptainer", jobs / "mpi_sum.py", HPCDIST_CONTAINER="true", HPCDIST_IMAGE="no.sif")
    for number, message in ((absent, "no no-such-apptainer on n1"), (imageless, "no image 'no.sif'")):
        job = cluster.wait(number)
        assert (job.state, job.exit_status) == ("FAILED", 2)
        assert message in job.output


def test_a_template_without_a_script_says_how_it_is_called(cluster, submit):
    names = ["cpu", "gpu", "hybrid", "torchrun", "store", "array", "requeue", "elastic", "apptainer"]
    one = ["--nodes=1", "--ntasks-per-node=2"]
    numbers = {name: submit(name, options=[*one, "--array=0"] if name == "array" else one) for name in names}
    for name, number in numbers.items():
        job = cluster.wait(number)
        assert (job.state, job.exit_status) == ("FAILED", 2), name
        assert f"usage: sbatch [OPTION...] {name}.sbatch SCRIPT" in job.output
