"""Addresses: ranks find each other where a host's own name means its loopback and nothing is routed out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hpcdist.backends.mpi.node.thresholds import HALF_BETWEEN
from tests.cluster import launch
from tests.cluster.hosts import Cluster
from tests.faults.launch import LIBRARY, SOURCE

JOB = str(Path(__file__).with_name("meeting_job.py"))
smoke = pytest.mark.smoke
needs_mpi = pytest.mark.skipif(LIBRARY == "none", reason="this environment has no mpirun")
QUIET = {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def debian(cluster: Cluster) -> Cluster:
    """Hosts as Debian's installer leaves them: 127.0.1.1 and the own name in /etc/hosts."""
    cluster.name_hosts("debian")
    return cluster


@pytest.fixture
def ipv6(cluster: Cluster) -> Iterator[Cluster]:
    """Hosts that have no IPv4 address but the loopback's."""
    cluster.set_family(6)
    yield cluster
    cluster.set_family(4)


def run_on_each(cluster: Cluster, count: int, command: Sequence[str], **more: str) -> list[str]:
    """Run a command on the first hosts at once, with RANK and the like; return what each wrote."""
    started = []
    for number, host in enumerate(cluster.hosts[:count]):
        given = {"RANK": str(number), "WORLD_SIZE": str(count), "MASTER_ADDR": "n1", "MASTER_PORT": "29500", **more}
        environment = launch.environment(PYTHONPATH=str(SOURCE), **QUIET, **given)
        process = subprocess.Popen(
            host.command([each.replace("RANK", str(number)) for each in command]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        started.append(process)
    try:
        ended = [process.communicate(timeout=90) for process in started]
    finally:
        for host in cluster.hosts[:count]:
            host.end_processes()
    assert all(process.returncode == 0 for process in started), "\n".join(err for _, err in ended)
    return [out for out, _ in ended]


@smoke
def test_env_meets_at_the_name_of_a_debian_host(debian: Cluster) -> None:
    told = run_on_each(debian, 3, [sys.executable, JOB, "env"])
    assert told == [f"rank {rank} of 3: gloo\n" for rank in range(3)]


def test_torchrun_meets_at_the_name_of_a_debian_host(debian: Cluster) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--node-rank", "RANK", "--master-addr", "n1", "--master-port", "29501", JOB, "env"]
    told = sorted("".join(run_on_each(debian, 2, command)).splitlines())
    assert told == [f"rank {rank} of 4: gloo" for rank in range(4)]


@needs_mpi
@pytest.mark.parametrize("slots", [(2, 1), (1, 1, 1)], ids=str)
def test_a_group_of_gloo_beside_mpi(debian: Cluster, slots: tuple[int, ...]) -> None:
    done = launch.run(debian, slots, [sys.executable, JOB, "gloo"], **QUIET)
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 3: gloo" for rank in range(3)], done.stderr


@needs_mpi
def test_gloo_takes_the_interface_that_reaches_the_others() -> None:
    """The default route is by eth1, which reaches nobody, and the hosts' names do not tell."""
    with Cluster(2, ("eth0", "eth1")) as cluster:
        cluster.name_hosts("debian")
        for host in cluster.hosts:
            host.set_port(False, "eth1")
            host.set_gateway("eth1")
        # MPI is told of its interface; the store and gloo are to find theirs
        done = launch.run(cluster, (1, 1), [sys.executable, JOB, "gloo"], UCX_NET_DEVICES="eth0", **QUIET)
        assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2: gloo" for rank in range(2)], done.stderr


@smoke
@needs_mpi
def test_the_watchdog_asks_across_debian_hosts(debian: Cluster) -> None:
    done = launch.run(debian, (1, 1, 1), [sys.executable, JOB, "late"], **QUIET)
    assert done.returncode != 0
    assert re.search(
        r"rank 2 has not entered all_reduce #2 of group '0'; it is not in a call of hpcdist, at meeting_job\.py",
        done.stderr,
    ), done.stderr
    assert "ranks 0, 1 are in it" in done.stderr


@pytest.mark.skipif(LIBRARY != "openmpi", reason="MPICH's mpirun knows IPv4 addresses only")
@pytest.mark.parametrize(("kind", "expected"), [("late", "rank 1 has not entered all_reduce #2"), ("gloo", ": gloo")])
def test_ranks_ask_and_meet_where_there_is_no_ipv4(ipv6: Cluster, kind: str, expected: str) -> None:
    done = launch.run(ipv6, (1, 1), [sys.executable, JOB, kind], names_interface=False, **QUIET)
    assert expected in done.stdout + done.stderr
    assert done.returncode == (kind == "late"), done.stderr


@smoke
@needs_mpi
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("late", "whether ranks 1, 2 have entered all_reduce #2 of group '0' is not known; nobody off this node"),
        ("message", "rank 2 may not have met it; nobody off this node"),
    ],
)
def test_a_report_does_not_accuse_ranks_that_it_could_not_ask(cluster: Cluster, kind: str, expected: str) -> None:
    for host in cluster.hosts:
        host.block("udp")
    done = launch.run(cluster, (1, 1, 1), [sys.executable, JOB, kind], options=transport(), **QUIET)
    assert done.returncode != 0
    assert expected in done.stderr, done.stderr
    assert "answers: is UDP blocked between the nodes?" in done.stderr
    assert "has not entered" not in done.stderr


def transport() -> list[str]:
    """Return options that keep MPI itself off UDP: it is the watchdog that is to be cut off."""
    return [] if LIBRARY == "mpich" else ["--mca", "btl", "self,sm,tcp", "--mca", "pml", "ob1"]


@smoke
@needs_mpi
def test_the_doctor_finds_names_that_mean_the_loopback_and_blocked_datagrams(debian: Cluster) -> None:
    debian.hosts[1].block("udp")
    command = [sys.executable, "-m", "hpcdist", "doctor", "--json"]
    done = launch.run(debian, (1, 1), command, seconds=120, options=transport(), **QUIET)
    page = json.loads(done.stdout[done.stdout.index("{") :])
    found = [each for each in page["findings"] if each["topic"] == "Network between nodes"]
    assert any("n1 means the loopback (127.0.1.1)" in each["text"] for each in found), found
    blocked = [each for each in found if "exchange no UDP datagrams" in each["text"]]
    assert [each["level"] for each in blocked] == ["problem"], found
    assert done.returncode != 0


@pytest.mark.skipif(LIBRARY != "openmpi", reason="MPICH's mpirun knows IPv4 addresses only")
def test_the_doctor_connects_hosts_where_there_is_no_ipv4(ipv6: Cluster) -> None:
    command = [sys.executable, "-m", "hpcdist", "doctor", "--json"]
    done = launch.run(ipv6, (1, 1), command, seconds=120, names_interface=False, **QUIET)
    page = json.loads(done.stdout[done.stdout.index("{") :])
    found = [each for each in page["findings"] if each["topic"] == "Network between nodes"]
    assert {each["level"] for each in found} == {"note", "ok"}, found


@smoke
@needs_mpi
def test_bench_runs_across_hosts_and_counts_what_they_send(debian: Cluster) -> None:
    figures = debian.shared / "figures.json"
    command = [sys.executable, "-m", "hpcdist", "bench", "--sizes", "1M", "--rounds", "2", "--json", str(figures)]
    done = launch.run(debian, (1, 1), command, seconds=120, **QUIET)
    assert "2 ranks, 2 nodes" in done.stdout, done.stdout + done.stderr
    written = json.loads(figures.read_text())
    assert written["nodes"] == 2
    sent = {each["side"]: each["wire"] for each in written["figures"]}
    # all_reduce on two nodes: each sends all of it, by whatever way; a copy sends nothing
    assert all(1 << 20 < sent[side] < 3 << 20 for side in ("hpcdist", "mpi4py", "gloo")), sent
    assert sent["copy"] < 1 << 14


@needs_mpi
def test_tune_measures_several_hosts(cluster: Cluster) -> None:
    file = cluster.shared / "thresholds.json"
    hpcdist = [sys.executable, "-m", "hpcdist"]
    options = ["--rounds", "1", "--seconds", "0.01", "--output", str(file)]
    done = launch.run(cluster, (1, 1, 1), [*hpcdist, "tune", *options], seconds=120)
    assert "3 ranks on 3 nodes: time through shared memory over" in done.stdout, done.stdout + done.stderr
    ((places,),) = (known.values() for known in json.loads(file.read_text()).values())
    assert list(places) == ["nodes of one rank"]
    assert set(places["nodes of one rank"]) == set(HALF_BETWEEN)
    done = launch.run(cluster, (1, 1, 1), [*hpcdist, "bench", "--explain"], seconds=120, HPCDIST_SHM=str(file))
    assert f"measured on this processor: {file}" in " ".join(done.stdout.split()), done.stdout + done.stderr


@needs_mpi
@pytest.mark.parametrize("there", [0, 1])
def test_the_file_of_thresholds_on_the_host_of_rank_0_counts_for_all(cluster: Cluster, there: int) -> None:
    path = f"/tmp/thresholds-{there}.json"  # each host has a /tmp of its own
    cluster.hosts[there].run(["bash", "-c", f"echo '{{}}' > {path}"])
    cluster.hosts[2].run(["bash", "-c", f"echo '{{' > {path}"])  # and this one is broken
    done = launch.run(cluster, (1, 1, 1), [sys.executable, JOB, "gloo"], HPCDIST_SHM=path, **QUIET)
    if there == 0:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0
        assert f"thresholds of shared memory in '{path}' on n1: [Errno 2]" in done.stderr
