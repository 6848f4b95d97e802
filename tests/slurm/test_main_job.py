"""The main job ends with the same accuracy however Slurm starts it."""

import re
from pathlib import Path

import pytest

JOB = Path(__file__).parents[2] / "slurm/jobs/train_digits.py"


def accuracies(job):
    """Read the held-out accuracy after each epoch from the job's table: epoch, loss, accuracy, samples/s, share."""
    return re.findall(r"^ +\d+ +[\d.]+ +([\d.]+) ", job.output, re.MULTILINE)


@pytest.mark.skipif(not JOB.exists(), reason=f"no {JOB.name}")
def test_mpi_a_store_and_torchrun_train_alike_on_two_nodes(cluster, submit, pythons, request):
    pytest.importorskip("sklearn")
    two = ["--nodes=2", "--ntasks-per-node=1"]
    epochs = ["--epochs", "2"]
    numbers = {
        mpi: submit("cpu", JOB, *epochs, options=two, **request.getfixturevalue(fixture))
        for mpi, fixture in (("Open MPI", "openmpi"), ("MPICH", "mpich"))
        if mpi in pythons
    }
    numbers["store"] = submit("store", JOB, *epochs, "--init-method", "slurm://", options=two)
    numbers["torchrun"] = submit("torchrun", JOB, *epochs, HPCDIST_NPROC_PER_NODE="1")
    seen = {}
    for name, number in numbers.items():
        job = cluster.wait(number)
        assert (job.state, job.exit_status) == ("COMPLETED", 0), job.output
        assert "2 ranks on" in job.output
        seen[name] = accuracies(job)
    assert len(seen) >= 3
    assert len(set(map(tuple, seen.values()))) == 1, seen
    first, second = map(float, seen["store"])
    assert first < second
