"""What runs before each test removes what killed mpiruns left in the tests' own folder, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import conftest


def test_session_folders_that_others_may_use_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of a container's host has none of its processes here, though the two may share /tmp."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folders = [tmp_path / name / f"ompi.{ended.pid}" for name in ("own", "shared")]
    for each in folders:
        each.mkdir(parents=True)
        (each / "hwloc.sm").touch()
    monkeypatch.setattr(conftest, "temporary_folder", lambda: tmp_path / "own")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))
    conftest.pytest_runtest_setup(None)
    assert [each.exists() for each in folders] == [False, True]
