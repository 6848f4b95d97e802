"""Installed versions, compared between the ranks."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata

import torch

import hpcdist
from hpcdist.cli.doctor.findings import ADVICE, NOTE, OK, PROBLEM, Facts, Finding
from hpcdist.core.ranks import by_value, listed

PACKAGES = ("torch", "mpi4py", "nccl4py", "numpy")
TITLE = "What is installed"


def look() -> Facts:
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "hpcdist": f"{hpcdist.__version__} ({os.path.dirname(hpcdist.__file__)})",
        **versions,
        "cuda": torch.version.cuda,
        "gloo": torch.distributed.is_gloo_available(),
    }


def judge(ranks: list[Facts]) -> Iterator[Finding]:
    for name in ("hpcdist", "python", "torch", "mpi4py"):
        seen = by_value(facts["installed"][name] for facts in ranks)
        if len(seen) > 1:
            text = "; ".join(f"{value or 'none'} on {listed(those)}" for value, those in seen.items())
            yield Finding(
                PROBLEM,
                f"{name} differs between ranks: {text}",
                f"srun {sys.executable} train.py   # the same interpreter on every rank, by its absolute path",
            )
        elif (value := next(iter(seen))) is None:
            yield Finding(PROBLEM, f"{name} is not installed", f"pip install {name}")
        else:
            yield Finding(OK, f"{name} {value}")
    first = ranks[0]["installed"]
    gpu = f"for CUDA {first['cuda']}" if first["cuda"] else "for CPUs"
    yield Finding(NOTE, f"this torch is built {gpu}, {'with' if first['gloo'] else 'without'} gloo")
    if first["cuda"] and not first["nccl4py"]:
        extra = f"nccl-cu{first['cuda'].partition('.')[0]}"
        yield Finding(ADVICE, "nccl4py is not installed: no NCCL for CUDA tensors", f"pip install 'hpcdist[{extra}]'")
