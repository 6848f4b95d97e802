"""What a watchdog does for others' questions, without its thread."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcdist.watch import watchdog as module
from hpcdist.watch.calls_under_way import State
from hpcdist.watch.report import Collective, Report
from hpcdist.watch.signals import HANDLED
from hpcdist.watch.watchdog import Watchdog

RANK = 3
WHERE_ARE_YOU = {"from": 0, "group": "0", "dump": True}


@pytest.fixture
def watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watchdog]:
    """The watchdog of one rank, which writes its trace to ``tmp_path``."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/trace_")
    made = Watchdog("job", RANK)
    yield made
    made.channel.close()


def test_a_rank_answers_first_and_writes_one_trace_for_all_questions(watchdog: Watchdog, tmp_path: Path) -> None:
    trace = tmp_path / f"trace_{RANK}"
    assert watchdog._where(WHERE_ARE_YOU)["calls"] == watchdog._where(WHERE_ARE_YOU)["calls"] == []
    assert not trace.exists()
    watchdog.dump_if_due()
    assert trace.exists()
    trace.unlink()
    watchdog.dump_if_due()
    assert not trace.exists()


def test_a_trace_that_is_due_is_written_before_the_job_is_aborted(watchdog: Watchdog, tmp_path: Path) -> None:
    watchdog._where(WHERE_ARE_YOU)
    watchdog._note_abort({"from": 0, "reason": "a call has not ended", "leaves": False})
    assert (tmp_path / f"trace_{RANK}").exists()
    assert watchdog.job_end.is_known


def test_what_was_printed_is_written_before_the_process_ends(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks under Hydra print to a pipe, and so to a buffer."""
    written, statuses = io.BytesIO(), list[int]()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written))
    monkeypatch.setattr(os, "_exit", statuses.append)
    print("was here")
    watchdog.job_end.note("another rank has left", leaves=True)
    assert not written.getvalue()
    watchdog.job_end.exit_if_known()
    assert (written.getvalue(), statuses) == (b"was here\n", [1])


def test_what_was_found_out_before_is_not_told_of_the_next_default_group(watchdog: Watchdog) -> None:
    """Its groups and calls have the same names and numbers."""
    collective = Collective("0", 1, "all_reduce")
    found = Report(collective, 1, "all_reduce #1", ["rank 2 has not entered"], True, False)
    watchdog.channel.learn([0, 1, RANK], [tuple(watchdog.channel.own)] * 3)
    watchdog._where({**WHERE_ARE_YOU, "about": collective})
    watchdog._take_report({"report": found})
    assert watchdog.reports.find(collective) == found
    assert watchdog.reports.reporter("0", RANK, {}) == 0
    watchdog.renumber([])
    assert watchdog.reports.find(collective) is None
    assert watchdog.reports.reporter("0", RANK, {}) is None
    assert not watchdog.reports.was_swept("0")
    assert not watchdog.channel.endpoints


def test_a_call_made_after_a_ctrl_c_that_the_program_has_caught_is_left_alone(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = SimpleNamespace(state=State.RUNNING)
    monkeypatch.setattr(module, "under_way", lambda _: [call])
    watchdog._on_signal(signal.SIGINT)
    assert watchdog._found == [call]
    watchdog._on_signal(HANDLED)
    assert watchdog._found == []


def test_the_time_in_which_the_process_stood_still_does_not_count(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog._debug_socket = SimpleNamespace(sockets=[])  # type: ignore[assignment]
    monkeypatch.setattr(module, "wait_readable", lambda sources, seconds: time.sleep(1.2) or [])
    before = watchdog.clock()
    watchdog._take_in(0.0)
    assert watchdog.clock() - before < 0.5
