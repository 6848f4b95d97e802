"""Fixtures of the tests of failures."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the file of a test module's PROGRAM, for jobs too short for a script of their own."""
    path = tmp_path / "job.py"
    path.write_text(request.module.PROGRAM)
    return path
