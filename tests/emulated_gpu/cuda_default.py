"""Pytest plugin (``-p tests.emulated_gpu.cuda_default``): tensors that a test makes without a device are CUDA tensors.

It runs the facade's own tests, which know nothing of GPUs, on the NCCL backend. What NCCL lacks is skipped, with the
error that a user would see as the reason.
"""

from __future__ import annotations

from typing import Any

from tests.emulated_gpu.load import EMULATION  # before torch

import pytest  # isort: skip
import torch  # isort: skip

LACKS = ("on NCCL:", "NCCL cannot receive from anyone", "NCCL carries a message to oneself")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> Any:
    """Run a test with CUDA as the default device."""
    if pyfuncitem.path.name == "test_objects.py":
        EMULATION.own_device(-1)  # pickle puts a tensor on the GPU that it was on, in the process that reads it too
    try:
        with torch.device("cuda"):
            return (yield)
    except RuntimeError as error:
        if any(text in str(error) for text in LACKS):
            pytest.skip(str(error)[:100])
        raise
