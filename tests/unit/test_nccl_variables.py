"""TORCH_NCCL_* variables: followed, or refused with one warning."""

from __future__ import annotations

import warnings

import pytest

from hpcdist.backends.nccl import variables


@pytest.fixture(autouse=True)
def _no_warnings_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "WARNED", set())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, False),
        ({"TORCH_NCCL_BLOCKING_WAIT": "0"}, False),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, True),
        ({"NCCL_BLOCKING_WAIT": "1"}, True),
    ],
)
def test_a_wait_that_blocks_the_host_is_asked_for(given: dict[str, str], expected: bool) -> None:
    assert variables.blocks_in_wait(given) is expected


def test_what_cannot_be_followed_is_one_warning_that_names_it_and_its_remedy() -> None:
    given = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60", "PATH": "/bin"}
    with pytest.warns(UserWarning, match=r"ASYNC_ERROR_HANDLING=3, TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=60.*timeout="):
        variables.warn(given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        variables.warn(given)


@pytest.mark.parametrize("handling", ["1", "2"])
def test_what_is_followed_or_read_elsewhere_is_no_warning(handling: str) -> None:
    followed = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": handling,  # torchrun sets 1
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "NCCL_DEBUG": "INFO",  # NCCL's own
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        variables.warn(followed)
