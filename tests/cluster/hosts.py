"""Virtual cluster: hosts of their own inside one Linux machine, for tests of what happens between hosts.

Each host is a set of namespaces (network, mount, UTS, IPC, process) with its own address (10.77.0.1, …), name (n1, …),
/tmp, /dev/shm, boot id and process ids, joined to a bridge by a veth pair. All else of the file system is shared, as on
a cluster with NFS; under /tmp only `Cluster.shared`, this checkout and this Python are. Nothing is routed out of the
hosts. Links, ports and firewalls can be cut, bandwidth shaped, and bytes on the wire counted.

All namespaces are inside those of one keeper process (``switch.py``) and have no names outside, so that two clusters on
one machine do not meet and nothing is left behind, also when a test run is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.programs import ROOT

HERE = Path(__file__).parent
# interface of a host -> first three numbers of its addresses
NETWORKS = {"eth0": "10.77.0", "eth1": "10.78.0"}
# program -> Debian's package
PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", "nsenter": "util-linux", "unshare": "util-linux"}
UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL")
END_SECONDS = 10.0
SMALLEST_BURST = 256 << 10  # bytes; else what 2 ms send
UNITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
TRIAL = """
set -e
ip link add br0 type bridge
ip link add name port0 type veth peer name port1
tc qdisc add dev port0 root tbf rate 1gbit burst 256kb latency 50ms
nft add table inet trial
"""


@cache
def why_not() -> str:
    """Say why no virtual cluster can be started here; empty if one can."""
    missing = {package for program, package in PROGRAMS.items() if shutil.which(program) is None}
    if missing:
        return f"the virtual cluster needs packages that are not installed: apt-get install {' '.join(sorted(missing))}"
    if os.geteuid() != 0:
        return "the virtual cluster makes network and process namespaces, which takes root"
    trial = subprocess.run(
        [*UNSHARE, "--uts", "--ipc", "bash", "-c", TRIAL], capture_output=True, text=True, check=False
    )
    return "" if trial.returncode == 0 else f"this kernel or container gives no namespaces: {trial.stderr.strip()}"


def checked(command: Sequence[str], text: str | None = None) -> str:
    """Run a command that must work, and return what it wrote.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Traffic(NamedTuple):
    """Bytes that a host has sent and received by an interface since it was started."""

    sent: int
    received: int


class Host:
    """One virtual host.

    Attributes:
        name: its host name.
        address: its IPv4 address on eth0.
        pid: its first process, in this process's numbering.
        server: its process that forks programs, in the host's numbering, if there is one; no test asks for it.
    """

    def __init__(self, cluster: Cluster, number: int, name: str, pid: int) -> None:
        self.cluster, self.number, self.name, self.pid = cluster, number, name, pid
        self.address = f"{NETWORKS['eth0']}.{number}"
        self.server: int | None = None
        self._enter = ["nsenter", "-t", str(pid), "-n", "-m", "-u", "-i", "-p", "--"]

    # -- commands and processes ----------------------------------------------------------------------

    def command(self, words: Sequence[str], folder: Path = ROOT) -> list[str]:
        """Return the command line that runs a command on this host, in a folder."""
        return [*self._enter, "bash", "-c", 'cd "$1"; shift; exec "$@"', "bash", str(folder), *words]

    def run(
        self, words: Sequence[str], seconds: float = 60, environment: dict[str, str] | None = None, folder: Path = ROOT
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host, in a folder, and return its status and what it wrote."""
        command = self.command(words, folder)
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)

    def processes(self) -> dict[int, str]:
        """Return the processes of this host by their ids there, without its first one and its server."""
        found = {}
        listing = ["ps", "-ww", "-eo", "pid=,stat=,args="]
        for line in checked([*self._enter, *listing]).splitlines():
            pid, state, text = line.split(None, 2)
            # not: its first process, that one's sleep, this ps, what has ended
            if pid not in ("1", str(self.server)) and text not in ("sleep 3600", " ".join(listing)) and state[0] != "Z":
                found[int(pid)] = text
        return found

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to one of this host's processes, by its id there."""
        checked([*self._enter, "kill", f"-{number}", str(pid)])

    def end_processes(self) -> None:
        """Kill every process of this host but its first, if there is any."""
        deadline = time.monotonic() + END_SECONDS
        while self.processes():
            assert time.monotonic() < deadline, f"{self.name} keeps {self.processes()}"
            self.server = None
            checked([*self._enter, "bash", "-c", "kill -KILL -1"])
            time.sleep(0.02)

    # -- the network ---------------------------------------------------------------------------------

    def _network(self, *words: str, text: str | None = None) -> str:
        return checked(["nsenter", "-t", str(self.pid), "-n", "--", *words], text)

    def set_link(self, is_up: bool, interface: str = "eth0") -> None:
        """Set the host's end of the cable up or down: the host sees it."""
        self._network("ip", "link", "set", interface, "up" if is_up else "down")

    def set_port(self, is_joined: bool, interface: str = "eth0") -> None:
        """Join the cable's other end to the switch, or take it away: frames are lost, and no host sees why."""
        master = ["master", f"br-{interface}"] if is_joined else ["nomaster"]
        self.cluster.on_switch("ip", "link", "set", f"port{self.number}{interface}", *master)

    def set_gateway(self, interface: str | None) -> None:
        """Give the host a default route by an interface, or none."""
        subprocess.run(
            ["nsenter", "-t", str(self.pid), "-n", "--", "ip", "route", "del", "default"], capture_output=True
        )
        if interface is not None:
            self._network("ip", "route", "add", "default", "via", f"{NETWORKS[interface]}.254")

    def block(self, *what: str) -> None:
        """Drop what comes in from other hosts: "udp", "tcp", or the numbers of TCP ports; nothing: drop no more."""
        rules = [
            f'iifname "eth*" {f"meta l4proto {each}" if each in ("udp", "tcp") else f"tcp dport {each}"} drop'
            for each in what
        ]
        lines = ["flush ruleset", "table inet cluster {", "chain input {", "type filter hook input priority 0", *rules]
        self._network("nft", "-f", "-", text="\n".join([*lines, "}", "}", ""]))

    def traffic(self, interface: str = "eth0") -> Traffic:
        """Return the bytes on the wire so far."""
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name.strip() == interface:
                fields = [int(each) for each in rest.split()]
                return Traffic(fields[8], fields[0])
        raise ValueError(f"{self.name} has no interface {interface}")


class Cluster:
    """Virtual hosts joined by a switch, up between ``__enter__`` and ``__exit__``.

    Args:
        count: how many hosts.
        networks: their interfaces, of ``NETWORKS``.

    Attributes:
        hosts: the hosts n1, n2, …
        shared: a folder that all hosts and the test see, under the same path.
    """

    def __init__(self, count: int, networks: Sequence[str] = ("eth0",)) -> None:
        self.networks = {each: NETWORKS[each] for each in networks}
        self.names = [f"n{number}" for number in range(1, count + 1)]
        self.hosts: list[Host] = []
        self.folder = Path(tempfile.mkdtemp(prefix="hpcdist-cluster-"))
        self.shared = self.folder / "shared"

    def __enter__(self) -> Cluster:
        self.folder.chmod(0o755)
        self.shared.mkdir()
        seen = {str(self.shared), *(str(each) for each in (ROOT, sys.prefix, sys.base_prefix))}
        asked = {
            "hosts": self.names,
            "networks": self.networks,
            "shared": [each for each in sorted(seen) if each.startswith("/tmp/")],
        }
        self._keeper = subprocess.Popen(
            [*UNSHARE, sys.executable, "-S", str(HERE / "switch.py"), str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert self._keeper.stdin is not None
            assert self._keeper.stdout is not None
            self._keeper.stdin.write(json.dumps(asked) + "\n")
            self._keeper.stdin.flush()
            if not self._keeper.stdout.readline():
                raise RuntimeError("the virtual cluster did not start; its error is above")
            self._switch = children(self._keeper.pid)[0]
            starters = [each for each in children(self._switch) if "unshare" in command_line(each)]
            pids = [children(each)[0] for each in sorted(starters)]
            numbered = enumerate(zip(self.names, pids, strict=True), 1)
            self.hosts = [Host(self, number, name, pid) for number, (name, pid) in numbered]
            self.name_hosts()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        try:
            self._keeper.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()  # and with it, by --kill-child, all of its namespace
            self._keeper.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def on_switch(self, *words: str) -> str:
        """Run a command in the switch's network namespace, and return what it wrote."""
        return checked(["nsenter", "-t", str(self._switch), "-n", "--", *words])

    def set_family(self, number: int) -> None:
        """Give eth0 of every host addresses, and their names: of IPv4, 4, or of IPv6, 6, only."""
        network, bits = {4: (NETWORKS["eth0"] + ".", 24), 6: ("fd77::", 64)}[number]
        for host in self.hosts:
            host.address = f"{network}{host.number}"
            host._network("ip", "address", "flush", "dev", "eth0", "scope", "global")
            host._network("ip", "address", "add", f"{host.address}/{bits}", "dev", "eth0", *["nodad"] * (number == 6))
        self.name_hosts()

    def name_hosts(self, style: str = "plain") -> None:
        """Write /etc/hosts of every host.

        Args:
            style: "plain": all names have their addresses; "debian": a host's own name means 127.0.1.1 there, as
                Debian's and Ubuntu's installers write it.
        """
        for own in self.hosts:
            lines = ["127.0.0.1 localhost", *(["127.0.1.1 " + own.name] if style == "debian" else [])]
            lines += [f"{each.address} {each.name}" for each in self.hosts if style != "debian" or each is not own]
            (self.folder / own.name / "hosts").write_text("\n".join(lines) + "\n")

    def shape(self, rate: str | None) -> None:
        """Limit the bandwidth of every cable in both directions ("1gbit", "100mbit"), or stop limiting it."""
        for host in self.hosts:
            for interface in self.networks:
                for pid, device in (host.pid, interface), (self._switch, f"port{host.number}{interface}"):
                    enter = ["nsenter", "-t", str(pid), "-n", "--", "tc", "qdisc"]
                    subprocess.run([*enter, "del", "dev", device, "root"], capture_output=True)
                    if rate is not None:
                        burst = max(SMALLEST_BURST, int(bits_per_second(rate) / 8 * 0.002))
                        limits = ["rate", rate, "burst", str(burst), "latency", "50ms"]
                        checked([*enter, "add", "dev", device, "root", "tbf", *limits])

    def traffic(self, interface: str = "eth0") -> dict[str, Traffic]:
        """Return the bytes that each host has sent and received so far."""
        return {host.name: host.traffic(interface) for host in self.hosts}

    def reset(self) -> None:
        """End what runs on the hosts, and undo what a test has changed."""
        for host in self.hosts:
            host.end_processes()
            host.block()
            for interface in self.networks:
                host.set_link(True, interface)
                host.set_port(True, interface)
            host.set_gateway(None)
            host.run(["bash", "-c", "rm -rf /dev/shm/* /tmp/ompi.* /tmp/prte* /tmp/pmix* /tmp/hpcdist-*.txt"])
        self.shape(None)
        self.name_hosts()


def bits_per_second(rate: str) -> float:
    """Return what a rate such as "1gbit" is."""
    for unit, factor in UNITS.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise ValueError(f"rate {rate!r}: expected a number and one of {', '.join(UNITS)}, such as 1gbit")


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_line(pid: int) -> str:
    """Return the words of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
