"""HPCDIST_REPRODUCIBLE."""

from __future__ import annotations

import pytest

from hpcdist.c10d import reproduction
from hpcdist.core import hooks


@pytest.mark.parametrize(("given", "is_on"), [("0", False), ("1", True)])
def test_the_environment_chooses(given, is_on, monkeypatch):
    monkeypatch.setattr(hooks, "reproducible", False)
    monkeypatch.setenv(reproduction.VARIABLE, given)
    reproduction.set_from_environment()
    assert hooks.reproducible is is_on


def test_what_was_chosen_goes_before_the_environment(monkeypatch):
    monkeypatch.setattr(hooks, "reproducible", True)
    monkeypatch.setenv(reproduction.VARIABLE, "0")
    reproduction.set_from_environment()
    assert hooks.reproducible


def test_another_value_is_an_error(monkeypatch):
    monkeypatch.setattr(hooks, "reproducible", False)
    monkeypatch.setenv(reproduction.VARIABLE, "exact")
    with pytest.raises(ValueError, match=r"HPCDIST_REPRODUCIBLE='exact': expected one of 0, 1"):
        reproduction.set_from_environment()
