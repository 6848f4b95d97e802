"""Pytest plugin of the emulated GPUs: ``python -m pytest -p tests.emulated_gpu.plugin …``.

What breaks a rule of CUDA or NCCL fails the test in which it happens, on every rank of an MPI job. A test that breaks
one on purpose takes what was noted by the fixture ``violations``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.emulated_gpu.load import EMULATION  # before torch

import pytest  # isort: skip
import torch  # isort: skip


def own_device() -> int:
    """Return the device that is current in the main thread."""
    return torch.cuda.current_device()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> Any:
    """Fail a test that passes though a rule was broken."""
    is_bound = torch.distributed.is_initialized() and not EMULATION.contexts_anywhere
    EMULATION.own_device(own_device() if is_bound else -1)
    result = yield
    for device in EMULATION.contexts():
        if device == own_device():
            torch.cuda.synchronize(device)  # so that what is queued can still show
    fail_if_broken()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: Any) -> Any:
    """Do the same for what happens while a test's fixtures end."""
    result = yield
    fail_if_broken()
    return result


def fail_if_broken() -> None:
    """Fail with what was noted."""
    if text := EMULATION.take_violations():
        pytest.fail(f"a rule of CUDA or NCCL was broken:\n{text}", pytrace=False)


@pytest.fixture
def violations() -> Iterator[Callable[[], str]]:
    """Return a function that takes what was noted, for a test that breaks a rule on purpose."""
    return EMULATION.take_violations
