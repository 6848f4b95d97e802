"""One virtual cluster of four hosts for all tests in this folder; each test finds it as new."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster, why_not
from tests.cluster.launch import SECONDS

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(SECONDS + 60))
            if reason := why_not():
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def four_hosts() -> Iterator[Cluster]:
    with Cluster(4) as cluster:
        yield cluster


@pytest.fixture
def cluster(four_hosts: Cluster) -> Iterator[Cluster]:
    """Four hosts on which nothing runs, with all cables whole."""
    four_hosts.reset()
    yield four_hosts
    four_hosts.reset()
