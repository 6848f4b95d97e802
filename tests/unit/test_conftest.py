"""Rules of all tests: what killed mpiruns left, and what runs on ranks only."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import conftest, forked, programs


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


def test_what_needs_ranks_is_skipped_without_with_mpi(tmp_path: Path) -> None:
    """pytest-mpi looks for its mark while the tests are collected: one that is set later skips nothing."""
    (tmp_path / "pytest.ini").write_text("[pytest]")
    for each in conftest.ON_RANKS:
        (tmp_path / "tests" / each).mkdir(parents=True)
        (tmp_path / "tests" / each / f"test_{each}.py").write_text("def test_one(): pass")
    shutil.copy(conftest.__file__, tmp_path / "tests")
    done = programs.run([*forked.python(), "-m", "pytest", "-p", "no:cacheprovider", "tests"], folder=tmp_path)
    assert f"{len(conftest.ON_RANKS)} skipped" in done.stdout, done.stdout + done.stderr
    assert "passed" not in done.stdout
