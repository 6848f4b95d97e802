"""Traces of the flight recorder: torch's tool reads each of them, whatever was called."""

from __future__ import annotations

from datetime import timedelta

import pytest

from hpcdist.backends.loopback import LoopbackBackend
from hpcdist.core.journal import MESSAGES
from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.table import ROWS
from hpcdist.core.world import WORLD
from hpcdist.watch.flight_recorder import Recorder

OURS = ("Window", "Window.close", "node_shared", "profile", "reconfigure", "new_group", "destroy_process_group")


def test_a_trace_has_no_call_that_the_tool_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    types = pytest.importorskip("torch.distributed.flight_recorder.components.types")
    group = ProcessGroup((0,), 0, {"cpu": LoopbackBackend()}, "loopback", "0", "", timedelta(seconds=10))
    monkeypatch.setitem(WORLD.groups, "0", group)
    for name in (*ROWS, *OURS, *MESSAGES):
        with group.journal.during(name, 0):
            pass
    calls = [each for each in Recorder("job").trace()["entries"] if each["process_group"][0] == "0"]
    names = {each["profiling_name"].removeprefix("gloo:").split()[0] for each in calls}
    assert names <= types.COLLECTIVES | types.P2P
    assert {"barrier", "all_reduce", "send", "recv", "split"} <= names
