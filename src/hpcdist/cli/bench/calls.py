"""Subject ``calls``: time of every kind of collective, beside raw MPI and what torch takes by itself.

torch's part is the same call of ``torch.distributed`` on torch's "fake" group, which sends nothing. hpcdist is called
by its own functions; the sum of the two others is what torch would take with a backend that costs nothing over MPI.
"""

from __future__ import annotations

import warnings
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
PREPARED = 400  # calls after which a group repeats them without checks
SHAPES = 12  # shapes or lists that a program may use in turn
TENSORS = 20  # of a coalesced call
LIMIT = "mpi4py + torch's part"

Call = Callable[[], Any]


def measure(bench: Bench) -> None:
    """Time all calls at all sizes of each rank's tensor."""
    warnings.filterwarnings("ignore", ".*all_reduce_coalesced", FutureWarning)  # a later torch may lack it
    for nbytes in bench.options.sizes or SIZES:
        count = max(1, nbytes // 4)
        by = calls(bench, count)
        theirs = by(torch.distributed, private_names.fake_group())
        for name, (raw, ours) in by(dist, None).items():
            for _ in range(PREPARED):
                ours()
            bench.compare(name, "float32", nbytes, {"mpi4py": raw, "torch's part": theirs[name][1], "hpcdist": ours})
            first, second = bench.figures[-3:-1]
            limit = (getattr(first, each) + getattr(second, each) for each in ("median", "low", "high"))
            bench.figures.insert(-1, Figure(name, "float32", nbytes, LIMIT, *limit))


def calls(bench: Bench, count: int) -> Callable[[Any, Any], dict[str, tuple[Call, Call]]]:
    """Return functions that make each call by raw MPI, and by a module on a group; ``count`` elements for each rank."""
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
    average = dist.ReduceOp.AVG
    gathered, scattered = (outputs, inputs) if is_root else (None, None)
    root_of = all_b if is_root else None
    # each as large as the tensors of many shapes: a rank's share, and all shares
    arrays = cycle([(torch.ones(each).numpy(), torch.ones(each * size).numpy()) for each in sizes])

    many, all_many = [torch.ones(count) for _ in range(TENSORS)], torch.ones(TENSORS * count).numpy()

    # raw MPI's
    all_reduce, all_gather = partial(comm.Allreduce, mpi.IN_PLACE, a), partial(comm.Allgather, a, all_a)
    reduce_scatter, all_to_all = partial(comm.Reduce_scatter_block, all_a, a), partial(comm.Alltoall, all_a, all_b)

    all_reduce_flat = partial(comm.Allreduce, mpi.IN_PLACE, all_many)

    def all_reduce_many() -> None:
        comm.Allreduce(mpi.IN_PLACE, next(arrays)[0])

    def messages() -> None:
        for request in (comm.Irecv(b, before), comm.Isend(a, after)):
            request.Wait()

    def by(lib: Any, on: Any) -> dict[str, tuple[Call, Call]]:
        # the module's, by the names that this torch has
        reduces, gathers, scatters = (
            partial(function, group=on) for function in (lib.all_reduce, lib.all_gather, lib.reduce_scatter)
        )
        coalesced = partial(lib.all_reduce_coalesced, many, group=on)
        exchanges = partial(lib.all_to_all_single, everything, whole, group=on)
        gather_single = getattr(lib, "all_gather_single", None) or lib.all_gather_into_tensor
        scatter_single = getattr(lib, "reduce_scatter_single", None) or lib.reduce_scatter_tensor

        def both() -> None:
            for work in (lib.irecv(other, before, on), lib.isend(one, after, on)):
                work.wait()

        return {
            "all_reduce": (all_reduce, partial(reduces, one)),
            "all_reduce, async_op and wait": (all_reduce, lambda: reduces(one, async_op=True).wait()),
            "all_reduce, bfloat16": (all_reduce, partial(reduces, half)),
            "all_reduce, AVG": (all_reduce, partial(reduces, one, average)),
            "all_reduce, complex64": (all_reduce, partial(reduces, pairs)),
            "all_reduce, strided": (all_reduce, partial(reduces, strided)),
            f"all_reduce_coalesced, {TENSORS} tensors": (all_reduce_flat, coalesced),
            f"all_reduce_coalesced, {TENSORS} tensors, async_op and wait": (
                all_reduce_flat,
                lambda: coalesced(async_op=True).wait(),
            ),
            "broadcast": (lambda: comm.Bcast(a), partial(lib.broadcast, one, 0, group=on)),
            "reduce": (lambda: comm.Reduce(a, b if is_root else None), partial(lib.reduce, one, 0, group=on)),
            "gather": (lambda: comm.Gather(a, root_of), partial(lib.gather, one, gathered, 0, group=on)),
            "scatter": (lambda: comm.Scatter(root_of, a), partial(lib.scatter, one, scattered, 0, group=on)),
            "all_gather, list": (all_gather, partial(gathers, outputs, one)),
            "all_gather, list, async_op and wait": (all_gather, lambda: gathers(outputs, one, async_op=True).wait()),
            "all_gather_into_tensor": (all_gather, partial(gather_single, whole, one, group=on)),
            "reduce_scatter, list": (reduce_scatter, partial(scatters, one, inputs)),
            "reduce_scatter_tensor": (reduce_scatter, partial(scatter_single, one, whole, group=on)),
            "all_to_all, list": (all_to_all, partial(lib.all_to_all, outputs, inputs, group=on)),
            "all_to_all_single": (all_to_all, exchanges),
            "all_to_all_single, splits": (all_to_all, partial(exchanges, split, split)),
            "barrier": (comm.Barrier, partial(lib.barrier, group=on)),
            "irecv and isend, and waits": (messages, both),
            # calls that cannot be repeated ones: new tensors and lists, and many shapes
            "all_reduce, new tensors": (all_reduce, lambda: reduces(torch.empty(count))),
            f"all_reduce, {SHAPES} shapes": (all_reduce_many, lambda: reduces(next(shapes))),
            f"all_reduce, {SHAPES} shapes, async_op and wait": (
                all_reduce_many,
                lambda: reduces(next(shapes), async_op=True).wait(),
            ),
            f"all_reduce, {SHAPES} shapes, bfloat16": (all_reduce_many, lambda: reduces(next(halves))),
            "all_gather, new lists": (all_gather, lambda: gathers([torch.empty(count) for _ in range(size)], one)),
            f"all_gather, list, {SHAPES} shapes": (
                lambda: comm.Allgather(*next(arrays)),
                lambda: gathers(*next(lists)),
            ),
            f"reduce_scatter, list, {SHAPES} shapes": (
                lambda: comm.Reduce_scatter_block(*next(arrays)[::-1]),
                lambda: scatters(*next(lists)[::-1]),
            ),
        }

    return by
