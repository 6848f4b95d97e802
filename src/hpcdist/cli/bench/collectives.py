"""How long does a collective take, from 4 bytes to hundreds of megabytes?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.progress import Progress

import hpcdist as dist
from hpcdist.backends.mpi.process import runtime
from hpcdist.cli.bench.timing import Bench

Calls = dict[str, Callable[[], Any]]


def sizes(bench: Bench) -> Iterator[int]:
    """Count from the smallest to the largest size."""
    options = bench.options
    if options.sizes:
        yield from options.sizes
        return
    size = options.min
    while size <= options.max:
        yield size
        size *= options.factor


def all_reduce(bench: Bench, whole: torch.Tensor, out: torch.Tensor, part: torch.Tensor) -> Calls:
    """Sum in place; the values stay zero, so no number of calls overflows."""
    calls: Calls = {"hpcdist": lambda: dist.all_reduce(out)}
    if whole.dtype is torch.float32:
        array, comm = out.numpy(), bench.comm
        inplace = runtime.load().IN_PLACE
        calls["mpi4py"] = lambda: comm.Allreduce(inplace, array)
    calls["gloo"] = lambda: bench.gloo.allreduce([out]).wait()
    return calls


def broadcast(bench: Bench, whole: torch.Tensor, out: torch.Tensor, part: torch.Tensor) -> Calls:
    """Copy from rank 0."""
    raw = out.view(torch.uint8).numpy()
    return {
        "hpcdist": lambda: dist.broadcast(out, 0),
        "mpi4py": lambda: bench.comm.Bcast(raw, 0),
        "gloo": lambda: bench.gloo.broadcast(out, 0).wait(),
    }


def all_gather_single(bench: Bench, whole: torch.Tensor, out: torch.Tensor, part: torch.Tensor) -> Calls:
    """Concatenate every rank's part."""
    send, recv = part.view(torch.uint8).numpy(), out.view(torch.uint8).numpy()
    outputs = [list(out.chunk(bench.size))]
    return {
        "hpcdist": lambda: dist.all_gather_into_tensor(out, part),
        "mpi4py": lambda: bench.comm.Allgather(send, recv),
        "gloo": lambda: bench.gloo.allgather(outputs, [part]).wait(),
    }


def reduce_scatter_single(bench: Bench, whole: torch.Tensor, out: torch.Tensor, part: torch.Tensor) -> Calls:
    """Sum, and keep one's own part."""
    calls: Calls = {"hpcdist": lambda: dist.reduce_scatter_tensor(part, whole)}
    if whole.dtype is torch.float32:
        send, recv = whole.numpy(), part.numpy()
        calls["mpi4py"] = lambda: bench.comm.Reduce_scatter_block(send, recv)
    return calls


def all_to_all_single(bench: Bench, whole: torch.Tensor, out: torch.Tensor, part: torch.Tensor) -> Calls:
    """Send each rank its part."""
    send, recv = whole.view(torch.uint8).numpy(), out.view(torch.uint8).numpy()
    return {
        "hpcdist": lambda: dist.all_to_all_single(out, whole),
        "mpi4py": lambda: bench.comm.Alltoall(send, recv),
        "gloo": lambda: bench.gloo.alltoall_base(out, whole, [], []).wait(),
    }


COLLECTIVES: dict[str, Callable[[Bench, torch.Tensor, torch.Tensor, torch.Tensor], Calls]] = {
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "all_gather_single": all_gather_single,
    "reduce_scatter_single": reduce_scatter_single,
    "all_to_all_single": all_to_all_single,
}


def buffers(
    bench: Bench, name: str, dtype: torch.dtype, nbytes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a whole tensor of some bytes, another as large, and a rank's part, for one collective."""
    divided = name in ("all_gather_single", "reduce_scatter_single", "all_to_all_single")
    unit = bench.size if divided else 1
    numel = max(1, nbytes // dtype.itemsize // unit) * unit
    part = torch.zeros(numel // bench.size or 1, dtype=dtype)
    return torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype), part


def compare(bench: Bench, name: str, dtype: torch.dtype, nbytes: int) -> dict[str, float]:
    """Time one collective at one size; ``copy`` is one local copy of the tensor, the floor."""
    whole, out, part = buffers(bench, name, dtype, nbytes)
    calls = COLLECTIVES[name](bench, whole, out, part)
    calls["copy"] = lambda: out.copy_(whole)
    asked = {side: call for side, call in calls.items() if side in bench.options.sides}
    return bench.compare(name, str(dtype).removeprefix("torch."), out.nbytes, asked)


def measure(bench: Bench) -> None:
    """Time the collectives asked for at all sizes.

    Raises:
        SystemExit: a collective that this subject does not know.
    """
    options = bench.options
    names = list(COLLECTIVES) if options.collectives == ["all"] else options.collectives
    unknown = [name for name in names if name not in COLLECTIVES]
    if unknown:
        raise SystemExit(f"no collective {unknown[0]!r} to time (known: {', '.join(COLLECTIVES)}, all)")
    work = [(name, dtype, size) for name in names for dtype in options.dtypes for size in sizes(bench)]
    # no refreshing thread: it would compete for a core with what is being timed
    with Progress(disable=bench.rank != 0, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("collectives", total=len(work))
        for name, dtype, size in work:
            bar.update(task, description=f"{name} {dtype} {size} B", refresh=True)
            compare(bench, name, dtype, size)
            bar.advance(task)
