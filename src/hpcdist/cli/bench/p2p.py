"""Subject ``p2p``: time of a message, and of a put and a signal, between two ranks (half a ping-pong); the barrier."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import hpcdist as dist
from hpcdist.backends.mpi.process import runtime
from hpcdist.cli.bench.collectives import sizes
from hpcdist.cli.bench.timing import Bench

COUNTER_BYTES = 8
SPINS = 200


def ping_pong(send: Callable[[int], Any], recv: Callable[[int], Any], partner: int = 1) -> Callable[[], None]:
    """Return this rank's part of a ping-pong of rank 0 and a partner; for other ranks a function that does nothing."""
    rank = dist.get_rank()
    first, second = (send, recv) if rank == 0 else (recv, send)
    other = partner - rank

    def call() -> None:
        first(other)
        second(other)

    return call if rank in (0, partner) else lambda: None


def compare(bench: Bench, nbytes: int) -> dict[str, float]:
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    raw, comm, gloo = tensor.numpy(), bench.comm, bench.gloo
    sides = {
        "hpcdist": ping_pong(lambda r: dist.send(tensor, r), lambda r: dist.recv(tensor, r)),
        "mpi4py": ping_pong(lambda r: comm.Send(raw, r), lambda r: comm.Recv(raw, r)),
        "gloo": ping_pong(lambda r: gloo.send([tensor], r, 0).wait(), lambda r: gloo.recv([tensor], r, 0).wait()),
    }
    return bench.compare("ping-pong", "uint8", nbytes, sides, operations=2)


def measure(bench: Bench) -> None:
    if bench.size < 2:
        raise SystemExit("bench p2p needs two or more ranks, this job has one: mpirun -n 2 python -m hpcdist bench p2p")
    for size in sizes(bench):
        compare(bench, size)
        put_and_signal(bench, size)
    barrier(bench)


def put_and_signal(bench: Bench, nbytes: int) -> dict[str, float]:
    """Time a ping-pong of ``Window``: write the other's memory, signal; beside MPI_Put of the data and of a counter."""
    MPI, comm = runtime.load(), bench.comm
    tensor, window = torch.zeros(nbytes, dtype=torch.uint8), dist.Window(nbytes, torch.uint8)
    raw = MPI.Win.Allocate(COUNTER_BYTES + nbytes, 1, MPI.INFO_NULL, comm)
    raw.Lock_all(MPI.MODE_NOCHECK)
    data, sent, received = tensor.numpy(), np.zeros(1, np.int64), 0
    counter = memoryview(raw.tomemory())[:COUNTER_BYTES].cast("q")
    counter[0] = 0
    comm.Barrier()

    def send(rank: int) -> None:
        window.put(tensor, rank)
        window.signal(rank)

    def raw_send(rank: int) -> None:
        sent[0] += 1
        raw.Put(data, rank, (COUNTER_BYTES, nbytes, MPI.BYTE))
        raw.Flush(rank)
        raw.Put(sent, rank, (0, COUNTER_BYTES, MPI.BYTE))
        raw.Flush(rank)

    def raw_wait(_: int) -> None:
        nonlocal received
        received += 1
        looks = 0
        while counter[0] < received:
            looks += 1
            if looks > SPINS:  # as ours does, because the other rank may need this core
                os.sched_yield()
                comm.Iprobe()
        raw.Sync()

    sides = {"hpcdist": ping_pong(send, window.wait_signal), "mpi4py": ping_pong(raw_send, raw_wait)}
    times = bench.compare("put and signal", "uint8", nbytes, sides, operations=2)
    raw.Unlock_all()
    raw.Free()
    window.close()
    return times


def barrier(bench: Bench) -> dict[str, float]:
    sides = {"hpcdist": dist.barrier, "mpi4py": bench.comm.Barrier, "gloo": lambda: bench.gloo.barrier().wait()}
    return bench.compare("barrier", "", 0, sides)
