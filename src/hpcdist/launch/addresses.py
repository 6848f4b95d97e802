"""This host's network addresses, in the order in which other hosts should try them.

The host's name is not enough: Debian and Ubuntu write ``127.0.1.1 NAME`` into /etc/hosts, so that the name means the
loopback on the host itself and another address on other hosts, and a cluster's private network may have no default
route. So the interfaces are listed, and every user of an address (store, watchdog, gloo, doctor) takes it from here.
Addresses are IPv4's, or IPv6's on a host without any.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from functools import cache
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"
LOOPBACKS = {socket.AF_INET: LOOPBACK, socket.AF_INET6: "::1"}
# where a server listens that other hosts connect to
ALL_INTERFACES = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}
CHOICE = "GLOO_SOCKET_IFNAME"  # gloo's own variable: names of interfaces, separated by commas
MOST = 4  # addresses that are sent to other hosts

# linux/sockios.h and linux/if.h
SIOCGIFFLAGS, SIOCGIFADDR = 0x8913, 0x8915
IFF_UP, IFF_RUNNING = 0x1, 0x40
IPV6_ADDRESSES, GLOBAL = Path("/proc/net/if_inet6"), "00"  # lines of address, index, prefix, scope, flags, name


def is_loopback(address: str) -> bool:
    """Tell whether an address reaches only the host itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interfaces() -> dict[str, str]:
    """Return the address of each interface that is up and has one, except the loopback."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no IPv4 address
                (flags,) = struct.unpack_from("H", fcntl.ioctl(probe.fileno(), SIOCGIFFLAGS, request), 16)
                address = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
                if flags & IFF_UP and flags & IFF_RUNNING and not is_loopback(address):
                    found[name] = address
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for hexadecimal, _, _, scope, _, name in map(str.split, [] if found else IPV6_ADDRESSES.open()):
            if scope == GLOBAL:
                found.setdefault(name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(hexadecimal)))
    return found


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@cache
def family() -> socket.AddressFamily:
    """Return the family of this host's addresses."""
    return family_of(next(iter(interfaces().values()), LOOPBACK))


def addresses_of_name() -> list[str]:
    """Return the addresses to which this host resolves its own name; none if that is unknown."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, family(), socket.SOCK_DGRAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def own_addresses() -> tuple[str, ...]:
    """Return the addresses at which other hosts may reach this one, the most likely first.

    First come the addresses of the host's name, because administrators give names to the network for jobs; then the
    address of the default route; then the other interfaces. The interfaces that ``GLOO_SOCKET_IFNAME`` names replace
    all of them. The loopback is excluded, so that a host without a network has none.
    """
    by_interface = interfaces()
    chosen = [by_interface[name] for name in os.environ.get(CHOICE, "").split(",") if name in by_interface]
    if chosen:
        return tuple(chosen[:MOST])
    there = list(by_interface.values())
    preferred = [address for address in (*addresses_of_name(), *route("192.0.2.1", 9)[:1]) if address in there]
    return tuple(dict.fromkeys([*preferred, *there]))[:MOST]


def route(host: str, port: int) -> tuple[str, str] | tuple[()]:
    """Return the addresses of this host and another one between which the kernel would send; nothing is sent.

    Empty if the name is unknown or there is no route.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]), str(probe.getpeername()[0])
    except OSError:
        return ()


def network() -> str:
    """Return an identifier of the loopback: the same for exactly those processes that reach each other by it."""
    return kernel_id("net") or socket.gethostname()


def kernel_id(namespace: str) -> str:
    """Return an identifier of this kernel and one of its namespaces; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path(f'/proc/self/ns/{namespace}').readlink()}"
    except OSError:
        return ""


def address_among(store: Any, size: int) -> str | None:
    """Return the address of this host at which the other users of a store reach it; all ``size`` of them call.

    It is the one from which this host reaches the store's server. On the server's own host that may be the loopback:
    then it is the address at which another host has reached the server, if any user is on another host. The store's
    prefix belongs to these users; if it is not a TCPStore, the host's first address is used. None if the host's name
    resolves to an address that others may reach, and nothing better is known.
    """
    base = store
    while hasattr(base, "underlying_store"):
        base = base.underlying_store
    host, port = getattr(base, "host", None), getattr(base, "port", None)
    path = route(host, port) if host is not None and port is not None else ()
    if not path:
        others = own_addresses()
        return None if not others or any(address in others for address in addresses_of_name()) else others[0]
    here, server = path
    if not is_loopback(here):
        store.set("address/server", server)
    if store.add("address/users", 1) == size:
        store.set("address/complete", "")
    if not is_loopback(here):
        return here
    store.wait(["address/complete"])
    return str(store.get("address/server"), "ascii") if store.check(["address/server"]) else here
