"""One default group for all tests in this folder, on the backend that HPCDIST_TEST_BACKEND names."""

from __future__ import annotations

import os

import pytest

import hpcdist as dist

BACKEND = os.environ.get("HPCDIST_TEST_BACKEND")


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/mpi" in str(item.path):
            item.add_marker(pytest.mark.mpi)


@pytest.fixture(scope="session", autouse=True)
def _default_group():
    dist.init_process_group(BACKEND)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def world(_default_group):
    return dist.group.WORLD  # of the moment: some tests destroy it and make another


@pytest.fixture
def rank(world):
    return dist.get_rank()


@pytest.fixture
def size(world):
    return dist.get_world_size()
