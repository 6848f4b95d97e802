"""What is set in the environment before MPI starts, and what stays as the user chose it."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta

import pytest

import hpcdist as dist
from hpcdist.backends.mpi.process import runtime


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({runtime.FAULT_TOLERANCE: "0"}, None),
        ({runtime.FAULT_TOLERANCE: "false"}, None),
        ({runtime.FAULT_TOLERANCE: "1"}, "-1"),
        ({runtime.FAULT_TOLERANCE: "true", runtime.COLLECTIVES: "^hcoll"}, "-1"),
        ({runtime.FAULT_TOLERANCE: "1", runtime.HAN_PRIORITY: "50"}, "50"),
        ({runtime.FAULT_TOLERANCE: "1", runtime.COLLECTIVES: "^hcoll,han"}, None),
        ({runtime.FAULT_TOLERANCE: "1", runtime.COLLECTIVES: "han,tuned,basic"}, None),
    ],
)
def test_coll_han_is_left_out_under_ulfm_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    for name in (runtime.FAULT_TOLERANCE, runtime.COLLECTIVES, runtime.HAN_PRIORITY):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    runtime.leave_out_han()
    assert os.environ.get(runtime.HAN_PRIORITY) == expected


def test_what_needs_linux_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dist.is_mpi_available()  # mpi4py has loaded its library, as it would on macOS
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(dist.DistBackendError, match="works on Linux only, and this is darwin: start ranks"):
        dist.init_process_group("mpi")
    with pytest.raises(dist.DistStoreError, match="and this is darwin"):
        dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=5))
    dist.init_process_group()  # one process
    dist.destroy_process_group()


@pytest.mark.parametrize("owner", ["this", "another"])
@pytest.mark.parametrize(
    ("launcher", "is_child"),
    [("PMIx", True), ("PMIx of its own", False), ("PMI", True), ("closed PMI", True), ("PMI of its own", False)],
)
def test_a_child_of_a_rank_is_refused_unless_a_launcher_of_its_own_started_it(
    monkeypatch: pytest.MonkeyPatch, launcher: str, owner: str, is_child: bool
) -> None:
    for name in (runtime.PROCESS, runtime.NAMESPACE, runtime.DESCRIPTOR):
        monkeypatch.delenv(name, raising=False)
    ends = socket.socketpair()
    with ends[0], ends[1]:
        if "PMIx" in launcher:
            monkeypatch.setenv(runtime.NAMESPACE, "job-1")
        else:
            monkeypatch.setenv(runtime.DESCRIPTOR, str(ends[0].fileno()))
        pid = os.getpid() if owner == "this" else os.getppid()
        monkeypatch.setenv(runtime.PROCESS, f"{pid} {runtime.connection()}")
        if launcher == "PMIx of its own":
            monkeypatch.setenv(runtime.NAMESPACE, "job-2")
        elif launcher == "PMI of its own":
            monkeypatch.setenv(runtime.DESCRIPTOR, str(ends[1].fileno()))
        elif launcher == "closed PMI":
            ends[0].close()
        if is_child and owner == "another":
            with pytest.raises(dist.DistBackendError, match=f"was started by process {pid} of an MPI job"):
                runtime.check_process()
        else:
            runtime.check_process()
