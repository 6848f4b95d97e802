"""Loader of the emulated GPUs: puts them under torch in this process, which must not have imported torch yet.

The libraries are loaded by path first. After that the dynamic loader answers every ``libcuda.so.1``,
``libcudart.so.13`` and ``libnccl.so.2`` with what is there already under that name, whatever torch's own paths say; no
environment variable is needed and nothing in the virtual environment changes.
"""

from __future__ import annotations

import ctypes
import sys

from tests.emulated_gpu.build import BUILT, CUDA, NCCL, OPERATORS, RUNTIME

MOST_TEXT = 1 << 16  # characters of violations


class Emulation:
    """The emulated GPUs of this process.

    Attributes:
        operators: how many of torch's operators run on them.
        contexts_anywhere: whether a test may make contexts on devices other than the rank's own.
    """

    contexts_anywhere = False

    def __init__(self) -> None:
        if "torch" in sys.modules:
            raise RuntimeError("torch is imported already: the emulated GPUs must be loaded before it")
        if not (BUILT / OPERATORS).exists():
            raise RuntimeError(f"no emulated GPUs in {BUILT}: build them first (python -m tests.emulated_gpu.build)")
        libraries = [ctypes.CDLL(str(BUILT / name), ctypes.RTLD_GLOBAL) for name in (CUDA, RUNTIME, NCCL)]
        self._driver = libraries[0]
        import torch

        torch.ops.load_library(str(BUILT / OPERATORS))
        operators = ctypes.CDLL(str(BUILT / OPERATORS))
        self.operators = operators.emulated_gpu_operators()
        torch.cuda.is_available()
        torch._C._cuda_init()
        operators.emulated_gpu_watch_allocator()

    def take_violations(self) -> str:
        """Return the rules that were broken since the last call, a line each."""
        text = ctypes.create_string_buffer(MOST_TEXT)
        self._driver.emulated_gpu_take_violations(text, ctypes.c_size_t(MOST_TEXT))
        return text.value.decode(errors="replace")

    def own_device(self, device: int) -> None:
        """Make a context on any other device than this one a violation; -1 allows all."""
        self._driver.emulated_gpu_own_device(device)

    def contexts(self) -> list[int]:
        """Return the devices on which this process has a context."""
        import torch

        return [each for each in range(torch.cuda.device_count()) if self._driver.emulated_gpu_is_active(each)]

    def fail(self, device: int, code: int = 700) -> None:
        """Make a device fail as after a kernel's illegal access (CUDA error 700): for good."""
        self._driver.emulated_gpu_fail(device, code)


EMULATION = Emulation()
