"""Benchmark beside ``torch.distributed`` on NCCL: ``mpirun -n N python -m hpcdist bench --device cuda``.

Both sides call NCCL on the same tensors of the same GPUs in one run, in turns, so that a busy machine favours nobody.
Each is called synchronously, asynchronously with a wait at once, and asynchronously with all waits at the end. Two
times are taken: of the host only, until the calls return, while the device is kept busy (on this one there is a limit);
and with the device, until the results are there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date, timedelta
from typing import Any

import torch
import torch.distributed as c10d

import hpcdist as dist
from hpcdist.cli.bench.report import WIDTH
from hpcdist.cli.job_arguments import JobParser, count, described
from hpcdist.torch_bridge.private_names import occupy_gpu

OVERHEAD_LIMIT = 2.0  # microseconds a call over torch's own
WAYS = ("sync", "async", "async, waited later")
BUSY_CYCLES = 400_000_000  # a few tenths of a second, in which the device begins no call
SIZES = (4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
ROUNDS = 7
CALLS = {4: 400, 1 << 20: 100, 1 << 62: 20}  # calls a round, for sizes up to the key

Side = Any  # the two sides have the functions of torch.distributed


def cut(tensor: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what all ranks have of a tensor, and this rank's share of it."""
    share, rank = tensor.numel() // size, dist.get_rank()
    return tensor[: share * size], tensor[rank * share : (rank + 1) * share]


# called with a side, a group, a tensor, the number of ranks, and async_op
COLLECTIVES: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda side, group, tensor, _, is_async: side.all_reduce(tensor, group=group, async_op=is_async),
    "broadcast": lambda side, group, tensor, _, is_async: side.broadcast(tensor, 0, group=group, async_op=is_async),
    "all_gather": lambda side, group, tensor, size, is_async: side.all_gather_into_tensor(
        *cut(tensor, size), group=group, async_op=is_async
    ),
    "reduce_scatter": lambda side, group, tensor, size, is_async: side.reduce_scatter_tensor(
        *reversed(cut(tensor, size)), group=group, async_op=is_async
    ),
}


def parser() -> JobParser:
    """Return the parser of the command line."""
    made = JobParser(prog="python -m hpcdist bench --device cuda", description=described(__doc__))
    made.add_argument(
        "--collectives",
        nargs="+",
        choices=COLLECTIVES,
        default=list(COLLECTIVES),
        metavar="NAME",
        help=f"of {', '.join(COLLECTIVES)} (all)",
    )
    made.add_argument("--sizes", nargs="+", type=count, default=list(SIZES), metavar="SIZE", help="bytes")
    made.add_argument("--rounds", type=count, default=ROUNDS, help=f"rounds, of which the median is shown ({ROUNDS})")
    made.add_argument("--json", metavar="FILE", help="write the figures to this file too")
    return made


def run(args: list[str]) -> int:
    """Time both sides; every rank calls this. Return 2 if there is no GPU or no NCCL, or else 0.

    It is 1 if a call of 4 bytes took the host more than 2 µs longer than torch's in any of the three ways.
    """
    options = parser().parse_args(args)
    if (lacks := missing()) is not None:
        sys.stderr.write(f"hpcdist bench --device cuda: {lacks}\n")
        return 2
    dist.init_process_group("cpu:mpi,cuda:nccl")
    try:
        theirs = torchs_group()
        figures = measure(options, theirs, torch.device("cuda"))
        c10d.destroy_process_group(theirs)
    finally:
        dist.destroy_process_group()
    if figures:
        report(figures)
        if options.json:
            with open(options.json, "w") as file:
                json.dump({"about": about(), "figures": figures}, file, indent=1)
    return int(any(each["bytes"] == 4 and each["host_over"] > OVERHEAD_LIMIT for each in figures))


def missing() -> str | None:
    """Return why the comparison cannot run here, or None."""
    from hpcdist.backends.nccl.library import check_gpu, load

    try:
        load()
        check_gpu()
    except dist.DistBackendError as error:
        return str(error)
    if c10d.is_nccl_available():
        return None
    return "this torch has no NCCL backend to compare with; install a torch built for CUDA"


def torchs_group(backend: str = "nccl") -> Any:
    """Make a group of torch's own NCCL backend on the same ranks, beside ours in torch's world."""
    return c10d.new_group(backend=backend, timeout=timedelta(minutes=5))


def measure(options: argparse.Namespace, theirs: Any, device: torch.device) -> list[dict[str, Any]]:
    """Return one figure for each collective, size, and sync or async call; on rank 0 only."""
    sides = {"hpcdist": (dist, None), "torch": (c10d, theirs)}
    figures = []
    for name in options.collectives:
        for nbytes in options.sizes:
            for way in WAYS:
                taken = {side: ([], []) for side in sides}  # type: ignore[var-annotated]
                for _ in range(options.rounds):
                    for side, (library, group) in sides.items():
                        host, whole = one_round(COLLECTIVES[name], library, group, nbytes, way, device)
                        taken[side][0].append(host)
                        taken[side][1].append(whole)
                if dist.get_rank() == 0:
                    figures.append(figure(name, nbytes, way, taken))
    return figures


def one_round(
    call: Callable[..., Any], side: Side, group: Any, nbytes: int, way: str, device: torch.device
) -> tuple[float, float]:
    """Return the microseconds of one call on the slowest rank: of the host, and until the device has the result."""
    size = dist.get_world_size()
    tensor = torch.zeros(max(nbytes // 4, size), device=device)
    count = next(calls for limit, calls in CALLS.items() if nbytes <= limit)
    calls(call, side, group, tensor, size, way, 3)
    spent = []
    for is_busy in (True, False):
        settle(device)
        dist.barrier()
        if is_busy and device.type == "cuda":
            occupy_gpu(BUSY_CYCLES)
        began = time.perf_counter()
        calls(call, side, group, tensor, size, way, count)
        if not is_busy:
            settle(device)
        spent.append(time.perf_counter() - began)
    slowest = torch.tensor(spent, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    host, whole = (slowest / count * 1e6).tolist()
    return host, whole


def settle(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work; calls on CPU tensors have ended when they return."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def calls(
    call: Callable[..., Any], side: Side, group: Any, tensor: torch.Tensor, size: int, way: str, count: int
) -> None:
    """Make calls and, if they hand back Works, wait for them on the stream."""
    if way == "sync":
        for _ in range(count):
            call(side, group, tensor, size, False)
    elif way == "async":
        for _ in range(count):
            call(side, group, tensor, size, True).wait()
    else:
        for work in [call(side, group, tensor, size, True) for _ in range(count)]:
            work.wait()


def figure(name: str, nbytes: int, way: str, taken: dict[str, Any]) -> dict[str, Any]:
    """Return the medians of one comparison."""
    host = {side: statistics.median(times[0]) for side, times in taken.items()}
    whole = {side: statistics.median(times[1]) for side, times in taken.items()}
    return {
        "collective": name,
        "bytes": nbytes,
        "call": way,
        "host_us": host,
        "whole_us": whole,
        "host_over": host["hpcdist"] - host["torch"],
        "gigabytes_per_s": {side: nbytes / time_us / 1e3 for side, time_us in whole.items()},
    }


def about() -> dict[str, str]:
    """Return the hardware and versions behind the figures, for ``docs/explanation/gpu-results.md``."""
    from hpcdist.backends.nccl.library import load

    return {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "ranks": str(dist.get_world_size()) if dist.is_initialized() else "",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, load().version)),
        "hpcdist": dist.__version__,
    }


def report(figures: list[dict[str, Any]]) -> None:
    """Print the figures as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=", ".join(f"{key} {value}" for key, value in about().items() if value))
    for heading in ("collective", "bytes", "call", "host µs: ours", "torch's", "over", "whole µs: ours", "torch's"):
        table.add_column(heading, justify="left" if heading in ("collective", "call") else "right")
    for each in figures:
        host, whole = ((f"{each[key][side]:.1f}" for side in ("hpcdist", "torch")) for key in ("host_us", "whole_us"))
        table.add_row(each["collective"], str(each["bytes"]), each["call"], *host, f"{each['host_over']:+.1f}", *whole)
    Console(width=max(WIDTH, Console().width)).print(table)
