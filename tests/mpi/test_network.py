"""Kind of network between nodes of one rank: the same on all ranks, and measured once a process."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("mpi4py")

from hpcdist.backends.mpi.node import network
from hpcdist.backends.mpi.node.places import locate
from hpcdist.backends.mpi.node.thresholds import Network
from hpcdist.backends.mpi.process import ulfm


@pytest.fixture
def places(every, monkeypatch):
    """Each rank on a node of its own, by node keys; no rank knows the network."""
    monkeypatch.setattr(network, "KNOWN", [])
    monkeypatch.setattr(ulfm, "is_tolerant", lambda: False)
    found = locate(every, [], str(every.rank))
    yield found._replace(has_rdma=False)  # whatever this machine has
    found.node.Free()


@pytest.mark.parametrize(("fast", "kind"), [(0.0, Network.FAST), (math.inf, Network.SLOW)])
def test_it_is_measured_once(places, monkeypatch, fast, kind):
    monkeypatch.setattr(network, "FAST", fast)
    made = []
    assert network.between(places, made) == kind
    assert [kind] == network.KNOWN
    assert made == []  # the communicator of the measurement is freed
    monkeypatch.setattr(network, "speed", None)
    assert network.between(places, made) == kind


def test_all_ranks_get_the_same_speed(places):
    found = network.speed(places.comm, [])
    assert places.comm.allgather(found) == [found] * places.comm.size
    assert found > 0


@pytest.mark.parametrize("who", ["first", "last"])
def test_what_one_rank_knows_holds_for_its_group(places, monkeypatch, who):
    monkeypatch.setattr(network, "speed", None)
    knows = 0 if who == "first" else places.comm.size - 1
    network.KNOWN[:] = [Network.SLOW] if places.comm.rank == knows else []
    assert network.between(places, []) == Network.SLOW
    assert network.KNOWN == [Network.SLOW]


def test_of_several_kinds_the_slowest_holds(places, monkeypatch):
    monkeypatch.setattr(network, "speed", None)
    network.KNOWN[:] = [Network.SLOW if places.comm.rank == 1 else Network.FAST]
    assert network.between(places, []) == Network.SLOW
    assert network.KNOWN == [Network.SLOW]


def test_nothing_is_measured_with_rdma_or_if_ranks_share_a_node(places, every, monkeypatch):
    monkeypatch.setattr(network, "speed", None)
    assert network.between(places._replace(has_rdma=True), []) == Network.RDMA
    together = locate(every, [], "one")
    assert network.between(together, []) == Network.UNKNOWN
    together.node.Free()
    assert network.KNOWN == []


def test_under_ulfm_the_network_counts_as_slow_on_all_ranks(places, monkeypatch):
    """hpcdist's own collectives can be revoked; also if only one rank took it for on, all would make the same calls."""
    monkeypatch.setattr(network, "speed", None)
    monkeypatch.setattr(ulfm, "is_tolerant", lambda: places.comm.rank == 0)
    assert network.between(places, []) == Network.SLOW
