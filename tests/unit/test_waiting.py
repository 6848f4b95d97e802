"""Waits for a condition."""

from __future__ import annotations

import time

import pytest

from hpcdist.core import waiting
from hpcdist.core.waiting import wait_until


def test_a_wait_ends_with_its_condition_or_its_time() -> None:
    ends = time.monotonic() + 0.02
    assert wait_until(lambda: time.monotonic() >= ends)
    assert time.monotonic() >= ends
    began = time.monotonic()
    assert not wait_until(list, 0.02)
    assert time.monotonic() - began >= 0.02
    assert wait_until(lambda: "true", 0.0)
    assert not wait_until(lambda: None, -1.0)


def test_the_first_looks_follow_each_other_at_once_and_naps_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(waiting.time, "sleep", naps.append)
    looks = iter([False] * 7 + [True])
    assert wait_until(lambda: next(looks), looks=5)
    assert len(naps) == 2
    naps.clear()
    waiting.nap(0.0)
    waiting.nap(0.032)
    waiting.nap(60.0)
    waiting.nap(60.0, 0.02)
    assert naps == [50e-6, 0.001, 2e-3, 0.02]
