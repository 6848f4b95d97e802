"""Names of memory files: those that killed processes have left are removed, and no others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcdist.core import memory_file


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /dev/shm."""
    monkeypatch.setattr(memory_file, "FOLDER", tmp_path)
    memory_file.remove_left_behind.cache_clear()
    return tmp_path


def begin(function: Callable[[], object]) -> int:
    """Call a function in another process, which then exits with status 0, and return its id."""
    if (child := os.fork()) == 0:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def create_and_die() -> None:
    memory_file.create(100)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_name_that_a_killed_process_left_is_removed(folder: Path) -> None:
    for each in ("another", "hpcdist-store"):  # the user's
        (folder / each).touch()
    os.waitpid(begin(create_and_die), 0)
    assert len([*folder.iterdir()]) == 3
    descriptor, name = memory_file.create(8)
    assert {each.name for each in folder.iterdir()} == {"another", "hpcdist-store", name}
    assert os.waitpid(begin(memory_file.remove_left_behind.__wrapped__), 0)[1] == 0
    os.close(memory_file.open_by_name(name))  # its process lives
    os.close(descriptor)


def use_many() -> None:
    for _ in range(300):
        memory_file.remove_left_behind.cache_clear()
        descriptor, name = memory_file.create(8)
        os.close(memory_file.open_by_name(name))
        memory_file.remove(name)
        os.close(descriptor)


def test_no_process_loses_a_name_that_it_uses(folder: Path) -> None:
    """Each looks for names that were left while the others make theirs."""
    assert [os.waitpid(each, 0)[1] for each in [begin(use_many) for _ in range(4)]] == [0] * 4
    assert [*folder.iterdir()] == []


def test_a_full_folder_is_not_one_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for blocks, available, expected in ((100, 7, 7 * 4096), (100, 0, 0), (0, 0, memory_file.UNLIMITED)):
        state = SimpleNamespace(f_blocks=blocks, f_bavail=available, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda _, state=state: state)
        assert memory_file.free_bytes() == expected
