"""Subject ``collectives``: time of collectives on tensors, from 4 bytes to hundreds of megabytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

import hpcdist as dist
from hpcdist.backends.mpi.process import runtime
from hpcdist.cli.bench.timing import Bench

Calls = dict[str, Callable[[], Any]]
Buffers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # input and output of some bytes, and one rank's part


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
    """Return the collectives to measure, from the table."""
    names = list(known) if bench.options.collectives == ["all"] else bench.options.collectives
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"cannot time the collective {unknown[0]!r} (known: {', '.join(known)}, all)")
    return names


COLLECTIVES = ("all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single", "all_to_all_single")


def c10d_call(lib: Any, name: str, buffers: Buffers, **options: Any) -> partial[Any]:
    """Return one collective by hpcdist's or by torch.distributed's functions."""
    whole, out, part = buffers
    calls: dict[str, tuple[Any, ...]] = {
        "all_reduce": (lib.all_reduce, out),
        "broadcast": (lib.broadcast, out, 0),
        "all_gather_single": (lib.all_gather_into_tensor, out, part),
        "reduce_scatter_single": (lib.reduce_scatter_tensor, part, whole),
        "all_to_all_single": (lib.all_to_all_single, out, whole),
    }
    call, *arguments = calls[name]
    return partial(call, *arguments, **options)


def all_sides(bench: Bench, name: str, buffers: Buffers) -> Calls:
    """Return one collective by each library, on the same buffers, filled with zeros so that sums cannot overflow."""
    comm, in_place, (whole, out, part) = bench.comm, runtime.load().IN_PLACE, buffers
    has_numpy = whole.dtype is torch.float32
    a, b, c = ((each if has_numpy else each.view(torch.uint8)).numpy() for each in buffers)
    outputs = [list(out.chunk(bench.size))]
    mpi4py: Calls = {
        "all_reduce": lambda: comm.Allreduce(in_place, b),
        "broadcast": lambda: comm.Bcast(b, 0),
        "all_gather_single": lambda: comm.Allgather(c, b),
        "reduce_scatter_single": lambda: comm.Reduce_scatter_block(a, c),
        "all_to_all_single": lambda: comm.Alltoall(a, b),
    }
    gloo: Calls = {
        "all_reduce": lambda: bench.gloo.allreduce([out]).wait(),
        "broadcast": lambda: bench.gloo.broadcast(out, 0).wait(),
        "all_gather_single": lambda: bench.gloo.allgather(outputs, [part]).wait(),
        "all_to_all_single": lambda: bench.gloo.alltoall_base(out, whole, [], []).wait(),
    }
    calls: Calls = {"hpcdist": c10d_call(dist, name, buffers)}
    if has_numpy or "reduce" not in name:
        calls["mpi4py"] = mpi4py[name]
    if name in gloo:
        calls["gloo"] = gloo[name]
    return calls


def buffers(bench: Bench, name: str, dtype: torch.dtype, nbytes: int, device: str = "cpu") -> Buffers:
    divided = name in ("all_gather_single", "reduce_scatter_single", "all_to_all_single")
    unit = bench.size if divided else 1
    numel = max(1, nbytes // dtype.itemsize // unit) * unit
    make = partial(torch.zeros, dtype=dtype, device=device)
    return make(numel), make(numel), make(numel // bench.size or 1)


def compare(bench: Bench, name: str, dtype: torch.dtype, nbytes: int) -> dict[str, float]:
    """Time one collective at one size; ``copy`` is one local copy of the tensor, for comparison."""
    whole, out, _ = made = buffers(bench, name, dtype, nbytes)
    calls = {**all_sides(bench, name, made), "copy": lambda: out.copy_(whole)}
    asked = {side: call for side, call in calls.items() if side in bench.options.sides}
    return bench.compare(name, str(dtype).removeprefix("torch."), out.nbytes, asked)


def measure(bench: Bench) -> None:
    for row in bench.progress([*product(chosen(bench, COLLECTIVES), bench.options.dtypes, list(sizes(bench)))]):
        compare(bench, *row)
