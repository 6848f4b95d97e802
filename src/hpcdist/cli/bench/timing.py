"""Fair timing of calls beside each other: interleaved rounds, the slowest rank's time, medians, bytes on the wire."""

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
    """One measured number: the call, the side, and the time of a call over the rounds."""

    what: str
    dtype: str
    nbytes: int
    side: str
    median: float  # microseconds a call, on the slowest rank
    low: float
    high: float
    wire: float = 0.0  # bytes a call that the node sent which sent most; 0 on one node, or if nothing counts them


class Wire:
    """Bytes on the wire: what each node has sent to the others, as its network devices count it; every rank makes one.

    The counters are the kernel's for network interfaces, and those of InfiniBand's ports, whose traffic the kernel does
    not see. Both count everything that leaves the node, so a figure holds a little of what else goes on there.
    """

    def __init__(self, comm: Any) -> None:
        networks = comm.allgather(addresses.network())
        mine = networks[comm.Get_rank()]
        self.nodes = len(set(networks))  # how many nodes the ranks are on
        is_first = networks.index(mine) == comm.Get_rank()
        self._files: list[tuple[Path, int]] = []
        if self.nodes > 1 and is_first:  # one rank of a node reads for all of them
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
        """Yield rows that are to be measured, while rank 0 shows their texts and how many are left."""
        # no refresh thread: it would compete for a core with the measured calls
        with Progress(disable=self.rank != 0, transient=True, auto_refresh=False) as bar:
            task = bar.add_task("", total=len(rows))
            for row in rows:
                bar.update(task, description=" ".join(map(str, row)), refresh=True)
                yield row
                bar.advance(task)

    def calls_for(self, call: Callable[[], Any]) -> int:
        """Return how many calls fill the time of one round, the same number on every rank."""
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

        ``nbytes`` is the size of the larger buffer; one call makes so many ``operations``, one after the other. A round
        makes ``count`` calls, or as many as fill its time. ``before`` a round nothing is timed yet, ``after`` it the
        clock still runs. Returns for each side the median of the rounds, in microseconds an operation.
        """
        for call in sides.values():  # the first calls set up what later ones reuse: a window, a plan, a connection
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
def opened(
    options: argparse.Namespace, parser: argparse.ArgumentParser, start: str, backend: str | None = None
) -> Iterator[Bench]:
    """Make the bench of a command, on the default group or on one of a ``backend`` that ends with it.

    If the group is not on MPI, the parser ends the command and says how to ``start`` it.
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
