"""The comparison with torch's NCCL says what it lacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcdist.cli import bench


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_measures_nothing(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.run(["--device", "cuda"])
    said = capsys.readouterr().err
    assert any(text in said for text in ("nccl4py", "built without CUDA", "no NVIDIA driver", "sees no GPU"))
