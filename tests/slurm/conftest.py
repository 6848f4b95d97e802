"""One cluster for all tests in this folder, and the Pythons whose MPI the jobs run on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, why_not
from tests.slurm.mpis import MPIS, mpi_of

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# More Pythons than the one that runs the tests, separated by colons: the other MPI's environment.
OTHERS = "HPCDIST_TEST_PYTHONS"


def pytest_collection_modifyitems(items):
    reason = why_not()
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
    with Cluster() as started:
        paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        started.environment |= {
            "PYTHONPATH": os.pathsep.join(paths),
            "HPCDIST_PYTHON": sys.executable,
            # The jobs run as root, which Open MPI's mpirun refuses unless told twice.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            # Both nodes are this machine, which may have fewer cores than they claim together.
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            # By UCX, MPICH 5.0.2 publishes 4 KiB of memory that it has not written, in pieces whose length depends on
            # what is in it; those above 1 KiB break Slurm 22.05's pmi2. Seen in 2 of 3 runs of this folder.
            "MPIR_CVAR_CH4_NETMOD": "ofi",
        }
        yield started


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
        return cluster.submit(*options, ROOT / "slurm" / f"{name}.sbatch", *arguments, cwd=tmp_path, **environment)

    return submit_template


@pytest.fixture
def completed(cluster, submit):
    """Submit a template, and return the job once it has ended well."""

    def run(name, *arguments, timeout=120, **given):
        job = cluster.wait(submit(name, *arguments, **given), timeout)
        assert (job.state, job.exit_status) == ("COMPLETED", 0), job.output
        return job

    return run


@pytest.fixture
def jobs():
    """The folder of the small scripts that the jobs run."""
    return HERE / "jobs"
