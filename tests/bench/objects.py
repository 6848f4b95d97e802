"""Subject ``objects``: time of all_gather_object for small and large objects."""

from __future__ import annotations

import pickle
from typing import Any

import torch

import hpcdist as dist
from hpcdist.cli.bench.timing import Bench

OBJECTS: dict[str, Any] = {
    "small dict": {"loss": 0.5, "step": 17, "name": "metrics"},
    "1,000 floats": [0.5 * i for i in range(1000)],
    "1 MiB tensor": torch.zeros(1 << 18),
}


def gloo_all_gather(bench: Bench, value: Any) -> list[Any]:
    """Gather objects as a user of gloo does: sizes first, then bytes padded to the largest."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    mine = torch.tensor([data.numel()])
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(bench.size)]
    bench.gloo.allgather([counts], [mine]).wait()
    most = max(int(count) for count in counts)
    padded = torch.zeros(most, dtype=torch.uint8)
    padded[: data.numel()] = data
    parts = [torch.zeros(most, dtype=torch.uint8) for _ in range(bench.size)]
    bench.gloo.allgather([parts], [padded]).wait()
    return [pickle.loads(part[: int(count)].numpy().tobytes()) for part, count in zip(parts, counts, strict=True)]


def compare(bench: Bench, name: str) -> dict[str, float]:
    """Time all_gather_object of one object."""
    value = OBJECTS[name]
    out: list[Any] = [None] * bench.size
    return bench.compare(
        f"all_gather_object, {name}",
        "",
        len(pickle.dumps(value)),
        {
            "hpcdist": lambda: dist.all_gather_object(out, value),
            "mpi4py": lambda: bench.comm.allgather(value),
            "gloo": lambda: gloo_all_gather(bench, value),
        },
    )


def measure(bench: Bench) -> None:
    """Time all_gather_object of every object."""
    for name in OBJECTS:
        compare(bench, name)
