"""Every fault in every call ends in bounded time, under every MPI, and names who and where.

CI runs the cells of CHOSEN; HPCDIST_FAULTS=all runs the whole matrix. HPCDIST_FAULTS_FIGURES names a
file for the times.
"""

from __future__ import annotations

import json
import os

import pytest

from hpcdist.core.waiting import wait_until
from tests.faults.launch import FIRST, IS_WHOLE, LAUNCHERS, PLAIN, Job
from tests.programs import is_alive

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

FAULTS = ("kill", "stop", "exception", "exit", "other", "shape")
CALLS = ("all_reduce", "broadcast", "recv", "barrier", "all_gather_object", "async", "waited")
MEANINGLESS = {("shape", "barrier"), ("shape", "all_gather_object")}  # there is no shape to differ in
CHOSEN = {
    ("kill", "all_reduce"),
    ("stop", "all_reduce"),
    ("stop", "recv"),
    ("stop", "async"),
    ("stop", "waited"),
    ("exception", "barrier"),
    ("exit", "all_gather_object"),
    ("other", "all_reduce"),
    ("shape", "all_reduce"),
}
QUICK = {("stop", "recv"), ("exception", "barrier"), ("exit", "all_gather_object"), ("shape", "all_reduce")}
CELLS = [
    (fault, call)
    for fault in FAULTS
    for call in CALLS
    if (fault, call) not in MEANINGLESS and (IS_WHOLE or (fault, call) in CHOSEN)
]

RANKS, VICTIM, TIMEOUT = 3, 1, 2.0
SLACK = 4.0  # seconds that a busy machine may add


def note(**figures: object) -> None:
    if path := os.environ.get("HPCDIST_FAULTS_FIGURES"):
        with open(path, "a") as file:
            file.write(json.dumps(figures) + "\n")


SAME_EVERYWHERE = {"exception", "exit", "other", "shape"}  # where ULFM makes no difference


def marks(launcher: str, fault: str, call: str) -> list[pytest.MarkDecorator]:
    """Return what `make test` runs, and what ends within a second."""
    if fault == "kill" and launcher == "openmpi-ulfm":
        return [pytest.mark.timed]
    return [pytest.mark.quick] if launcher in FIRST and (fault, call) in QUICK else []


@pytest.mark.parametrize(
    ("launcher", "fault", "call"),
    [
        pytest.param(launcher, fault, call, marks=marks(launcher, fault, call))
        for launcher in LAUNCHERS
        for fault, call in CELLS
        if launcher in FIRST or (fault not in SAME_EVERYWHERE and call == "all_reduce")
    ],
)
def test_a_fault_ends_in_bounded_time(launcher: str, fault: str, call: str) -> None:
    environment = {"FAULT_TIMEOUT": str(TIMEOUT)}
    if fault in ("other", "shape"):
        environment["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    is_tolerant = launcher == "openmpi-ulfm"
    with Job(launcher, RANKS, [fault, call], **environment) as job:
        job.wait("fault")
        start = job.events("fault")[0]["time"]
        waiting = 1 if call == "recv" else RANKS - 1  # the ranks that wait for the victim
        if fault in ("other", "shape"):
            check_mismatch(job, call, waiting)
        elif fault == "kill" and is_tolerant:
            raised = job.expect("raised", waiting, TIMEOUT + SLACK)
            assert {each["kind"] for each in raised} == {"DistBackendError"}
            assert max(each["time"] for each in raised) - start < 1 + SLACK / 2
        elif fault == "stop" and (is_tolerant or call in ("recv", "async")):
            raised = job.wait("raised", waiting, TIMEOUT + 5 + SLACK)
            assert raised, job.stderr()
            assert {each["kind"] for each in raised} == {"DistBackendError"}
            check_report(job)
        else:
            status = job.finish(TIMEOUT + 10 + SLACK)
            assert status != 0
            check_words(job, fault)
        ended = max([each["time"] for each in job.events("raised")] + ([job.ended] if job.ended else []))
        note(
            launcher=launcher,
            fault=fault,
            call=call,
            seconds=round(ended - start, 3),
            outcome="raised" if job.events("raised") else "ended",
        )
        pids = job.pids()
    assert wait_until(lambda: not any(map(is_alive, pids.values())), 10)


@pytest.mark.parametrize("launcher", FIRST)
@pytest.mark.parametrize(
    ("call", "title"), [("nodes", "new_subgroups #3"), ("store", "open_store #3"), ("reproducible", "reproducible #3")]
)
def test_what_is_done_before_a_call_begins_is_watched_too(launcher: str, call: str, title: str) -> None:
    with Job(launcher, RANKS, ["absent", call], FAULT_TIMEOUT=str(TIMEOUT)) as job:
        job.wait("fault")
        job.wait("raised", RANKS - 1, TIMEOUT + 10 + SLACK)  # or the job's end
        assert f"rank {VICTIM} has not entered {title}" in job.stderr()


def test_a_report_goes_around_a_relay_that_is_stopped() -> None:
    """Each rank asks two others, which ask the rest: rank 0 asks ranks 1 (which is stopped) and 4."""
    environment = {"FAULT_TIMEOUT": str(TIMEOUT), "FAULT_FAN": "2"}
    with Job(PLAIN[0], 6, ["stop", "all_reduce"], **environment) as job:
        job.wait("fault")
        job.finish(TIMEOUT + 15 + SLACK)
        text = job.stderr()
        assert f"rank {VICTIM} has not entered all_reduce" in text
        assert "its process is stopped" in text
        assert "ranks 0, 2 to 5 are in it" in text


def check_mismatch(job: Job, call: str, waiting: int) -> None:
    """A mismatch raises on every rank; a message has no other rank to compare with and runs into the timeout."""
    raised = job.wait("raised", waiting if call == "recv" else RANKS, TIMEOUT + 5 + SLACK)
    assert raised, job.stderr()
    if call != "recv":
        assert len(raised) == RANKS
        for each in raised:
            assert "Detected mismatch between collectives" in each["text"]
            assert f"rank {VICTIM}:" in each["text"]
            assert "ranks 0, 2:" in each["text"]


def check_report(job: Job) -> None:
    """The report names the victim, its state, and the line that waits."""
    text = job.stderr()
    assert f"rank {VICTIM}" in text
    assert "its process is stopped" in text
    assert "job.py:" in text


def check_words(job: Job, fault: str) -> None:
    """What ended the job is said."""
    text = job.stderr()
    if fault == "exception":
        assert "ZeroDivisionError: the victim's own" in text
        assert f"[rank {VICTIM} of {RANKS}]" in text
    elif fault == "exit":
        assert f"[rank {VICTIM} of {RANKS}] hpcdist: this rank has left the program" in text
    elif fault == "stop":
        check_report(job)
