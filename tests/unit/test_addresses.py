"""This host's addresses: no loopback among them, in the order in which other hosts should try them."""

from __future__ import annotations

import pytest

import hpcdist_stores as stores
from hpcdist.launch import addresses


def test_interfaces_have_addresses_that_are_no_loopback() -> None:
    found = addresses.interfaces()
    assert "lo" not in found
    assert not any(map(addresses.is_loopback, found.values()))
    assert set(addresses.own_addresses()) <= set(found.values())


def test_the_order_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {"docker0": "172.17.0.1", "eth0": "10.0.2.15", "ib0": "10.1.0.7", "eth1": "10.9.0.7", "eth2": "10.8.0.7"}
    monkeypatch.setattr(addresses, "interfaces", lambda: cards)
    monkeypatch.setattr(addresses, "addresses_of_name", lambda: ["127.0.1.1", "10.1.0.7"])
    monkeypatch.setattr(addresses, "route", lambda host, port: ("10.9.0.7", host))
    monkeypatch.delenv(addresses.CHOICE, raising=False)
    assert addresses.own_addresses() == ("10.1.0.7", "10.9.0.7", "172.17.0.1", "10.0.2.15")
    monkeypatch.setenv(addresses.CHOICE, "eth2,absent,eth1")
    assert addresses.own_addresses() == ("10.8.0.7", "10.9.0.7")


@pytest.mark.parametrize(
    ("address", "expected"), [("127.0.1.1", True), ("::1", True), ("fe80::1%eth0", False), ("10.0.0.1", False)]
)
def test_loopback(address: str, expected: bool) -> None:
    assert addresses.is_loopback(address) is expected


def test_the_address_among_the_users_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two users on the server's host, one elsewhere: the first two learn by which address the third came."""
    server = stores.TCPStore("127.0.0.1", 0, None, True)
    part = stores.PrefixStore("a group", server)
    assert addresses.address_among(stores.PrefixStore("alone", server), 1) == "127.0.0.1"
    monkeypatch.setattr(addresses, "route", lambda host, port: ("10.0.0.3", "10.0.0.1"))
    assert addresses.address_among(part, 3) == "10.0.0.3"
    monkeypatch.setattr(addresses, "route", lambda host, port: ("127.0.0.1", "127.0.0.1"))
    part.add("address/users", 1)  # the other user of the server's host
    assert addresses.address_among(part, 3) == "10.0.0.1"
