"""Handles of processes that a reconfiguration is given, without processes."""

from __future__ import annotations

import pytest

from hpcdist.c10d.reconfigure import Handle

MINE = Handle("a1b2c3d4", 3, -1, "node7", 4711)


def test_a_handle_is_read_as_it_was_written():
    assert str(MINE) == "hpcdist:a1b2c3d4:3:-1:node7:4711"
    assert Handle.read(str(MINE), "a1b2c3d4", 4) == MINE


@pytest.mark.parametrize(
    "text",
    [
        "", "xxx", None, 5, str(MINE).upper(), str(MINE).replace("hpcdist", "gloo"), f"{MINE}:1",
        str(MINE).replace(":3:", ":4:"), str(MINE).replace(":3:", ":-1:"), str(MINE).replace(":3:", ":x:"),
    ],
)  # fmt: skip
def test_what_is_no_handle_is_refused(text):
    with pytest.raises(RuntimeError, match="Invalid reconfigure handle") as error:
        Handle.read(text, "a1b2c3d4", 4)
    assert repr(text) in str(error.value)


def test_a_handle_of_another_job_is_refused():
    with pytest.raises(RuntimeError, match="is of another job: a process that a launcher started later cannot"):
        Handle.read(str(MINE), "00000000", 4)
