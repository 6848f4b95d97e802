"""Rules for all tests: under mpirun the ranks share one verdict, and what `make test` runs is marked.

A test that fails on one rank fails on all of them, with that rank's report, and only rank 0 prints. A rank
that fails while others wait for it in a collective is ended by the time limit of the test, which ends the job.
"""

import gc
import os
import shutil
from array import array

import pytest

import hpcdist as dist
from hpcdist.cli.doctor.mpi_library import dead_sessions
from tests.programs import temporary_folder


def mpi_world():
    """Return COMM_WORLD if mpirun started this pytest, else None."""
    if not any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")):
        return None
    if os.environ.get("HPCDIST_TEST_CHILD"):  # a program that a test starts on its own
        return None
    from hpcdist.backends.mpi.process import runtime

    return runtime.world()


WORLD = mpi_world()
if WORLD is not None:
    from mpi4py import MPI


@pytest.fixture
def rank(world):
    """This process's rank in the default group, which a folder's fixture ``world`` makes."""
    return dist.get_rank()


@pytest.fixture
def size(world):
    return dist.get_world_size()


@pytest.fixture
def two_ranks(size):
    """For tests that a rank alone cannot run."""
    if size < 2:
        pytest.skip("needs two ranks")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session):
    if WORLD is not None and WORLD.Get_rank() != 0:
        plugins = session.config.pluginmanager
        plugins.unregister(plugins.getplugin("terminalreporter"))


def pytest_runtest_setup(item):
    """Remove the session folders of mpiruns that earlier tests killed: one with the same process id would not start."""
    for folder in dead_sessions(temporary_folder()) if WORLD is None else ():
        shutil.rmtree(folder, ignore_errors=True)


# folders that `make test` runs whole; elsewhere it runs the tests that have the mark
QUICK = ("unit", "project")
ON_RANKS = ("mpi", "parity", "gpu")


def pytest_configure(config):
    if config.getoption("dist", "no") == "loadgroup" and not hasattr(pytest.Item, "_nodeid"):
        raise pytest.UsageError("pytest-xdist 3.8 does not group tests on this pytest; expected one below 9.2")


@pytest.hookimpl(tryfirst=True)  # before pytest-mpi, which skips what has its mark if --with-mpi is not given
def pytest_collection_modifyitems(config, items):
    for item in items:
        folder = item.path.relative_to(config.rootpath).parts[1]
        if folder in QUICK:
            item.add_marker(pytest.mark.quick)
        elif folder in ON_RANKS:
            item.add_marker(pytest.mark.mpi)


def pytest_collection_finish(session):
    """Let the full garbage collections of tests skip what was imported and collected: 0.3 s each in every rank."""
    gc.collect()
    gc.freeze()


FAILED = []  # what failed in the running test on this rank


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Compare the ranks' results once a test, after its last phase.

    Each comparison waits for all ranks: after each of the three phases they were a quarter of the time of MPICH's tests
    on more ranks than cores.
    """
    report = yield
    if report.failed:
        FAILED.append(str(report.longrepr))
    if WORLD is None or WORLD.Get_size() == 1 or report.when != "teardown":
        return report
    text = "\n".join(FAILED)
    FAILED.clear()
    failures = array("i", [bool(text)])
    WORLD.Allreduce(MPI.IN_PLACE, failures)
    if failures[0]:
        texts = WORLD.allgather(text)
        report.outcome = "failed"
        report.longrepr = "\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(texts) if text)
    return report
