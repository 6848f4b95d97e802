"""The comparison with torch's NCCL says what it lacks, and counts what it measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcdist.cli.bench import cuda as bench_cuda


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_measures_nothing(capsys: Any) -> None:
    assert bench_cuda.run([]) == 2
    said = capsys.readouterr().err
    assert any(text in said for text in ("nccl4py", "built without CUDA", "no NVIDIA driver", "sees no GPU"))


def test_a_figure_is_the_medians_and_the_host_time_over_torchs() -> None:
    taken = {"hpcdist": ([9.0, 12.0, 30.0], [20.0, 20.0, 50.0]), "torch": ([8.0, 10.0, 11.0], [16.0, 18.0, 16.0])}
    made = bench_cuda.figure("all_reduce", 4000, "sync", taken)
    assert made["host_over"] == 2.0
    assert made["whole_us"] == {"hpcdist": 20.0, "torch": 16.0}
    assert made["gigabytes_per_s"]["hpcdist"] == pytest.approx(0.2)


def test_an_unknown_collective_is_refused() -> None:
    with pytest.raises(SystemExit):
        bench_cuda.run(["--collectives", "all_reduce_twice"])
