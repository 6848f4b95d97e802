"""Random programs, which must give what they give with torch.distributed on gloo.

A program is a list of calls, the same on all ranks: collectives and rings of messages on the world and on subgroups,
whose Works are waited for in any order. Some are loops, whose calls come again and again. Each rank chooses on its own
which calls are asynchronous and, on our side, which tensors are strided views and whether equal shares are given as
splits.
"""

from __future__ import annotations

import random
import warnings
from typing import NamedTuple

import pytest
import torch
import torch.distributed as td

import hpcdist as dist
from hpcdist.core import issue

LENGTH = 60
PROGRAMS = 15
BODY, ROUNDS = 5, 20  # of the programs that loop
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (300, 11), (70_001,)]
DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8, torch.float16]
OPS = ["SUM", "MIN", "MAX", "PRODUCT"]


class Step(NamedTuple):
    """One call of a program."""

    call: str
    seed: int
    group: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str
    root: int
    is_async: bool
    is_strided: bool
    waits: int  # how many of the Works so far are waited for after it


class Run:
    """A program on one of the two: where it is, and what it has written."""

    def __init__(self, d, groups, is_ours):
        self.d, self.groups, self.is_ours = d, groups, is_ours
        self.works, self.results = [], []

    def values(self, step, rank, count=()):
        """Return this rank's input: small whole numbers, so that the order of a sum does not matter."""
        generator = torch.Generator().manual_seed(1000 * step.seed + rank)
        given = torch.randint(0, 3, (*count, *step.shape), generator=generator).to(step.dtype)
        return self.placed(given, step)

    def output(self, step, count=()):
        return self.placed(torch.zeros((*count, *step.shape), dtype=step.dtype), step)

    def placed(self, tensor, step):
        """Return the tensor, or a view with gaps that has its values."""
        if not (step.is_strided and self.is_ours and tensor.dim()):
            return tensor
        wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]

    def run(self, program):
        for step in program:
            group = self.groups[step.group]
            if group == self.d.GroupMember.NON_GROUP_MEMBER:
                continue
            work = CALLS[step.call](self, step, group, self.d.get_rank(group), self.d.get_world_size(group))
            self.works += work if isinstance(work, list) else [work] * (work is not None)
            shuffle = random.Random(step.seed)
            for _ in range(min(step.waits, len(self.works))):
                self.works.pop(shuffle.randrange(len(self.works))).wait()
        for work in self.works:
            work.wait()
        return self.results


def all_reduce(run, step, group, rank, size):
    run.results.append(tensor := run.values(step, rank))
    return run.d.all_reduce(tensor, getattr(run.d.ReduceOp, step.op), group, step.is_async)


def broadcast(run, step, group, rank, size):
    run.results.append(tensor := run.values(step, rank))
    return run.d.broadcast(tensor, group=group, async_op=step.is_async, group_src=step.root % size)


def reduce(run, step, group, rank, size):
    tensor, root = run.values(step, rank), step.root % size
    if rank == root:
        run.results.append(tensor)
    op = getattr(run.d.ReduceOp, step.op)
    return run.d.reduce(tensor, op=op, group=group, async_op=step.is_async, group_dst=root)


def all_gather(run, step, group, rank, size):
    run.results += (outputs := [run.output(step) for _ in range(size)])
    return run.d.all_gather(outputs, run.values(step, rank), group, step.is_async)


def all_gather_into_tensor(run, step, group, rank, size):
    if not step.shape:
        return None
    wide = step._replace(shape=(size * step.shape[0], *step.shape[1:]))
    run.results.append(output := run.output(wide))
    return run.d.all_gather_into_tensor(output, run.values(step, rank), group, step.is_async)


def gather(run, step, group, rank, size):
    root = step.root % size
    outputs = [run.output(step) for _ in range(size)] if rank == root else None
    run.results += outputs or []
    return run.d.gather(run.values(step, rank), outputs, group=group, async_op=step.is_async, group_dst=root)


def scatter(run, step, group, rank, size):
    root = step.root % size
    given = [run.values(step, 100 + each) for each in range(size)] if rank == root else None
    run.results.append(output := run.output(step))
    return run.d.scatter(output, given, group=group, async_op=step.is_async, group_src=root)


def reduce_scatter(run, step, group, rank, size):
    given = [run.values(step, rank + 100 * each) for each in range(size)]
    run.results.append(output := run.output(step))
    return run.d.reduce_scatter(output, given, getattr(run.d.ReduceOp, step.op), group, step.is_async)


def all_to_all_single(run, step, group, rank, size):
    shares = [[(step.seed + 2 * a + 3 * b) % 4 for b in range(size)] for a in range(size)]
    equal = step.seed % size  # on this rank all shares are alike, on the others they are ragged
    for a in range(size):
        shares[a][equal] = shares[equal][a] = 2
    sent, received = shares[rank], [row[rank] for row in shares]
    flat = step._replace(shape=(), is_strided=False)  # gloo takes contiguous ones only
    run.results.append(output := run.output(flat, (sum(received), 2)))
    given = run.values(flat, rank, (sum(sent), 2))
    if run.is_ours and rank == equal and step.is_strided:
        return run.d.all_to_all_single(output, given, group=group, async_op=step.is_async)
    return run.d.all_to_all_single(output, given, received, sent, group, step.is_async)


def ring(run, step, group, rank, size):
    if size == 1:
        return None
    run.results.append(output := run.output(step))
    ops = [
        run.d.P2POp(run.d.isend, run.values(step, rank), group=group, group_peer=(rank + 1) % size),
        run.d.P2POp(run.d.irecv, output, group=group, group_peer=(rank - 1) % size),
    ]
    return run.d.batch_isend_irecv(ops)


def messages(run, step, group, rank, size):
    if size == 1 or (size % 2 and rank == size - 1):
        return
    run.results.append(output := run.output(step))
    calls = [
        lambda: run.d.send(run.values(step, rank), group=group, group_dst=rank ^ 1, tag=step.root),
        lambda: run.d.recv(output, group=group, group_src=rank ^ 1, tag=step.root),
    ]
    for call in calls if rank % 2 else calls[::-1]:
        call()


def objects(run, step, group, rank, size):
    run.d.all_gather_object(gathered := [None] * size, (step.seed, "x" * (step.seed % 1000), rank), group)
    run.results.append(torch.tensor([each[0] + len(each[1]) + each[2] for each in gathered]))


def barrier(run, step, group, rank, size):
    return run.d.barrier(group, step.is_async)


CALLS = {
    each.__name__: each
    for each in (
        *(all_reduce, broadcast, reduce, all_gather, all_gather_into_tensor, gather, scatter, reduce_scatter),
        *(all_to_all_single, ring, messages, objects, barrier),
    )
}


def program_of(seed, groups):
    pick = random.Random(seed)
    return [
        Step(
            pick.choice(list(CALLS)),
            pick.randrange(10**6),
            pick.randrange(groups),
            pick.choice(SHAPES),
            pick.choice(DTYPES),
            pick.choice(OPS),
            pick.randrange(12),
            pick.random() < 0.5,
            pick.random() < 0.3,
            pick.choice([0, 0, 0, 1, 3]),
        )
        for _ in range(LENGTH)
    ]


@pytest.fixture(scope="module")
def both():
    size = dist.get_world_size()
    sets = [None, [0], list(range(size))[::-1], list(range(max(1, size - 1))), list(range(size))[1:] or [0]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield [[d.group.WORLD, *(d.new_group(ranks) for ranks in sets)] for d in (dist, td)]


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_same_results(seed, both):
    program = program_of(seed, len(both[0]))
    compare(program, both)


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_loops(seed, both, monkeypatch):
    monkeypatch.setattr(issue, "LOOKS", 3)  # calls that come again are recognised sooner
    body = program_of(1000 + seed, len(both[0]))[:BODY]
    rounds = [[step._replace(seed=step.seed + 4 * number) for step in body] for number in range(ROUNDS)]
    compare([step for each in rounds for step in each], both)


def own(program, rank):
    """Return the program with this rank's free choices."""
    pick = random.Random(rank)
    return [step._replace(is_async=pick.random() < 0.5, is_strided=pick.random() < 0.3) for step in program]


def compare(program, both):
    program = own(program, dist.get_rank())
    ours = Run(dist, both[0], True).run(program)
    theirs = Run(td, both[1], False).run(program)
    assert len(ours) == len(theirs)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.contiguous(), expected, rtol=0, atol=0)
