"""Installed versions, compared between the ranks."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata

import torch

import hpcdist
from hpcdist.backends.nccl import library
from hpcdist.cli.doctor.findings import ADVICE, NOTE, OK, PROBLEM, Facts, Finding, differing

PACKAGES = ("torch", "mpi4py", "nccl4py", "numpy")
TITLE = "What is installed"


def look() -> Facts:
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "hpcdist": f"{hpcdist.__version__} ({os.path.dirname(hpcdist.__file__)})",
        **{name: next((each.version for each in metadata.distributions(name=name)), None) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "gloo": torch.distributed.is_gloo_available(),
    }


def judge(seen: list[Facts]) -> Iterator[Finding]:
    first = seen[0]
    for name in ("hpcdist", "python", "torch", "mpi4py"):
        if text := differing(facts[name] for facts in seen):
            remedy = f"srun {sys.executable} train.py   # the same interpreter on every rank, by its absolute path"
            yield Finding(PROBLEM, f"{name} differs between ranks: {text}", remedy)
        elif first[name] is None:
            yield Finding(PROBLEM, f"{name} is not installed", f"pip install {name}")
        else:
            yield Finding(OK, f"{name} {first[name]}")
    gpu = f"for CUDA {first['cuda']}" if first["cuda"] else "for CPUs"
    yield Finding(NOTE, f"this torch is built {gpu}, {'with' if first['gloo'] else 'without'} gloo")
    if first["cuda"] and not first["nccl4py"]:
        yield Finding(ADVICE, "nccl4py is not installed: no NCCL for CUDA tensors", library.install_command())
