"""HPCDIST_REPRODUCIBLE, and exact sums of numbers in any order."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from hpcdist.c10d import reproduction
from hpcdist.core import exact, hooks


@pytest.mark.parametrize(("given", "mode"), [("0", None), ("1", "in rank order"), ("exact", "exact")])
def test_the_environment_chooses(given, mode, monkeypatch):
    monkeypatch.setattr(hooks, "reproducible", None)
    monkeypatch.setenv(reproduction.VARIABLE, given)
    reproduction.set_from_environment()
    assert hooks.reproducible == mode


def test_what_was_chosen_goes_before_the_environment(monkeypatch):
    monkeypatch.setattr(hooks, "reproducible", "in rank order")
    monkeypatch.setenv(reproduction.VARIABLE, "exact")
    reproduction.set_from_environment()
    assert hooks.reproducible == "in rank order"


def test_another_value_is_an_error(monkeypatch):
    monkeypatch.setattr(hooks, "reproducible", None)
    monkeypatch.setenv(reproduction.VARIABLE, "yes")
    with pytest.raises(ValueError, match=r"HPCDIST_REPRODUCIBLE='yes': expected one of 0, 1, exact"):
        reproduction.set_from_environment()


def add(values, dtype):
    """Return the exact sum of some tensors, element by element."""
    span = exact.range_of(torch.stack([exact.extremes(each) for each in values]).max(dim=0).values)
    return exact.rounded(sum(exact.limbs_of(each, span) for each in values), span, dtype)


@pytest.mark.parametrize("spread", [0, 5, 40, 120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_exact_sums_are_the_nearest_numbers(spread, dtype):
    made = np.random.default_rng(spread)
    form = np.float32 if dtype is torch.float32 else np.float64
    values = [
        np.ldexp(made.standard_normal(300), made.integers(-spread, spread + 1, 300)).astype(form) for _ in range(7)
    ]
    values.append(-values[0] * (made.random(300) < 0.5).astype(form))  # some cancel
    summed = add([torch.from_numpy(each) for each in values], dtype)
    for column, found in zip(zip(*values, strict=True), summed.numpy(), strict=True):
        true = sum((Fraction(float(each)) for each in column), Fraction(0))
        beside = (np.nextafter(found, form(-np.inf)), np.nextafter(found, form(np.inf)))
        distance = abs(Fraction(float(found)) - true)
        assert all(distance <= abs(Fraction(float(each)) - true) for each in beside)


def test_ties_go_to_even_and_half_types_are_rounded_once():
    one, tie, above = torch.tensor([1.0]), torch.tensor([2.0**-11]), torch.tensor([2.0**-40])
    assert add([one, tie], torch.float16).item() == 1
    assert add([one, tie, above], torch.float16).item() == 1 + 2**-10  # rounded to float32 first it would be a tie
    assert add([one, tie, tie, tie], torch.float16).item() == 1 + 2 * 2**-10
    assert add([torch.tensor([2.0**-24])], torch.float16).item() == 2**-24
    assert add([torch.tensor([60000.0])] * 2, torch.float16).item() == float("inf")
