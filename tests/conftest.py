"""What holds for all tests: under mpirun the ranks share one verdict.

A test that fails on one rank fails on all of them, with that rank's report, and rank 0 alone prints. A rank
that fails while others wait for it in a collective is ended by the time limit of the test, which ends the job.
"""

from __future__ import annotations

import os
import shutil

import pytest

from hpcdist.cli.doctor.mpi_library import dead_sessions


def mpi_world():
    """Return COMM_WORLD where mpirun started several pytests, else None."""
    if not any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")):
        return None
    if "HPCDIST_TEST_CHILD" in os.environ:  # a program that a test starts on its own
        return None
    from hpcdist.backends.mpi import runtime

    return runtime.world()


WORLD = mpi_world()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session):
    if WORLD is not None and WORLD.Get_rank() != 0:
        plugins = session.config.pluginmanager
        plugins.unregister(plugins.getplugin("terminalreporter"))


def pytest_runtest_setup(item):
    """Take away what mpiruns left that a test before has killed: one that gets the same process id would not start."""
    if WORLD is None:
        for folder in dead_sessions():
            shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_modifyitems(config, items):
    """Keep a folder's tests on one worker of pytest-xdist: they share what is dear to start, such as a cluster."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            item.add_marker(pytest.mark.xdist_group(item.path.relative_to(config.rootpath).parts[1]))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    if WORLD is None or WORLD.Get_size() == 1:
        return
    report = outcome.get_result()
    text = str(report.longrepr) if report.failed else ""
    verdicts = WORLD.allgather((report.failed, text))
    if any(failed for failed, _ in verdicts):
        lines = [f"rank {rank}:\n{text}" for rank, (failed, text) in enumerate(verdicts) if failed]
        report.outcome = "failed"
        report.longrepr = "\n".join(lines)
