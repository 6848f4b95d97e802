"""Ranks of two hosts whose calls differ: each raises, or the job is aborted, with an error that names both calls."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.cluster import launch
from tests.cluster.hosts import Cluster
from tests.faults.launch import LAUNCHERS, LIBRARY
from tests.mpi import wrong_programs

FIRST, COUNT = (int(each) for each in os.environ.get("HPCDIST_TEST_WRONG_PROGRAMS", "0 20").split())
DIFFER = "do not make the same call"
# half of the programs with one rank on each host, half with two on one of them
LAYOUTS = [(1, 1), (2, 1)]
EXCHANGE = 58  # shares that only the two ranks know

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(LIBRARY == "none", reason="this environment has no mpirun"),
    pytest.mark.timeout(600 + 10 * COUNT),
]


@pytest.mark.parametrize("slots", LAYOUTS, ids=str)
def test_random_programs(cluster: Cluster, slots: tuple[int, ...]) -> None:
    size, half = sum(slots), COUNT // 2
    first = FIRST + LAYOUTS.index(slots) * half
    seeds = [EXCHANGE, *range(first, first + half)]
    while seeds:
        done = launch.run(
            cluster,
            slots,
            [sys.executable, "-m", "tests.mpi.wrong_programs", *map(str, seeds)],
            options=next(iter(LAUNCHERS.values())),
        )
        shown = f"{done.stdout}\n{done.stderr}"
        for seed in seeds.copy():
            odd = wrong_programs.program(seed, size)[1]
            lines = re.findall(rf"seed {seed} rank \d+: (.*?); memory", done.stdout)
            assert "OVERWRITTEN" not in done.stdout, shown
            if len(lines) < size:
                break
            seeds.remove(seed)
            for line in lines:
                assert line.startswith("CallsDifferError"), shown
                assert DIFFER in line, shown
                assert re.search(rf"ranks? [\d, to]*\b{odd}\b", line), shown
        if seeds:  # the next one was aborted
            assert done.returncode > 0, shown
            assert DIFFER in done.stderr, shown
            assert "Segmentation" not in shown, shown
            del seeds[0]


def test_a_difference_that_mpi_does_not_notice(cluster: Cluster) -> None:
    """It is found within a second, at the end of the group, and at that of the program."""
    program = [sys.executable, str(Path(__file__).with_name("two_ops_job.py"))]
    done = launch.run(cluster, (1, 1), program, options=next(iter(LAUNCHERS.values())))
    shown = f"{done.stdout}\n{done.stderr}"
    named = r"rank 0: all_reduce of 4 elements, float32, SUM; rank 1: all_reduce of 4 elements, float32, MAX"
    for when in ("next call", "end"):
        for rank in (0, 1):
            assert re.search(rf"{when} on {rank}: .*{named}", done.stdout), shown
    assert "its end" not in done.stdout, shown
    assert re.search(named, done.stderr), shown
    assert done.returncode > 0, shown
