"""The comparison with torch's own group on a GPU as a whole: on CPU tensors, with gloo in NCCL's place."""

import argparse

import pytest
import torch
import torch.distributed

from hpcdist.cli.bench import cuda as bench_cuda

pytestmark = pytest.mark.mpi


def test_both_sides_are_measured_in_one_run(world, size, monkeypatch):
    theirs = bench_cuda.torchs_group("gloo")
    options = argparse.Namespace(collectives=list(bench_cuda.COLLECTIVES), sizes=[4, 1 << 12], rounds=1)
    monkeypatch.setattr(bench_cuda, "CALLS", {1 << 12: 5})
    figures = bench_cuda.measure(options, theirs, torch.device("cpu"))
    torch.distributed.destroy_process_group(theirs)
    if torch.distributed.get_rank() == 0:
        assert len(figures) == 4 * 2 * 3
        assert all(each["host_us"][side] > 0 for each in figures for side in ("hpcdist", "torch"))
    else:
        assert figures == []
