"""Pytest plugin: tensors that a test makes without a device are CUDA's."""

import pytest
import torch


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_pyfunc_call(pyfuncitem):
    with torch.device("cuda"):
        return (yield)
