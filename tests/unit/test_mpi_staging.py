"""MPI is asked about CUDA before it is given device memory."""

from __future__ import annotations

import shutil
import subprocess
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("mpi4py.MPI", reason="no MPI library")

from hpcdist.backends.mpi import cuda as staging
from hpcdist.backends.mpi.backend import MPIBackend
from hpcdist.core.backend_parts import Faults
from hpcdist.core.call import Call
from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.table import ALL_GATHER_SINGLE, ALL_REDUCE, BROADCAST

LIMIT = torch.distributed.default_pg_timeout


@pytest.fixture(autouse=True)
def not_asked_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget = staging.is_aware.cache_clear
    forget()
    monkeypatch.setattr(staging, "kinds_of_memory", list)  # MPI itself has not been started here
    yield
    forget()


def test_a_group_of_mpi_alone_has_a_staged_side_for_cuda_and_its_own_for_the_cpu() -> None:
    inner = MPIBackend.__new__(MPIBackend)
    inner.rank, inner.size, inner.unfinished, inner.has_threads = 0, 1, deque(), True
    inner.objects = inner.collectives = SimpleNamespace(is_shared=lambda *_: False)  # type: ignore[assignment]
    group = ProcessGroup((0,), 0, {"cpu": inner, "cuda": inner}, "mpi", "0", "", LIMIT)
    assert group.backend("cpu") is inner
    staged = group.backend("cuda")
    assert isinstance(staged, staging.StagedBackend)
    assert staged.inner is inner
    assert set(group.backends.values()) == {inner}  # what is split, named and closed


@pytest.mark.parametrize("memory", [staging.CUDA, staging.ROCM, staging.LEVEL_ZERO], ids=lambda each: each.kind)
def test_a_library_is_asked_about_this_torchs_memory(memory: staging.Memory, monkeypatch: Any, tmp_path: Path) -> None:
    """A library that takes only one kind of memory, compiled here, says so for that one."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    source, made = tmp_path / "mpi.c", tmp_path / "libmpi.so"
    for function in (
        f"int {memory.functions[-1]}(void) {{return 1;}}",
        "int {name}(int kind, int *is) {{*is = kind == {number}; return 0;}}",
    ):
        text = function.replace("{{", "{").replace("}}", "}")
        text = text.replace("{name}", "MPIX_GPU_query_support").replace("{number}", str(memory.number))
        source.write_text(text)
        made = tmp_path / f"libmpi{len(text)}.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", made, source], check=True)
        monkeypatch.setattr(staging, "loaded_libraries", lambda made=made: [str(made)])
        said = {each.kind: staging.says_aware(each) for each in (staging.CUDA, staging.ROCM, staging.LEVEL_ZERO)}
        assert said == {each: each == memory.kind for each in said}


def test_crays_variable_counts_on_crays_library_only(monkeypatch: Any) -> None:
    monkeypatch.setattr(staging, "loaded_libraries", list)
    monkeypatch.setenv(staging.CRAYS, "1")
    assert not staging.says_aware(staging.ROCM)
    monkeypatch.setattr(staging.MPI, "Get_library_version", lambda: "MPI VERSION    : CRAY MPICH version 8.1.28.29")
    assert staging.says_aware(staging.ROCM)
    monkeypatch.setenv(staging.CRAYS, "0")
    assert not staging.says_aware(staging.ROCM)


@pytest.mark.parametrize(("says", "passes"), [(False, True), (True, False)])
def test_not_aware_is_one_warning_and_a_copy(monkeypatch: Any, says: bool, passes: bool) -> None:
    tried = []
    monkeypatch.setattr(staging, "says_aware", lambda: says)
    monkeypatch.setattr(staging, "passes_probe", lambda: tried.append(1) or passes)
    monkeypatch.setattr(staging.MPI, "Get_library_version", lambda: "Some MPI 1.0, of today")
    with pytest.warns(UserWarning, match=r"Some MPI 1.0.*hpcdist\[nccl-cu12\]"):
        assert not staging.is_aware()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not staging.is_aware()
    assert tried == ([1] if says else [])  # device memory is given only to an MPI that says it takes it


def test_an_aware_mpi_gets_device_memory_after_the_stream_but_for_reductions_and_shared_memory(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(staging, "is_aware", lambda: True)
    steps: list[Any] = []

    class Inner:
        rank, size, queue, unfinished, objects, has_threads, faults = 0, 2, None, (), None, True, Faults()

        def run(self, call: Call) -> None:
            steps.append((call.row.name, call.send, call.recv))

    stream = SimpleNamespace(synchronize=lambda: steps.append("synchronised"))
    cuda = SimpleNamespace(current_stream=lambda device: stream, device=lambda device: nullcontext())
    shared: list[int] = []

    def is_shared(row: Any, dtype: Any, op: Any, nbytes: int) -> bool:
        return nbytes in shared

    staged = staging.StagedBackend(Inner(), is_shared, cuda)  # type: ignore[arg-type]
    tensor, gathered = torch.ones(2), torch.empty(4)
    staged.run(Call(BROADCAST, tensor, tensor, root=0))
    assert steps[0] == "synchronised"
    assert steps[1][1] is tensor
    steps.clear()
    staged.run(Call(ALL_GATHER_SINGLE, tensor, gathered))
    assert steps[1][1] is tensor
    assert steps[1][2] is gathered
    for row, send, recv in ((ALL_REDUCE, tensor, tensor), (ALL_GATHER_SINGLE, gathered[:2], gathered)):
        steps.clear()
        staged.run(Call(row, send, recv))
        assert steps[0] == "synchronised"  # the copy to the host
        assert steps[1][1] is not send
        assert steps[2] == "synchronised"  # the copy back
    steps.clear()
    shared.append(tensor.nbytes)  # ranks with host memory go to the window: so does this one
    staged.run(Call(BROADCAST, tensor, tensor, root=0))
    assert steps[1][1] is not tensor
