"""Subject ``collectives``: time of collectives on tensors, from 4 bytes to hundreds of megabytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from rich.progress import Progress

import hpcdist as dist
from hpcdist.backends.mpi.process import runtime
from hpcdist.cli.bench.timing import Bench

Calls = dict[str, Callable[[], Any]]


def sizes(bench: Bench) -> Iterator[int]:
    options = bench.options
    if options.sizes:
        yield from options.sizes
        return
    size = options.min
    while size <= options.max:
        yield size
        size *= options.factor


def chosen(bench: Bench, known: Collection[str]) -> list[str]:
    """Return the collectives to measure, of those that are known."""
    names = list(known) if bench.options.collectives == ["all"] else bench.options.collectives
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"cannot time the collective {unknown[0]!r} (known: {', '.join(known)}, all)")
    return names


COLLECTIVES = ("all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single", "all_to_all_single")


def all_sides(bench: Bench, name: str, whole: torch.Tensor, out: torch.Tensor, part: torch.Tensor) -> Calls:
    """Return one collective by each library, on the same buffers, whose zeros no number of calls overflows."""
    comm, in_place, has_numpy = bench.comm, runtime.load().IN_PLACE, whole.dtype is torch.float32
    a, b, c = ((each if has_numpy else each.view(torch.uint8)).numpy() for each in (whole, out, part))
    outputs = [list(out.chunk(bench.size))]
    calls: dict[str, Calls] = {
        "all_reduce": {
            "hpcdist": lambda: dist.all_reduce(out),
            "mpi4py": lambda: comm.Allreduce(in_place, b),
            "gloo": lambda: bench.gloo.allreduce([out]).wait(),
        },
        "broadcast": {
            "hpcdist": lambda: dist.broadcast(out, 0),
            "mpi4py": lambda: comm.Bcast(b, 0),
            "gloo": lambda: bench.gloo.broadcast(out, 0).wait(),
        },
        "all_gather_single": {
            "hpcdist": lambda: dist.all_gather_into_tensor(out, part),
            "mpi4py": lambda: comm.Allgather(c, b),
            "gloo": lambda: bench.gloo.allgather(outputs, [part]).wait(),
        },
        "reduce_scatter_single": {
            "hpcdist": lambda: dist.reduce_scatter_tensor(part, whole),
            "mpi4py": lambda: comm.Reduce_scatter_block(a, c),
        },
        "all_to_all_single": {
            "hpcdist": lambda: dist.all_to_all_single(out, whole),
            "mpi4py": lambda: comm.Alltoall(a, b),
            "gloo": lambda: bench.gloo.alltoall_base(out, whole, [], []).wait(),
        },
    }
    if "reduce" in name and not has_numpy:
        del calls[name]["mpi4py"]
    return calls[name]


def buffers(
    bench: Bench, name: str, dtype: torch.dtype, nbytes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return input and output of some bytes, and one rank's part, for one collective."""
    divided = name in ("all_gather_single", "reduce_scatter_single", "all_to_all_single")
    unit = bench.size if divided else 1
    numel = max(1, nbytes // dtype.itemsize // unit) * unit
    part = torch.zeros(numel // bench.size or 1, dtype=dtype)
    return torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype), part


def compare(bench: Bench, name: str, dtype: torch.dtype, nbytes: int) -> dict[str, float]:
    """Time one collective at one size; ``copy`` is one local copy of the tensor, for comparison."""
    whole, out, part = buffers(bench, name, dtype, nbytes)
    calls = all_sides(bench, name, whole, out, part)
    calls["copy"] = lambda: out.copy_(whole)
    asked = {side: call for side, call in calls.items() if side in bench.options.sides}
    return bench.compare(name, str(dtype).removeprefix("torch."), out.nbytes, asked)


def measure(bench: Bench) -> None:
    names, dtypes = chosen(bench, COLLECTIVES), bench.options.dtypes
    work = [(name, dtype, size) for name in names for dtype in dtypes for size in sizes(bench)]
    # no refresh thread: it would compete for a core with the measured calls
    with Progress(disable=bench.rank != 0, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("collectives", total=len(work))
        for name, dtype, size in work:
            bar.update(task, description=f"{name} {dtype} {size} B", refresh=True)
            compare(bench, name, dtype, size)
            bar.advance(task)
