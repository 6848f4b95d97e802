"""What is set in the environment before MPI starts, and what stays as the user chose it."""

from __future__ import annotations

import os
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
