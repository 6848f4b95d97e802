"""One default group for all tests in this folder, on the backend that HPCDIST_TEST_BACKEND names.

The ranks may be on several hosts (``tests/cluster`` runs them there). Tests of what belongs to one node, such as its
shared memory, use the communicator ``of_host``; all others use all ranks.
"""

import os

import pytest

import hpcdist as dist
from hpcdist.core import memory_file
from tests.ranks import of_all_ranks

BACKEND = os.environ.get("HPCDIST_TEST_BACKEND")


@pytest.fixture(scope="package", autouse=True)
def _default_group():
    dist.init_process_group(BACKEND)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def communicator():
    """Return MPI's communicator of the default group; skip what needs it on another backend."""
    try:
        return dist.get_mpi_comm()
    except Exception:
        pytest.skip("no MPI in this backend")


@pytest.fixture(scope="package")
def of_host(_default_group):
    """The communicator of this host's ranks, each host's by themselves."""
    every = communicator()
    from mpi4py import MPI

    comm = MPI.Intracomm(every.Split_type(MPI.COMM_TYPE_SHARED, key=every.rank))
    yield comm
    comm.Free()


@pytest.fixture(scope="module")
def every(_default_group):
    """The communicator of all ranks, on however many hosts."""
    comm = communicator()
    if comm.size == 1:
        pytest.skip("needs two ranks")
    return comm


@pytest.fixture
def memory_files(monkeypatch):
    """The paths of the memory files that this process makes; other programs on the machine make some too."""
    made, create = [], memory_file.create

    def note(nbytes):
        descriptor, name = create(nbytes)
        made.append(memory_file.FOLDER / name)
        return descriptor, name

    monkeypatch.setattr(memory_file, "create", note)
    return made


@pytest.fixture
def world(_default_group):
    return dist.group.WORLD  # of the moment: some tests destroy it and make another


@pytest.fixture
def two_nodes(monkeypatch, rank):
    """Two nodes that are imitated by their keys, on one host: ranks of several hosts would share no memory."""
    if len({*of_all_ranks(os.uname().nodename)}) > 1:
        pytest.skip("imitated on one host")
    monkeypatch.setenv("HPCDIST_NODE_KEY", f"node{rank % 2}")
