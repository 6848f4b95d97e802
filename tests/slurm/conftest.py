"""One cluster for all tests in this folder, and the Pythons whose MPI the jobs run on."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests import programs
from tests.cluster import hosts
from tests.cluster.slurm import Slurm, why_not
from tests.slurm.mpis import MPIS, mpi_of

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# More Pythons than the one that runs the tests, separated by colons: the other MPI's environment.
OTHERS = "HPCDIST_TEST_PYTHONS"


def pytest_collection_modifyitems(items):
    reason = hosts.why_not() or why_not()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.xdist_group("slurm"))  # they share a cluster
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))  # jobs that start one after the other, on a busy machine too
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def cluster():
    with hosts.Cluster(2) as two, Slurm(two, 2) as started:
        started.environment["HPCDIST_PYTHON"] = sys.executable
        del started.environment["OMP_NUM_THREADS"]  # which the templates set
        yield started


@pytest.fixture
def tmp_path(cluster):
    """A folder that both hosts see: each has a /tmp of its own."""
    return Path(tempfile.mkdtemp(dir=cluster.shared))


@pytest.fixture(scope="session")
def pythons():
    """The Python of each MPI that can be found here."""
    found = {}
    for python in [sys.executable, *filter(None, os.environ.get(OTHERS, "").split(":"))]:
        if name := mpi_of(python):
            found.setdefault(name, python)
    return found


def settings(pythons, mpi):
    """What a job's environment says to run on one of the MPIs."""
    if mpi not in pythons:
        pytest.skip(f"no {mpi} here: name a Python that has it by {OTHERS}=/path/to/python")
    return {"HPCDIST_PYTHON": pythons[mpi], "HPCDIST_MPI": MPIS[mpi]}


@pytest.fixture
def openmpi(pythons):
    return settings(pythons, "Open MPI")


@pytest.fixture
def ulfm(openmpi):
    """An Open MPI that can survive the death of a rank."""
    if not programs.library(Path(openmpi["HPCDIST_PYTHON"]).parent / "mpirun")[1]:
        pytest.skip("this Open MPI has no ULFM")
    return openmpi


@pytest.fixture
def mpich(pythons):
    return settings(pythons, "MPICH")


@pytest.fixture
def intel_mpi(pythons):
    return settings(pythons, "Intel(R) MPI")


@pytest.fixture(params=["Open MPI", "MPICH"])
def each_mpi(pythons, request):
    return settings(pythons, request.param)


@pytest.fixture
def any_mpi(pythons):
    """Whichever MPI is here, for what does not depend on it."""
    return settings(pythons, next(iter(pythons), "Open MPI"))


@pytest.fixture
def submit(cluster, tmp_path):
    """Submit a template as it is in the repository, from an empty folder."""

    def submit_template(name, *arguments, options=(), **environment):
        return cluster.submit(*options, ROOT / "slurm" / f"{name}.sbatch", *arguments, folder=tmp_path, **environment)

    return submit_template


@pytest.fixture
def completed(cluster, submit):
    """Submit a template, and return the job once it has ended well."""

    def run(name, *arguments, seconds=120, **given):
        job = cluster.wait(submit(name, *arguments, **given), seconds)
        assert (job.state, job.exit_status) == ("COMPLETED", 0), job.output
        return job

    return run


@pytest.fixture
def jobs():
    """The folder of the small scripts that the jobs run."""
    return HERE / "jobs"
