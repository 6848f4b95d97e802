"""nccl4py and the libnccl behind it, imported when a group first asks for NCCL; errors name what is missing.

No other module imports nccl4py, so that ``import hpcdist`` works without it and without CUDA.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from hpcdist.core.errors import DistBackendError

EXTRAS = {"12": "hpcdist[nccl-cu12]", "13": "hpcdist[nccl-cu13]"}  # by the major version of CUDA

GATHERS_SINCE = (2, 28)  # ncclGather and ncclScatter; before, sends and receives stand in for them
OLDEST = (2, 27)  # torch 2.8's own, the first with ncclCommShrink; nccl4py makes communicators as 2.23 and later do
BLOCKING = "NCCL_COMM_BLOCKING"


class Library(NamedTuple):
    """The parts of nccl4py that a backend uses.

    Calls are made by the bindings, because ``core`` takes 10 µs for each call to inspect its tensors.
    """

    core: Any  # ``nccl.core``: communicators, groups, enums
    bindings: Any  # ``nccl.bindings.nccl``: NCCL's functions, which take addresses and counts
    failures: tuple[type[Exception], ...]  # the exceptions of both
    version: tuple[int, ...]  # the release of libnccl


UNDEFINED = -(2**31)  # NCCL_CONFIG_UNDEF_INT


def config_of(library: Library, options: Any) -> Any:
    """Return NCCL's configuration of a communicator, less whether it blocks; None unless c10d's options ask for one."""
    config, kind = getattr(options, "config", None), library.core.NCCLConfig
    names = (each.name for each in fields(kind) if each.name != "blocking")
    found = {name: getattr(config, name, None) for name in names}
    found = {name: value for name, value in found.items() if value not in (None, "", UNDEFINED)}
    return kind(**found) if found else None


def install_command() -> str:
    """Return the pip command for the CUDA that this torch was built for."""
    extra = EXTRAS.get((torch.version.cuda or "").split(".")[0])
    if extra is not None:
        return f"pip install '{extra}'"
    return " or ".join(f"pip install '{each}' (CUDA {major})" for major, each in EXTRAS.items())


def load() -> Library:
    """Import nccl4py and find its libnccl; DistBackendError if one of them is not installed."""
    try:
        core = importlib.import_module("nccl.core")
        bindings = importlib.import_module("nccl.bindings.nccl")
    except ImportError as error:
        raise DistBackendError(
            f"backend 'nccl' needs nccl4py, which cannot be imported ({error}). Try: {install_command()}"
        ) from error
    found = core.get_version().libnccl
    if found is None:
        raise DistBackendError(
            f"backend 'nccl': nccl4py is there, but it found no libnccl.so.2 to load. Try: {install_command()}"
        )
    version = found.version.release
    if version < OLDEST:
        raise DistBackendError(
            f"backend 'nccl' needs NCCL {'.'.join(map(str, OLDEST))} or later, and the libnccl.so.2 that was loaded is "
            f"{'.'.join(map(str, version))}. Try: {install_command()}"
        )
    if os.environ.get(BLOCKING, "").strip() == "0":
        raise DistBackendError(
            f"backend 'nccl' cannot be used with {BLOCKING}=0: NCCL's calls would return before they are queued, and "
            "the kernels behind them read what has not been received. Unset it"
        )
    return Library(core, bindings, (core.NcclInvalid, bindings.NCCLError), version)


def check_gpu() -> None:
    """Raise if CUDA tensors cannot exist here: torch without CUDA, no driver, or no GPU that this process may see."""
    if torch.cuda.is_available():
        return
    if torch.version.cuda is None:
        raise DistBackendError(
            f"backend 'nccl' carries CUDA tensors, and this torch ({torch.__version__}) is built without CUDA: "
            "install a CUDA build of torch (https://pytorch.org/get-started/locally), or use backend='mpi' for "
            "CPU tensors"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not has_driver():
        raise DistBackendError(
            "backend 'nccl' carries CUDA tensors, and this machine has no NVIDIA driver (/proc/driver/nvidia is "
            "absent): run on a node with GPUs (Slurm: --gpus-per-task=1), or use backend='mpi' for CPU tensors"
        )
    raise DistBackendError(
        "backend 'nccl' carries CUDA tensors, and this process sees no GPU"
        + (f": CUDA_VISIBLE_DEVICES is {visible!r}" if visible is not None else "")
        + "; ask the launcher for one (Slurm: --gpus-per-task=1), or use backend='mpi' for CPU tensors"
    )


def has_driver() -> bool:
    """Tell whether NVIDIA's kernel driver is loaded."""
    return os.path.isdir("/proc/driver/nvidia")
