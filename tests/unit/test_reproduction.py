"""HPCDIST_REPRODUCIBLE."""

from __future__ import annotations

import pytest

from hpcdist.launch import environment


@pytest.mark.parametrize(("given", "is_on"), [("0", False), ("1", True)])
def test_the_environment_chooses(given, is_on, monkeypatch):
    monkeypatch.setenv(environment.REPRODUCIBLE, given)
    assert environment.is_on(environment.REPRODUCIBLE) is is_on


def test_what_was_chosen_goes_before_the_environment(monkeypatch):
    """A world of one process, for which nothing is compared."""
    import hpcdist
    from hpcdist.core import hooks

    monkeypatch.setattr(hooks, "reproducible", True)
    monkeypatch.setenv(environment.REPRODUCIBLE, "0")
    hpcdist.init_process_group("loopback", bridge=False)
    hpcdist.destroy_process_group()
    assert hooks.reproducible


def test_another_value_is_an_error(monkeypatch):
    monkeypatch.setenv(environment.REPRODUCIBLE, "exact")
    with pytest.raises(ValueError, match=r"HPCDIST_REPRODUCIBLE='exact': expected 0 or 1"):
        environment.is_on(environment.REPRODUCIBLE)
