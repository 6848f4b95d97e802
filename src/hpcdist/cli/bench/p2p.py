"""How long does a message take from one rank to another? Half a ping-pong of ranks 0 and 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import hpcdist as dist
from hpcdist.cli.bench.collectives import sizes
from hpcdist.cli.bench.timing import Bench


def ping_pong(bench: Bench, send: Callable[[int], Any], recv: Callable[[int], Any]) -> Callable[[], None]:
    """Make the call of one rank: there and back; ranks above 1 look on."""
    if bench.rank == 0:

        def call() -> None:
            send(1)
            recv(1)

    elif bench.rank == 1:

        def call() -> None:
            recv(0)
            send(0)

    else:

        def call() -> None:
            return

    return call


def compare(bench: Bench, nbytes: int) -> dict[str, float]:
    """Time a ping-pong of one size."""
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    raw, comm, gloo = tensor.numpy(), bench.comm, bench.gloo
    return bench.compare(
        "ping-pong",
        "uint8",
        nbytes,
        {
            "hpcdist": ping_pong(bench, lambda r: dist.send(tensor, r), lambda r: dist.recv(tensor, r)),
            "mpi4py": ping_pong(bench, lambda r: comm.Send(raw, r), lambda r: comm.Recv(raw, r)),
            "gloo": ping_pong(
                bench, lambda r: gloo.send([tensor], r, 0).wait(), lambda r: gloo.recv([tensor], r, 0).wait()
            ),
        },
        operations=2,
    )


def measure(bench: Bench) -> None:
    """Time ping-pong at all sizes, and the barrier."""
    if bench.size < 2:
        raise SystemExit("bench p2p needs two ranks or more: mpirun -n 2 python -m hpcdist bench p2p")
    for size in sizes(bench):
        compare(bench, size)
    barrier(bench)


def barrier(bench: Bench) -> dict[str, float]:
    """Time the barrier."""
    return bench.compare(
        "barrier",
        "",
        0,
        {"hpcdist": dist.barrier, "mpi4py": bench.comm.Barrier, "gloo": lambda: bench.gloo.barrier().wait()},
    )
