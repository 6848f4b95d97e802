"""Traces of the flight recorder: torch's tool reads each of them, whatever was called."""

from __future__ import annotations

import gc
from collections import deque
from datetime import timedelta

import pytest

from hpcdist.backends.loopback import LoopbackBackend
from hpcdist.core.journal import MESSAGES, RING, Journal
from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.table import ROWS
from hpcdist.core.world import WORLD
from hpcdist.watch.recorder import KNOWS_GLOO, MAKER, NCCL_NAMES, Recorder

OURS = ("Window", "Window.close", "node_shared", "profile", "new_group", "destroy_process_group")


def test_a_trace_has_no_call_that_the_tool_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    types = pytest.importorskip("torch.distributed.flight_recorder.components.types")
    group = ProcessGroup((0,), 0, {"cpu": LoopbackBackend()}, "loopback", "0", "", timedelta(seconds=10))
    monkeypatch.setitem(WORLD.groups, "0", group)
    for name in (*ROWS, *OURS, *MESSAGES):
        with group.journal.during(name, 0):
            pass
    calls = [each for each in Recorder("job").trace()["entries"] if each["process_group"][0] == "0"]
    names = {each["profiling_name"].removeprefix(f"{MAKER}:").split()[0] for each in calls}
    assert names <= types.COLLECTIVES | types.P2P
    theirs = {} if KNOWS_GLOO else NCCL_NAMES
    assert {theirs.get(each, each) for each in ("barrier", "all_reduce", "send", "recv", "split")} <= names


def test_destroyed_groups_are_counted_and_nothing_else_is_kept_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RING, "calls", deque(maxlen=3))
    recorder = Recorder("job")
    before = recorder.made()
    for made in range(1, 9):
        group = ProcessGroup((0,), 0, {"cpu": LoopbackBackend()}, "loopback", "7", "", timedelta(seconds=10))
        WORLD.groups["7"] = group
        with group.journal.during("all_reduce"):
            recorder.tick()
        group.close()
        del WORLD.groups["7"]
        assert recorder.made() == before + 2 * made
    gc.collect()
    of_them = [each for each in gc.get_objects() if type(each) is Journal and each.group == "7"]
    assert len(of_them) <= 3  # those of the calls in the ring
