"""What is said if NCCL cannot be used: what is missing, and the command that installs it."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hpcdist.backends.nccl import library
from hpcdist.core import registry
from hpcdist.core.backend import Bootstrap
from hpcdist.core.errors import DistBackendError
from tests.forked import python
from tests.programs import run

needs_nccl = pytest.mark.skipif(
    find_spec("nccl") is None, reason="nccl4py is not installed (pip install 'hpcdist[nccl-cu12]')"
)
LIMIT = torch.distributed.default_pg_timeout


IMPORTS = """
import sys
sys.modules["nccl"] = None  # an import of it now fails
import hpcdist, torch
assert "mpi4py" not in sys.modules
assert "hpcdist_stores.tcp.server.loop" not in sys.modules
import hpcdist.backends.nccl.backend
assert not torch.cuda.is_initialized()
assert not any(name.startswith("nccl.") for name in sys.modules)
assert not hpcdist.is_nccl_available()
"""


def test_importing_hpcdist_needs_neither_mpi4py_nor_nccl4py_nor_cuda_and_imports_none() -> None:
    done = run([*python(), "-c", IMPORTS])
    assert done.returncode == 0, done.stderr


def test_a_missing_package_is_an_error_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl", None)
    monkeypatch.setitem(sys.modules, "nccl.core", None)
    with pytest.raises(DistBackendError, match=f"needs nccl4py.*{re.escape(library.install_command())}"):
        registry.connect("nccl", Bootstrap(0, 1, LIMIT))


@pytest.mark.parametrize(("cuda", "extra"), [("12.9", "nccl-cu12"), ("13.0", "nccl-cu13")])
def test_the_pip_command_is_for_the_cuda_of_this_torch(monkeypatch: Any, cuda: str, extra: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert library.install_command() == f"pip install 'hpcdist[{extra}]'"


@needs_nccl
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_gpus_is_an_error_before_anything_is_sent() -> None:
    with pytest.raises(DistBackendError, match=r"built without CUDA|no NVIDIA driver|sees no GPU"):
        registry.connect("nccl", Bootstrap(0, 1, LIMIT))


@needs_nccl
def test_communicators_that_do_not_block_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    with pytest.raises(DistBackendError, match=r"NCCL_COMM_BLOCKING=0.*Unset it"):
        library.load()


@pytest.mark.parametrize(
    ("release", "message"), [(None, r"libnccl\.so\.2.*pip install"), ((2, 26, 5), r"2\.27 or later.* is 2\.26\.5.*pip")]
)
def test_no_libnccl_and_an_old_one_are_errors(monkeypatch: Any, release: Any, message: str) -> None:
    core, bindings = ModuleType("nccl.core"), ModuleType("nccl.bindings.nccl")
    found = None if release is None else SimpleNamespace(version=SimpleNamespace(release=release))
    core.get_version = lambda: SimpleNamespace(libnccl=found)  # type: ignore[attr-defined]
    for name, module in (("nccl.core", core), ("nccl.bindings.nccl", bindings)):
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(DistBackendError, match=message):
        library.load()


CASES = [
    (None, False, None, "built without CUDA"),
    ("12.9", False, None, "no NVIDIA driver"),
    ("12.9", True, None, "sees no GPU; ask"),
    ("12.9", True, "-1", "CUDA_VISIBLE_DEVICES is '-1'"),
]


@pytest.mark.parametrize(("cuda", "has_driver", "visible", "message"), CASES)
def test_a_missing_gpu_says_which_part_is_missing(
    monkeypatch: Any, cuda: str | None, has_driver: bool, visible: str | None, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(library, "has_driver", lambda: has_driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(DistBackendError, match=message):
        library.check_gpu()
