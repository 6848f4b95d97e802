"""Bytes on the wire: large collectives send the least that there can be, and give the same bits again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import launch
from tests.cluster.hosts import Cluster
from tests.faults.launch import LIBRARY

pytestmark = [pytest.mark.skipif(LIBRARY == "none", reason="this environment has no mpirun"), pytest.mark.timeout(300)]
# what a host has to send of S bytes on N hosts, as a part of S (N - 1) / N; of a broadcast the root sends S
LEAST = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
TARGET = 1.1  # TCP's headers, acknowledgements and what else the ranks say to each other


def run(cluster: Cluster, slots: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return what the job tells of each call."""
    command = [sys.executable, str(Path(__file__).with_name("bytes_job.py"))]
    done = launch.run(cluster, slots, command, seconds=200)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 12, done.stdout
    return lines


@pytest.mark.parametrize("slots", [pytest.param((2, 2), marks=pytest.mark.smoke), (1, 1, 1, 1)], ids=str)
def test_no_more_is_sent_than_must_be_and_the_bits_are_the_same_again(cluster: Cluster, slots: tuple[int, ...]) -> None:
    """On a slow network and on a fast one; broadcasts on MPICH, and most calls of nodes of one rank, are MPI's."""
    cluster.shape("1gbit")
    lines = run(cluster, slots)
    for line in lines:
        nodes = line["nodes"]
        assert nodes == len(slots)
        if line["call"] == "broadcast":
            least = line["nbytes"]
        else:
            least = LEAST[line["call"]] * line["nbytes"] * (nodes - 1) / nodes
        is_ours = max(slots) > 1 and (line["call"] != "broadcast" or LIBRARY != "mpich")
        is_ours = is_ours or ("reduce" in line["call"] and "float32" not in line["dtype"])
        assert line["sent"] < TARGET * least or not is_ours, line
    cluster.reset()
    assert [line["bits"] for line in run(cluster, slots)] == [line["bits"] for line in lines]
