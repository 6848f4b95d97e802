"""Subject ``overlap``: how much of an asynchronous all_reduce runs while the rank computes.

``async_op=True``, carried out by a worker thread, is timed beside MPI's own non-blocking call, with the same
computation.
"""

from __future__ import annotations

import torch

import hpcdist as dist
from hpcdist.cli.bench.timing import Bench

NBYTES = 32 << 20
SEVERAL = 10  # matrix products that are timed together


def compare(bench: Bench, nbytes: int = NBYTES) -> dict[str, float]:
    """Time all_reduce by itself, the computation by itself, both in turn, and both at once in two ways."""
    data, other = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)
    matrix = torch.rand(384, 384)
    send, recv = data.numpy(), other.numpy()

    def compute() -> None:
        for _ in range(products):
            matrix @ matrix

    products = SEVERAL
    alone = {"all_reduce": lambda: dist.all_reduce(data), "compute": compute}
    times = bench.compare(f"all_reduce, {SEVERAL} products", "float32", nbytes, alone)
    products = max(1, round(times["all_reduce"] / times["compute"] * SEVERAL))

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
        "all_reduce beside computing as long",
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
