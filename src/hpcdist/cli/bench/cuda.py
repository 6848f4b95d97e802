"""Subject ``collectives`` on GPUs, ``--device cuda``: hpcdist beside ``torch.distributed`` on torch's own NCCL backend.

Both sides call NCCL on the same tensors of the same GPUs. Each is called synchronously, asynchronously with a wait at
once, and asynchronously with all waits at the end. Two times are taken: of the host only, until the calls return, while
the device is kept busy (on this one there is a limit); and with the device, until the results are there.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as c10d

import hpcdist as dist
from hpcdist.cli.bench.collectives import COLLECTIVES, Calls, buffers, c10d_call, chosen, sizes
from hpcdist.cli.bench.timing import Bench
from hpcdist.torch_bridge.private_names import occupy_gpu

OVERHEAD_LIMIT = 2.0  # microseconds a call over torch's own
WAYS = ("sync", "async", "async, waited later")
BUSY_CYCLES = 400_000_000  # cycles of a few tenths of a second, in which the device begins no call
CALLS = {4: 400, 1 << 20: 100, 1 << 62: 20}  # calls of a round, for sizes up to the key


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


def measure(bench: Bench, device: str = "cuda", backend: str = "nccl") -> int:
    """Time both sides; return 1 if a call of 4 bytes took the host more than 2 µs longer than torch's, or else 0."""
    names = chosen(bench, COLLECTIVES[:4])
    theirs = c10d.new_group(backend=backend, timeout=timedelta(minutes=5))  # on the same ranks, in torch's world
    sides = {"hpcdist": (dist, None), "torch": (c10d, theirs)}
    is_over = False
    for name, dtype, nbytes in product(names, bench.options.dtypes, list(sizes(bench))):
        made = buffers(bench, name, dtype, nbytes, device)
        count = next(each for limit, each in CALLS.items() if nbytes <= limit)
        for way in WAYS:
            several: Calls = {
                side: partial(calls, c10d_call(library, name, made, group=group), way, count)
                for side, (library, group) in sides.items()
            }
            about = str(dtype).removeprefix("torch.")
            busy, settled = partial(occupy, made[1].device), partial(settle, made[1].device)
            host = bench.compare(f"{name}, {way}: host", about, nbytes, several, count, 1, busy)
            bench.compare(f"{name}, {way}: whole", about, nbytes, several, count, 1, settled, settled)
            is_over = is_over or (nbytes == 4 and host["hpcdist"] - host["torch"] > OVERHEAD_LIMIT)
    c10d.destroy_process_group(theirs)
    return int(is_over)


def occupy(device: torch.device) -> None:
    """Keep a GPU busy, once it has finished its queued work."""
    settle(device)
    if device.type == "cuda":
        occupy_gpu(BUSY_CYCLES)


def settle(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work; calls on CPU tensors have ended when they return."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def calls(call: Callable[..., Any], way: str, count: int) -> None:
    """Make calls and, if they hand back Works, wait for them on the stream."""
    if way == "sync":
        for _ in range(count):
            call()
    elif way == "async":
        for _ in range(count):
            call(async_op=True).wait()
    else:
        for work in [call(async_op=True) for _ in range(count)]:
            work.wait()
