"""GPUs: which there are, whether they compute, and whether each rank has its own."""

from __future__ import annotations

import os
import shutil

import torch

from hpcdist.cli.doctor.findings import ADVICE, NOTE, OK, PROBLEM, Facts, Finding
from hpcdist.cli.doctor.mpi_library import output_of
from hpcdist.core.ranks import listed
from hpcdist.launch import environment

TITLE = "GPUs"


def look() -> Facts:
    """Query the driver, and compute on this rank's GPU."""
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
    """Return the index of this rank's GPU."""
    return (environment.node_local_rank() or 0) % torch.cuda.device_count()


def compute(index: int) -> str:
    """Add numbers on a GPU; return ``works`` or what went wrong."""
    try:
        total = torch.arange(1000, device=f"cuda:{index}").sum().item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "works" if total == 499500 else f"computed {total}, expected 499500"


def judge(ranks: list[Facts]) -> list[Finding]:
    """Say which GPUs work and whether ranks share one."""
    seen = [facts["devices"] for facts in ranks]
    first = seen[0]
    if isinstance(first["driver"], str):
        return [
            Finding(
                PROBLEM,
                first["driver"],
                "nvidia-smi   # on that node; the site's administrator has to look at the driver",
            )
        ]
    if not any(facts["count"] for facts in seen):
        if first["driver"] and first["built_for"] is None:
            mend = "pip install torch   # the build for CUDA, see https://pytorch.org/get-started/locally"
            return [Finding(ADVICE, f"{len(first['driver'])} GPUs here, but this torch is built for CPUs only", mend)]
        if first["driver"]:
            mend = "unset CUDA_VISIBLE_DEVICES   # or install a driver for torch's CUDA version: see nvidia-smi"
            text = f"nvidia-smi sees {len(first['driver'])} GPUs, torch sees none (visible: {first['visible']!r})"
            return [Finding(PROBLEM, text, mend)]
        return [Finding(NOTE, "no GPU on these nodes")]
    findings = [Finding(OK, f"{first['count']} × {line}") for line in sorted(set(first["driver"] or []))]
    wrong = [rank for rank, facts in enumerate(seen) if facts["computed"] not in ("works", None)]
    if wrong:
        text = f"the GPU does not compute on {listed(wrong)}: {seen[wrong[0]]['computed']}"
        findings.append(
            Finding(PROBLEM, text, "nvidia-smi -q -d ECC,PAGE_RETIREMENT   # and tell the site's administrator")
        )
    without = [rank for rank, facts in enumerate(seen) if facts["count"] == 0]
    if without:
        findings.append(Finding(PROBLEM, f"no GPU on {listed(without)}", "sbatch --gpus-per-node=N …"))
    users: dict[tuple[str, str], list[int]] = {}
    for rank, facts in enumerate(seen):
        if facts["index"] is not None:
            users.setdefault((facts["node"], facts["uuid"]), []).append(rank)
    shared = [those for those in users.values() if len(those) > 1]
    if shared:
        text = f"{listed(shared[0])} share one GPU, which NCCL does not allow"
        findings.append(Finding(ADVICE, text, "sbatch --ntasks-per-node=GPUS --gpus-per-node=GPUS …"))
    elif users:
        findings.append(Finding(OK, "each rank has its own GPU, which computes"))
    return findings
