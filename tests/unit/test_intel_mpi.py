"""Intel MPI, and no other, is started so that threads may call its collectives.

That they then do not wait for each other, ``tests/mpi/test_async.py`` and ``tests/parity`` show under Intel MPI itself.
"""

import os
import warnings
from types import SimpleNamespace

import pytest

from hpcdist.backends.mpi.process import intel_mpi


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    monkeypatch.setenv(intel_mpi.VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(intel_mpi.VARIABLE)
    intel_mpi.warn_once.cache_clear()


def library(vendor):
    return SimpleNamespace(get_vendor=lambda: (vendor, (1, 0, 0)))


@pytest.mark.parametrize(
    ("vendor", "given", "expected"),
    [("Intel MPI", None, "pt2pt"), ("Intel MPI", "shm", "shm"), ("MPICH", None, None), ("Open MPI", None, None)],
)
def test_what_is_set_before_the_start(vendor, given, expected, monkeypatch):
    if given is not None:
        monkeypatch.setenv(intel_mpi.VARIABLE, given)
    intel_mpi.prepare(library(vendor))
    assert os.environ.get(intel_mpi.VARIABLE) == expected


@pytest.mark.parametrize(
    ("vendor", "given", "count"), [("Intel MPI", "shm", 1), ("Intel MPI", "pt2pt", 0), ("MPICH", "shm", 0)]
)
def test_a_start_that_is_not_ours_is_warned_of_once(vendor, given, count, monkeypatch):
    monkeypatch.setenv(intel_mpi.VARIABLE, given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        intel_mpi.warn_once(vendor)
        intel_mpi.warn_once(vendor)
    assert len(caught) == count
