"""GPUs: their names, whether they compute, and whether each rank has its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress

import torch

from hpcdist.cli.doctor.findings import ADVICE, NOTE, OK, PROBLEM, Facts, Finding
from hpcdist.cli.doctor.mpi_library import output_of
from hpcdist.core.errors import DistBackendError
from hpcdist.core.ranks import format_ranks, ranks_by_value
from hpcdist.launch import devices, environment

TITLE = "GPUs"


def look() -> Facts:
    tool = shutil.which("nvidia-smi")
    driver = None
    if tool is not None:
        status, said = output_of([tool, "--query-gpu=name,driver_version", "--format=csv,noheader"], 30)
        driver = said.strip().splitlines() if status == 0 else f"nvidia-smi failed: {said.strip()[:200]}"
    facts: Facts = {
        "driver": driver,
        "node": environment.node_key(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "count": torch.cuda.device_count(),
        "built_for": torch.version.cuda,
        "index": None,
        "computed": None,
    }
    if torch.cuda.is_available():
        index = own()
        facts.update(index=index, uuid=str(torch.cuda.get_device_properties(index).uuid), computed=compute(index))
    return facts


def own() -> int:
    """Return the GPU that NCCL's groups choose for this rank, or else the current one."""
    with suppress(DistBackendError):
        return devices.choose_gpu().index
    return torch.cuda.current_device()


def compute(index: int) -> str:
    """Add numbers on a GPU; return ``works`` or the error."""
    try:
        total = torch.arange(1000, device=f"cuda:{index}").sum().item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "works" if total == 499500 else f"computed {total}, expected 499500"


def judge(seen: list[Facts]) -> Iterator[Finding]:
    first = seen[0]
    if isinstance(first["driver"], str):
        remedy = "nvidia-smi   # on that node; the site's administrator has to look at the driver"
        yield Finding(PROBLEM, first["driver"], remedy)
    elif any(facts["count"] for facts in seen):
        yield from judge_gpus(seen)
    elif not first["driver"]:
        yield Finding(NOTE, "no GPU on these nodes")
    elif first["built_for"] is None:
        remedy = "pip install torch   # the build for CUDA, see https://pytorch.org/get-started/locally"
        yield Finding(ADVICE, f"{len(first['driver'])} GPUs here, but this torch is built for CPUs only", remedy)
    else:
        text = f"nvidia-smi sees {len(first['driver'])} GPUs, torch sees none (visible: {first['visible']!r})"
        remedy = "unset CUDA_VISIBLE_DEVICES   # or install a driver for torch's CUDA version: see nvidia-smi"
        yield Finding(PROBLEM, text, remedy)


def judge_gpus(seen: list[Facts]) -> Iterator[Finding]:
    first = seen[0]
    for line in sorted(set(first["driver"] or [])):
        yield Finding(OK, f"{first['count']} × {line}")
    wrong = [rank for rank, facts in enumerate(seen) if facts["computed"] not in ("works", None)]
    if wrong:
        text = f"the GPU does not compute on {format_ranks(wrong)}: {seen[wrong[0]]['computed']}"
        yield Finding(PROBLEM, text, "nvidia-smi -q -d ECC,PAGE_RETIREMENT   # and tell the site's administrator")
    without = [rank for rank, facts in enumerate(seen) if facts["count"] == 0]
    if without:
        yield Finding(PROBLEM, f"no GPU on {format_ranks(without)}", "sbatch --gpus-per-node=N …")
    users = ranks_by_value(None if facts["index"] is None else (facts["node"], facts["uuid"]) for facts in seen)
    users.pop(None, None)
    shared = next((those for those in users.values() if len(those) > 1), None)
    if shared is not None:
        text = f"{format_ranks(shared)} share one GPU, which NCCL does not allow"
        yield Finding(ADVICE, text, "sbatch --ntasks-per-node=GPUS --gpus-per-node=GPUS …")
    elif users:
        yield Finding(OK, "each rank has its own GPU, which computes")
