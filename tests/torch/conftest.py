"""One default group for all tests in this folder that run under mpirun: hpcdist's, which is torch.distributed's too."""

import os
import pathlib

import pytest
import torch
import torch.distributed as torch_dist

import hpcdist as dist

HERE = pathlib.Path(__file__).parent
ALONE = {"test_launch.py", "test_doors.py", "test_mixes.py", "test_libraries.py"}  # start processes of their own


def pytest_collection_modifyitems(items):
    is_in_a_job = any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    for item in items:
        if HERE in item.path.parents and item.path.name not in ALONE:
            item.add_marker(pytest.mark.mpi)
        elif HERE in item.path.parents and is_in_a_job:
            item.add_marker(pytest.mark.skip(reason="starts mpirun itself"))


@pytest.fixture(scope="package")
def world():
    dist.init_process_group(os.environ.get("HPCDIST_TEST_BACKEND"))
    yield torch_dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def seeded(request):
    if request.path.name not in ALONE:
        request.getfixturevalue("world")
    torch.manual_seed(0)


@pytest.fixture(scope="package")
def gloo(world):
    """Torch's own gloo over the same ranks, to compare with."""
    return torch_dist.new_group(backend="gloo")


@pytest.fixture
def shared_path(world, tmp_path_factory, rank):
    """A folder that all ranks see."""
    path = [str(tmp_path_factory.mktemp("shared")) if rank == 0 else None]
    dist.broadcast_object_list(path, src=0)
    return pathlib.Path(path[0])
