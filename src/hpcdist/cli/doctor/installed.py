"""Installed versions, compared between the ranks."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata

import torch

import hpcdist
from hpcdist.cli.doctor.findings import ADVICE, NOTE, OK, PROBLEM, Facts, Finding, by_value
from hpcdist.core.ranks import listed

PACKAGES = ("torch", "mpi4py", "nccl4py", "numpy")
TITLE = "What is installed"


def look() -> Facts:
    """Return versions and paths."""
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


def judge(ranks: list[Facts]) -> list[Finding]:
    """Compare the ranks."""
    findings = []
    for name in ("hpcdist", "python", "torch", "mpi4py"):
        seen = by_value(ranks, "installed", name)
        if len(seen) > 1:
            text = "; ".join(f"{value or 'none'} on {listed(those)}" for value, those in seen.items())
            findings.append(
                Finding(
                    PROBLEM,
                    f"{name} differs between ranks: {text}",
                    f"srun {sys.executable} train.py   # the same interpreter on every rank, by its absolute path",
                )
            )
        elif (value := next(iter(seen))) is None:
            findings.append(Finding(PROBLEM, f"{name} is not installed", f"pip install {name}"))
        else:
            findings.append(Finding(OK, f"{name} {value}"))
    first = ranks[0]["installed"]
    gpu = f"for CUDA {first['cuda']}" if first["cuda"] else "for CPUs"
    findings.append(Finding(NOTE, f"this torch is built {gpu}, {'with' if first['gloo'] else 'without'} gloo"))
    if first["cuda"] and not first["nccl4py"]:
        extra = f"nccl-cu{first['cuda'].partition('.')[0]}"
        findings.append(
            Finding(ADVICE, "nccl4py is not installed: no NCCL for CUDA tensors", f"pip install 'hpcdist[{extra}]'")
        )
    return findings
