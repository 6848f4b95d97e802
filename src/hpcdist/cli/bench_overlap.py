"""How much of an asynchronous all_reduce hides behind computing?

The worker thread of ``async_op=True`` is timed against MPI's own non-blocking call, both beside the same computing.
"""

from __future__ import annotations

import time

import torch

import hpcdist as dist
from hpcdist.cli.bench_timing import Bench

NBYTES = 32 << 20


def compare(bench: Bench, nbytes: int = NBYTES) -> dict[str, float]:
    """Time all_reduce alone, computing alone, and both at once in three ways."""
    data, other = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)
    matrix = torch.rand(384, 384)
    send, recv = data.numpy(), other.numpy()

    dist.all_reduce(data)
    bench.comm.Barrier()
    began = time.perf_counter()
    dist.all_reduce(data)
    reducing = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(5):
        matrix @ matrix
    product = (time.perf_counter() - began) / 5
    products = max(bench.comm.allgather(max(1, round(reducing / product))))

    def compute() -> None:
        for _ in range(products):
            matrix @ matrix

    def worker() -> None:
        work = dist.all_reduce(data, async_op=True)
        compute()
        assert work is not None
        work.wait()

    def request() -> None:
        pending = bench.comm.Iallreduce(send, recv)
        compute()
        pending.Wait()

    def one_after_the_other() -> None:
        dist.all_reduce(data)
        compute()

    return bench.compare(
        "all_reduce beside equal compute",
        "float32",
        nbytes,
        {
            "all_reduce": lambda: dist.all_reduce(data),
            "compute": compute,
            "in turn": one_after_the_other,
            "hpcdist": worker,
            "Iallreduce": request,
        },
    )


def measure(bench: Bench) -> None:
    """Time the overlap at one size."""
    compare(bench)
