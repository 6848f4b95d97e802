"""What N ranks cost stays within bounds: messages, datagrams, sockets and threads, counted on 8 ranks and on 64."""

from __future__ import annotations

import math
import os

import pytest

from tests.bench.scaling import counted
from tests.programs import LIBRARY

LARGE = [64] if os.environ.get("HPCDIST_TEST_LARGE") else []
MESSAGES = {  # of a rank, for each step of log2(N)
    "init_process_group": 16,
    "new_group of all": 6,
    "new_subgroups(2)": 6,
    "init_device_mesh": 12,
    "all_gather_object, 100 B": 2,
    "broadcast_object_list, 100 B": 4,
    "rest of 1 s": 0,
}


@pytest.mark.skipif(LIBRARY != "openmpi", reason="Open MPI counts the messages")
@pytest.mark.parametrize("ranks", [8, *LARGE])
def test_what_a_rank_sends_grows_with_the_logarithm(ranks: int) -> None:
    rows = {row["step"]: row for row in counted(ranks, 250, SCALING_REST="1", SCALING_HANG="1")}
    steps = math.log2(ranks)
    most = {step: rows[step]["messages"][1] / steps for step in MESSAGES}
    assert all(most[step] <= limit for step, limit in MESSAGES.items()), most
    assert {each for row in rows.values() for each in row["sockets"]} <= set(range(16))
    assert max(each for row in rows.values() for each in row["threads"]) <= 4
    assert rows["rest of 1 s"]["datagrams"][1] <= 2
    assert rows["hang"]["datagrams"][1] <= 64
