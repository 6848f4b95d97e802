"""Log lines of HPCDIST_LOG, with rank and group."""

from __future__ import annotations

import re

from tests.forked import mpirun

PROGRAM = """
import logging, os, sys
import torch
import hpcdist as dist
from hpcdist.launch import environment

levels = sys.argv[1].split(",")  # of each rank, or of all
os.environ["HPCDIST_LOG"] = levels[environment.detect().rank % len(levels)]
dist.init_process_group()
rank = dist.get_rank()
pair = dist.new_group([0, 2])
if rank != 1:
    dist.all_reduce(torch.ones(2, 3), group=pair)
dist.broadcast(torch.ones(4, dtype=torch.int64), 1)
if rank == 0:
    dist.send(torch.ones(5), 2)
if rank == 2:
    dist.recv(torch.ones(5), 0)
logging.getLogger("hpcdist").warning("of the program")
dist.destroy_process_group()
"""
LEVELS = {"info": {"INFO", "WARNING"}, "WARNING": {"WARNING"}, "error": set()}
LINE = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ \[rank (\d) of 3(?: group (\S+))?\] (\w+) (.*)$", re.MULTILINE)


def lines(levels: str) -> set[tuple[str, str, str, str]]:
    """Return rank, group, level and text of what a job logs."""
    result = mpirun(3, ["-c", PROGRAM, levels])
    assert result.returncode == 0, result.stderr
    return set(LINE.findall(result.stderr))


def test_debug_tells_of_each_call_with_rank_and_group() -> None:
    told = lines("debug")
    assert {(rank, "0", "DEBUG", "broadcast #2 of int64 [4], root 1") for rank in "012"} <= told
    assert {rank for rank, group, _, text in told if text == "all_reduce #1 of float32 [2, 3]" and group == "1"} == {
        "0",
        "2",
    }
    assert ("0", "0", "DEBUG", "send #1 of float32 [5], peer 2") in told
    assert ("2", "0", "DEBUG", "recv #1 of float32 [5], peer 0") in told
    assert {(rank, "1", "DEBUG", "made of ranks [0, 2], timeout 0:30:00") for rank in "02"} <= told
    assert {(rank, "0", "INFO", "default group of 3 ranks, mpi") for rank in "012"} <= told
    assert {(rank, "0", "DEBUG", "destroyed") for rank in "012"} <= told
    assert {(rank, "", "WARNING", "of the program") for rank in "012"} <= told


def test_a_level_keeps_out_what_is_below_it() -> None:
    logged = lines(",".join(LEVELS))
    told = {rank: {each[2] for each in logged if each[0] == rank} for rank in "012"}
    assert told == dict(zip("012", LEVELS.values(), strict=True))
    assert lines("") == set()


def test_an_unknown_level_is_an_error_that_names_the_known_ones() -> None:
    result = mpirun(2, ["-c", PROGRAM, "loud"])
    assert result.returncode != 0
    assert "HPCDIST_LOG='loud' is not a level (known: debug, info, warning, error)" in result.stderr
