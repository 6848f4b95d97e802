"""The virtual cluster itself: its hosts are apart, its cables can be cut, and nothing of it is left behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster import launch
from tests.cluster.hosts import NETWORKS, Cluster
from tests.faults.launch import LIBRARY
from tests.programs import ROOT

pytestmark = [pytest.mark.smoke]
needs_mpi = pytest.mark.skipif(LIBRARY == "none", reason="this environment has no mpirun")

ANSWER = "import socket; s = socket.create_server(('', 5000)); c, _ = s.accept(); c.sendall(b'x' * 100_000); c.close()"
ASK = """
import socket, sys
s = socket.create_connection((sys.argv[1], 5000), timeout=2)
n = 0
while data := s.recv(65536):
    n += len(data)
print(n)
"""
# one word a rank: launchers may put the pieces of two ranks' lines into one
WHERE = "import os; from mpi4py import MPI; print(f'<{MPI.COMM_WORLD.allreduce(1)}@{os.uname().nodename}>')"
KEPT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from tests.cluster.hosts import Cluster
cluster = Cluster(2).__enter__()
print(cluster.folder, *(host.pid for host in cluster.hosts), flush=True)
time.sleep(60)
"""


def test_hosts_have_names_processes_and_memory_of_their_own(cluster: Cluster) -> None:
    one, two = cluster.hosts[:2]
    assert one.run(["hostname"]).stdout == "n1\n"
    assert two.run(["cat", "/etc/hostname"]).stdout == "n2\n"
    one.run(["touch", "/dev/shm/here", "/tmp/here"])
    assert two.run(["ls", "/dev/shm/here", "/tmp/here"]).stdout == ""
    boots = {host.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout for host in cluster.hosts}
    assert len(boots) == 4
    assert len(one.run(["ps", "-e"]).stdout.splitlines()) < 8
    assert not Path("/dev/shm/here").exists()


def fetch(server: str, cluster: Cluster) -> subprocess.CompletedProcess[str]:
    """Have n1 fetch 100,000 bytes from n2, by one of its names."""
    with subprocess.Popen(cluster.hosts[1].command([sys.executable, "-c", ANSWER])):
        time.sleep(0.4)
        done = cluster.hosts[0].run([sys.executable, "-c", ASK, server])
        cluster.hosts[1].end_processes()
    return done


def test_hosts_reach_one_another_by_name_and_address_and_the_bytes_are_counted(cluster: Cluster) -> None:
    before = cluster.traffic()
    assert fetch("n2", cluster).stdout == "100000\n"
    assert fetch("10.77.0.2", cluster).stdout == "100000\n"
    after = cluster.traffic()
    assert 200_000 < after["n2"].sent - before["n2"].sent < 220_000
    assert 200_000 < after["n1"].received - before["n1"].received < 220_000
    assert after["n3"].received - before["n3"].received < 10_000


def test_links_ports_and_firewalls_can_be_cut(cluster: Cluster) -> None:
    one, two = cluster.hosts[:2]
    two.set_link(False)
    assert fetch("n2", cluster).stdout == ""
    two.set_link(True)
    two.set_port(False)
    assert fetch("n2", cluster).stdout == ""
    two.set_port(True)
    two.block("5000")
    assert fetch("n2", cluster).stdout == ""
    two.block("udp")
    assert fetch("n2", cluster).stdout == "100000\n"
    one.block("tcp")
    assert fetch("n2", cluster).stdout == ""
    cluster.reset()
    assert fetch("n2", cluster).stdout == "100000\n"


def test_names_as_debian_has_them(cluster: Cluster) -> None:
    cluster.name_hosts("debian")
    ask = [sys.executable, "-c", "import socket; print(socket.gethostbyname('n2'))"]
    assert [host.run(ask).stdout for host in cluster.hosts[:2]] == ["10.77.0.2\n", "127.0.1.1\n"]


def test_bandwidth_is_shaped(cluster: Cluster) -> None:
    cluster.shape("10mbit")
    start = time.monotonic()
    with subprocess.Popen(cluster.hosts[1].command([sys.executable, "-c", ANSWER.replace("100_000", "1_000_000")])):
        time.sleep(0.4)
        assert cluster.hosts[0].run([sys.executable, "-c", ASK, "n2"]).stdout == "1000000\n"
    assert time.monotonic() - start > 0.6 + 0.4  # less than 0.8 s: what the bucket holds goes at once


def test_two_clusters_at_once_do_not_meet(cluster: Cluster) -> None:
    with Cluster(2, tuple(NETWORKS)) as other:
        assert other.hosts[0].address == cluster.hosts[0].address
        assert other.hosts[1].traffic("eth1").sent >= 0
        with subprocess.Popen(cluster.hosts[1].command([sys.executable, "-c", ANSWER])):
            time.sleep(0.4)
            assert "refused" in other.hosts[0].run([sys.executable, "-c", ASK, "n2"]).stderr
            cluster.hosts[1].end_processes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_test_run_that_is_killed_leaves_nothing_behind(number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KEPT, str(ROOT)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        assert run.stdout is not None
        folder, *pids = run.stdout.readline().split()
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        run.send_signal(number)
        run.wait(10)
    deadline = time.monotonic() + 10
    while Path(folder).exists() or any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    interfaces = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
    assert "br-eth" not in interfaces
    assert "eth0@port" not in interfaces


@needs_mpi
@pytest.mark.mpich
@pytest.mark.parametrize("slots", [(2, 2), (1, 2), (1, 1, 1, 1)], ids=str)
def test_mpi_starts_on_several_hosts(cluster: Cluster, slots: tuple[int, ...]) -> None:
    before = cluster.traffic()
    done = launch.run(cluster, slots, [sys.executable, "-c", WHERE])
    told = sorted(re.findall("<.*?>", done.stdout))
    expected = [f"<{sum(slots)}@n{number}>" for number, count in enumerate(slots, 1) for _ in range(count)]
    assert told == expected, done.stderr
    assert cluster.traffic()["n2"].sent > before["n2"].sent + 1000
