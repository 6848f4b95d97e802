"""Random programs in which one rank makes another call than the others, and what each rank sees of it.

Two right calls, one in which one rank's size, dtype, op, root or the call itself differs or is missing, two right calls
and the end of the group. A rank stops at its first error. Run as a program, it takes seeds and prints what came out:

    mpirun -n 2 python -m tests.mpi.wrong_programs SEED…
"""

from __future__ import annotations

import random
import sys
from datetime import timedelta
from typing import NamedTuple

import torch

import hpcdist as dist

GUARD = 1 << 18  # bytes before and after each tensor that nobody may write
PATTERN = 0xA5
SIZES = [1, 4, 7, 75, 1000, 3000, 3001, 20000, 60000, 60003, 120000, 250000]
DTYPES = [torch.float32, torch.float64, torch.int32, torch.bfloat16, torch.uint8]
OPS = {"SUM": dist.ReduceOp.SUM, "MAX": dist.ReduceOp.MAX, "MIN": dist.ReduceOp.MIN}
WITHOUT_TENSOR = ("barrier", "all_gather_object", "broadcast_object_list")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
ROOTED = ("reduce", "broadcast", "gather", "scatter", "broadcast_object_list")
CALLS = [
    "all_reduce",
    "all_reduce_async",
    "all_reduce_coalesced",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_uneven",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "all_to_all_splits",
    *WITHOUT_TENSOR,
]


class Made(NamedTuple):
    """A call of one rank."""

    name: str
    size: int
    dtype: torch.dtype
    op: str
    root: int


class Memory:
    """Tensors of one program, each between two zones that nobody may write."""

    def __init__(self):
        self.all = []

    def tensor(self, size, dtype, value=1):
        nbytes = size * dtype.itemsize
        whole = torch.full((nbytes + 2 * GUARD,), PATTERN, dtype=torch.uint8)
        self.all.append((whole, nbytes))
        part = whole[GUARD : GUARD + nbytes].view(dtype)
        return part.fill_(value)

    def is_whole(self):
        return all(
            bool((whole[:GUARD] == PATTERN).all()) and bool((whole[GUARD + nbytes :] == PATTERN).all())
            for whole, nbytes in self.all
        )


def carry_out(call, group, memory):
    """Make one call."""
    name, size, dtype, op, root = call
    n, op, tensor = group.size(), OPS[op], memory.tensor
    is_root = group.rank() == root
    if name == "all_reduce":
        dist.all_reduce(tensor(size, dtype), op, group)
    elif name == "all_reduce_async":
        dist.all_reduce(tensor(size, dtype), op, group, async_op=True).wait()
    elif name == "all_reduce_coalesced":
        dist.all_reduce_coalesced([tensor(size, dtype), tensor(3, dtype)], op, group)
    elif name == "reduce":
        dist.reduce(tensor(size, dtype), None, op, group, group_dst=root)
    elif name == "broadcast":
        dist.broadcast(tensor(size, dtype), None, group, group_src=root)
    elif name == "all_gather":
        dist.all_gather([tensor(size, dtype) for _ in range(n)], tensor(size, dtype), group)
    elif name == "all_gather_uneven":
        dist.all_gather([tensor(size + r, dtype) for r in range(n)], tensor(size + group.rank(), dtype), group)
    elif name == "all_gather_into_tensor":
        dist.all_gather_into_tensor(tensor(n * size, dtype), tensor(size, dtype), group)
    elif name == "gather":
        outputs = [tensor(size, dtype) for _ in range(n)] if is_root else None
        dist.gather(tensor(size, dtype), outputs, None, group, group_dst=root)
    elif name == "scatter":
        inputs = [tensor(size, dtype) for _ in range(n)] if is_root else None
        dist.scatter(tensor(size, dtype), inputs, None, group, group_src=root)
    elif name == "reduce_scatter":
        dist.reduce_scatter(tensor(size, dtype), [tensor(size, dtype) for _ in range(n)], op, group)
    elif name == "reduce_scatter_tensor":
        dist.reduce_scatter_tensor(tensor(size, dtype), tensor(n * size, dtype), op, group)
    elif name == "all_to_all":
        dist.all_to_all([tensor(size, dtype) for _ in range(n)], [tensor(size, dtype) for _ in range(n)], group)
    elif name == "all_to_all_single":
        dist.all_to_all_single(tensor(n * size, dtype), tensor(n * size, dtype), group=group)
    elif name == "all_to_all_splits":  # rank r sends size + r + s to rank s
        splits = [size + group.rank() + s for s in range(n)]
        dist.all_to_all_single(tensor(sum(splits), dtype), tensor(sum(splits), dtype), splits, splits, group)
    elif name == "barrier":
        dist.barrier(group)
    elif name == "all_gather_object":
        dist.all_gather_object([None] * n, size, group)
    elif name == "broadcast_object_list":
        dist.broadcast_object_list([size], None, group, group_src=root)
    else:
        raise ValueError(name)


def drawn(rng, ranks):
    """Draw a call that all ranks make."""
    return Made(rng.choice(CALLS), rng.choice(SIZES), rng.choice(DTYPES), rng.choice(list(OPS)), rng.randrange(ranks))


def other(rng, value, values):
    return rng.choice([each for each in values if each != value])


def program(seed, ranks):
    """Return the calls of each rank, the odd rank, and in what it differs."""
    rng = random.Random(seed)
    first, second, right, fourth = (drawn(rng, ranks) for _ in range(4))
    last = drawn(rng, ranks)._replace(name="all_reduce")  # which waits for all ranks, as what came before may not
    while True:
        kind = rng.choice(["size", "size", "dtype", "op", "root", "call", "missing"])
        if kind == "missing":
            wrong = None
        elif kind == "call":
            wrong = right._replace(name=other(rng, right.name, CALLS))
        elif kind == "op" and right.name in REDUCING:
            wrong = right._replace(op=other(rng, right.op, OPS))
        elif kind == "root" and right.name in ROOTED:
            wrong = right._replace(root=other(rng, right.root, range(ranks)))
        elif kind == "size" and right.name not in WITHOUT_TENSOR:
            wrong = right._replace(size=other(rng, right.size, SIZES))
        elif kind == "dtype" and right.name not in WITHOUT_TENSOR:
            wrong = right._replace(dtype=other(rng, right.dtype, DTYPES))
        else:
            continue
        if wrong is None or not are_one(right, wrong):
            break
    odd = rng.randrange(ranks)
    calls = [[first, second, right, fourth, last] for _ in range(ranks)]
    calls[odd] = [first, second, *([] if wrong is None else [wrong]), fourth, last]
    return calls, odd, kind


def are_one(call, another):
    """Tell whether two names stand for one call of the library."""
    families = [
        {"all_reduce", "all_reduce_async"},
        {"all_gather", "all_gather_into_tensor"},
        {"reduce_scatter", "reduce_scatter_tensor"},
        {"all_to_all", "all_to_all_single"},
    ]
    return call.name != another.name and any({call.name, another.name} <= family for family in families)


def run(calls):
    """Run this rank's calls on a group of their own; return the error, and whether memory around tensors is whole."""
    group = dist.new_group(timeout=timedelta(seconds=5))
    memory, failure = Memory(), None
    try:
        for call in calls:
            carry_out(call, group, memory)
    except Exception as error:
        failure = error
    try:
        dist.destroy_process_group(group)
    except Exception as error:
        failure = failure or error
    return failure, memory


def main(seeds):
    dist.init_process_group("mpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    for seed in seeds:
        calls, odd, kind = program(seed, size)
        if rank == 0:
            print(f"seed {seed}: {kind} differs on rank {odd}: {calls[odd][2:4]} for {calls[odd - 1][2:4]}", flush=True)
        failure, memory = run(calls[rank])
        state = "whole" if memory.is_whole() else "OVERWRITTEN"
        print(f"seed {seed} rank {rank}: {type(failure).__name__} {failure}; memory {state}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(map(int, sys.argv[1:]))
