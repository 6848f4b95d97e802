"""Timing of calls side by side: interleaved rounds, the slowest rank's time, medians, bytes on the wire."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from rich.progress import Progress

import hpcdist as dist
from hpcdist.backends import gloo
from hpcdist.backends.mpi.process import runtime
from hpcdist.core.backend import Bootstrap
from hpcdist.launch import addresses, rendezvous

MOST_CALLS = 2000
WARM_UP = 2
INTERFACES = Path("/sys/class/net")
PORTS = Path("/sys/class/infiniband")
T = TypeVar("T", bound=tuple[Any, ...])
WORD = 4  # InfiniBand's port_xmit_data counts words of 4 bytes


@dataclass
class Figure:
    """One measurement: the call, the side, and the times of a call in the rounds."""

    what: str
    dtype: str
    nbytes: int
    side: str
    median: float  # microseconds a call, on the slowest rank
    low: float
    high: float
    wire: float = 0.0  # bytes of a call from the node that sent most; 0 on one node, or if they are not counted


class Wire:
    """Bytes on the wire: the bytes that each node has sent, from its network devices' counters; every rank makes one.

    The counters are the kernel's for network interfaces, and those of InfiniBand's ports, whose traffic the kernel does
    not see. Both count all traffic of the node, so a figure contains a little of other programs' traffic.
    """

    def __init__(self, comm: Any) -> None:
        networks = comm.allgather(addresses.network())
        mine = networks[comm.Get_rank()]
        self.nodes = len(set(networks))  # the number of nodes
        is_first = networks.index(mine) == comm.Get_rank()
        self._files: list[tuple[Path, int]] = []
        if self.nodes > 1 and is_first:  # one rank reads for all of its node
            self._files = [(INTERFACES / name / "statistics" / "tx_bytes", 1) for name in addresses.interfaces()]
            self._files += [(path, WORD) for path in sorted(PORTS.glob("*/ports/*/counters/port_xmit_data"))]

    def sent(self) -> int:
        """Return the bytes that this rank's node has sent; 0 on the ranks that do not read for their node."""
        total = 0
        for path, unit in self._files:
            with suppress(OSError, ValueError):
                total += int(path.read_text()) * unit
        return total


class Bench:
    """The ranks, the libraries compared and the figures of one run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.comm: Any = dist.get_mpi_comm().Dup()  # so that raw calls cannot match messages of hpcdist
        self.figures: list[Figure] = []
        self.wire = Wire(self.comm)
        self._gloo: Any = None

    @property
    def library(self) -> str:
        name, version = runtime.load().get_vendor()
        return f"{name} {'.'.join(map(str, version))}"

    @property
    def gloo(self) -> Any:
        if self._gloo is None:
            store = dist.PrefixStore("bench-gloo", rendezvous.store_of(dist.group.WORLD))
            bootstrap = Bootstrap(self.rank, self.size, timedelta(minutes=5), store=store)
            self._gloo = gloo.process_group(bootstrap)
        return self._gloo

    def progress(self, rows: list[T]) -> Iterator[T]:
        """Yield rows to measure, while rank 0 shows their texts and how many are left."""
        # no refresh thread: it would compete for a core with the measured calls
        with Progress(disable=self.rank != 0, transient=True, auto_refresh=False) as bar:
            task = bar.add_task("", total=len(rows))
            for row in rows:
                bar.update(task, description=" ".join(map(str, row)), refresh=True)
                yield row
                bar.advance(task)

    def calls_for(self, call: Callable[[], Any]) -> int:
        """Return the number of calls that fill one round, the same on every rank."""
        count = WARM_UP  # doubled until the calls take long enough for a good estimate
        while True:
            self.comm.Barrier()
            began = time.perf_counter()
            for _ in range(count):
                call()
            taken = max(self.comm.allgather(time.perf_counter() - began))
            if taken > self.options.seconds / 4 or count >= MOST_CALLS:
                return max(1, min(MOST_CALLS, int(self.options.seconds / taken * count)))
            count *= 2

    def compare(
        self,
        what: str,
        dtype: str,
        nbytes: int,
        sides: dict[str, Callable[[], Any]],
        operations: int = 1,
        count: int = 0,
        before: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
    ) -> dict[str, float]:
        """Time the calls of several sides in interleaved rounds; every rank gives the same sides in the same order.

        ``nbytes`` is the size of the larger buffer; one call makes ``operations`` operations in turn. A round makes
        ``count`` calls, or as many as fill its time. ``before`` runs before the timed part of a round, ``after`` at its
        end. Returns for each side the median of the rounds, in microseconds for each operation.
        """
        for call in sides.values():  # the first calls make what later ones reuse: a window, a connection
            for _ in range(WARM_UP):
                call()
        calls = {side: count or self.calls_for(call) for side, call in sides.items()}
        rounds: dict[str, list[float]] = {side: [] for side in sides}
        sent = dict.fromkeys(sides, 0)
        for number in range(self.options.rounds):
            # each round in its own order, the same on all ranks: after gloo, which sleeps, the cores are slow to wake
            for side in random.Random(number).sample(list(sides), len(sides)):
                call = sides[side]
                sent[side] -= self.wire.sent()
                before()
                self.comm.Barrier()
                began = time.perf_counter()
                for _ in range(calls[side]):
                    call()
                after()
                rounds[side].append((time.perf_counter() - began) / calls[side] / operations * 1e6)
                sent[side] += self.wire.sent()
        medians = {}
        for side, mine in rounds.items():
            slowest = [max(ranks) for ranks in zip(*self.comm.allgather(mine), strict=True)]
            medians[side] = statistics.median(slowest)
            wire = max(self.comm.allgather(sent[side])) / (self.options.rounds * calls[side] * operations)
            self.figures.append(Figure(what, dtype, nbytes, side, medians[side], min(slowest), max(slowest), wire))
        return medians


@contextmanager
def open_bench(
    options: argparse.Namespace, parser: argparse.ArgumentParser, start: str, backend: str | None = None
) -> Iterator[Bench]:
    """Make the bench of a command, on the default group or on one of a ``backend`` that ends with it.

    If the group is not on MPI, the parser ends the command with the ``start`` command to use.
    """
    began = not dist.is_initialized()
    if began:
        dist.init_process_group(backend)
    try:
        try:
            bench = Bench(options)
        except dist.DistBackendError as error:  # the group is gloo's or loopback's
            parser.error(f"{error}; {start}")
        yield bench
    finally:
        if began:
            dist.destroy_process_group()
