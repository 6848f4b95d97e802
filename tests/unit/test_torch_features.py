"""Features of torch: each is in the releases that the table says, and an unsupported torch is refused in one line."""

from __future__ import annotations

import re

import pytest
import torch

from hpcdist.torch_bridge.features import FEATURES, Feature
from tests.forked import python
from tests.programs import ROOT, run

RELEASE = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])


def release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_is_in_the_releases_that_the_table_says(name: str) -> None:
    feature: Feature = FEATURES[name]
    since, until = release(feature.since or "0"), release(feature.until or "99")
    assert feature.is_there == (since <= RELEASE <= until)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "del dist.QueueEmptyError; torch.__version__ = '2.7.1+rocm6.3'",
            "hpcdist supports torch 2.8 and later, and this is torch 2.7.1+rocm6.3 in /",
        ),
        (
            "dist.is_available = lambda: False",
            "hpcdist needs torch.distributed, without which this torch was built: torch 2",
        ),
    ],
)
def test_an_unsupported_torch_is_refused_at_import_in_one_line(change: str, message: str) -> None:
    code = f"import torch, torch.distributed as dist; {change}; import hpcdist"
    done = run([*python(), "-c", code])
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {message}")


def test_an_old_mpi4py_is_refused_by_name() -> None:
    as_3_1 = "mpi4py.__version__ = '3.1.6'; mpi4py.rc.initialize = False; from mpi4py import MPI; del MPI.buffer"
    code = f"import mpi4py; {as_3_1}; import hpcdist; hpcdist.init_process_group('mpi')"
    done = run([*python(), "-c", code])
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1].partition("Error: ")[2]
    assert message.startswith("hpcdist supports mpi4py 4.1 and later, and this is mpi4py 3.1.6 in /"), done.stderr


@pytest.mark.parametrize("installed", ["2.8.0+rocm6.4", "2.10.0.post1", "2.13.0a0+git1b3c5d7", "2.14.0+xpu"])
def test_pip_finds_a_sites_torch_sufficient(installed: str) -> None:
    specifiers = pytest.importorskip("packaging.requirements")
    wanted = re.findall(r'"(torch>=.*)",', (ROOT / "pyproject.toml").read_text())[0]
    assert specifiers.Requirement(wanted).specifier.contains(installed, prereleases=True)  # as pip asks
