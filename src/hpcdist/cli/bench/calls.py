"""Subject ``calls``: time of every kind of collective, beside raw MPI and what torch takes by itself.

torch's part is the same call of ``torch.distributed`` on torch's "fake" group, which sends nothing. hpcdist is called
by its own functions; the sum of the two others is what torch would take with a backend that costs nothing over MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed

import hpcdist as dist
from hpcdist.backends.mpi.process import runtime
from hpcdist.cli.bench.timing import Bench, Figure
from hpcdist.torch_bridge import private_names

SIZES = [4]
PREPARED = 400  # calls after which a group has prepared for their repetition
SHAPES = 12  # that a program may have in turn
LIMIT = "mpi4py + torch's part"

Call = Callable[[], Any]


def measure(bench: Bench) -> None:
    """Time all calls at all sizes, each rank's tensor of so many bytes."""
    fake = private_names.fake_group()
    for nbytes in bench.options.sizes or SIZES:
        for name, (raw, call) in calls(bench, max(1, nbytes // 4)).items():
            sides = {
                "mpi4py": raw,
                "torch's part": lambda: call(torch.distributed, fake),  # noqa: B023
                "hpcdist": lambda: call(dist, None),  # noqa: B023
            }
            for _ in range(PREPARED):
                sides["hpcdist"]()
            bench.compare(name, "float32", nbytes, sides)
            first, second = bench.figures[-3:-1]
            limit = (getattr(first, each) + getattr(second, each) for each in ("median", "low", "high"))
            bench.figures.insert(-1, Figure(name, "float32", nbytes, LIMIT, *limit))


def calls(bench: Bench, count: int) -> dict[str, tuple[Call, Callable[[Any, Any], Any]]]:
    """Return each call by raw MPI, and by the functions of a module on a group; ``count`` elements a rank."""
    comm, size, mpi = bench.comm, bench.size, runtime.load()
    is_root = bench.rank == 0
    sizes = [count + more for more in range(SHAPES)]
    shapes, halves = cycle(map(torch.ones, sizes)), cycle([torch.ones(each).bfloat16() for each in sizes])
    lists = cycle([([torch.ones(each) for _ in range(size)], torch.ones(each)) for each in sizes])
    one, other, whole = torch.ones(count), torch.ones(count), torch.ones(count * size)
    half, pairs = one.bfloat16(), one.to(torch.complex64)
    strided = torch.ones(max(2, count), 2)[:, 0]  # one element is contiguous
    inputs, outputs = ([torch.ones(count) for _ in range(size)] for _ in range(2))
    split, everything = [count] * size, torch.ones(count * size)
    a, b, all_a, all_b = (each.numpy() for each in (one, other, whole, everything))
    after, before = (bench.rank + 1) % size, (bench.rank - 1) % size

    all_reduce, all_gather = partial(comm.Allreduce, mpi.IN_PLACE, a), partial(comm.Allgather, a, all_a)
    reduce_scatter, all_to_all = partial(comm.Reduce_scatter_block, all_a, a), partial(comm.Alltoall, all_a, all_b)
    # each with as many elements as the tensors of many shapes have: a rank's share, and all shares
    arrays = cycle([(torch.ones(each).numpy(), torch.ones(each * size).numpy()) for each in sizes])

    def all_reduce_many() -> None:
        comm.Allreduce(mpi.IN_PLACE, next(arrays)[0])

    def messages() -> None:
        for request in (comm.Irecv(b, before), comm.Isend(a, after)):
            request.Wait()

    def both(lib: Any, group: Any) -> None:
        for work in (lib.irecv(other, before, group), lib.isend(one, after, group)):
            work.wait()

    average = dist.ReduceOp.AVG
    gathered, scattered = (outputs, inputs) if is_root else (None, None)
    root_of = all_b if is_root else None
    return {
        "all_reduce": (all_reduce, lambda lib, group: lib.all_reduce(one, group=group)),
        "all_reduce, async_op and wait": (
            all_reduce,
            lambda lib, group: lib.all_reduce(one, group=group, async_op=True).wait(),
        ),
        "all_reduce, bfloat16": (all_reduce, lambda lib, group: lib.all_reduce(half, group=group)),
        "all_reduce, AVG": (all_reduce, lambda lib, group: lib.all_reduce(one, average, group=group)),
        "all_reduce, complex64": (all_reduce, lambda lib, group: lib.all_reduce(pairs, group=group)),
        "all_reduce, strided": (all_reduce, lambda lib, group: lib.all_reduce(strided, group=group)),
        "broadcast": (lambda: comm.Bcast(a), lambda lib, group: lib.broadcast(one, 0, group=group)),
        "reduce": (lambda: comm.Reduce(a, b if is_root else None), lambda lib, group: lib.reduce(one, 0, group=group)),
        "gather": (lambda: comm.Gather(a, root_of), lambda lib, group: lib.gather(one, gathered, 0, group=group)),
        "scatter": (lambda: comm.Scatter(root_of, a), lambda lib, group: lib.scatter(one, scattered, 0, group=group)),
        "all_gather, list": (all_gather, lambda lib, group: lib.all_gather(outputs, one, group=group)),
        "all_gather, list, async_op and wait": (
            all_gather,
            lambda lib, group: lib.all_gather(outputs, one, group=group, async_op=True).wait(),
        ),
        "all_gather_into_tensor": (
            all_gather,
            lambda lib, group: named(lib, "all_gather_single", "all_gather_into_tensor")(whole, one, group=group),
        ),
        "reduce_scatter, list": (reduce_scatter, lambda lib, group: lib.reduce_scatter(one, inputs, group=group)),
        "reduce_scatter_tensor": (
            reduce_scatter,
            lambda lib, group: named(lib, "reduce_scatter_single", "reduce_scatter_tensor")(one, whole, group=group),
        ),
        "all_to_all, list": (all_to_all, lambda lib, group: lib.all_to_all(outputs, inputs, group=group)),
        "all_to_all_single": (all_to_all, lambda lib, group: lib.all_to_all_single(everything, whole, group=group)),
        "all_to_all_single, splits": (
            all_to_all,
            lambda lib, group: lib.all_to_all_single(everything, whole, split, split, group=group),
        ),
        "barrier": (comm.Barrier, lambda lib, group: lib.barrier(group=group)),
        "irecv and isend, and waits": (messages, both),
        # what no call can be known by: new tensors and lists, and many shapes
        "all_reduce, new tensors": (all_reduce, lambda lib, group: lib.all_reduce(torch.empty(count), group=group)),
        f"all_reduce, {SHAPES} shapes": (all_reduce_many, lambda lib, group: lib.all_reduce(next(shapes), group=group)),
        f"all_reduce, {SHAPES} shapes, async_op and wait": (
            all_reduce_many,
            lambda lib, group: lib.all_reduce(next(shapes), group=group, async_op=True).wait(),
        ),
        f"all_reduce, {SHAPES} shapes, bfloat16": (
            all_reduce_many,
            lambda lib, group: lib.all_reduce(next(halves), group=group),
        ),
        "all_gather, new lists": (
            all_gather,
            lambda lib, group: lib.all_gather([torch.empty(count) for _ in range(size)], one, group=group),
        ),
        f"all_gather, list, {SHAPES} shapes": (
            lambda: comm.Allgather(*next(arrays)),
            lambda lib, group: lib.all_gather(*next(lists), group=group),
        ),
        f"reduce_scatter, list, {SHAPES} shapes": (
            lambda: comm.Reduce_scatter_block(*next(arrays)[::-1]),
            lambda lib, group: lib.reduce_scatter(*next(lists)[::-1], group=group),
        ),
    }


def named(lib: Any, name: str, earlier: str) -> Any:
    """Return a function by the name that this torch has for it."""
    return getattr(lib, name, None) or getattr(lib, earlier)
