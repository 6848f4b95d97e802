"""Random programs of right calls: all kinds, dtypes, ops, layouts and groups, waited for at once or later.

Every rank draws the same calls from one seed, and how its own tensors lie in memory, which calls are asynchronous, and
when and in which order it waits from another. Some programs are loops, whose calls come again on other values. The
inputs are numbers of a seed of their own, so that each rank knows what every result must be.
"""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

import hpcdist as dist
from hpcdist.core import issue
from hpcdist.core.reduction import KIND_OF, KINDS, name_of

from .expected import MOVING, OPS, equal, mathematics
from .test_asymmetric import contiguous, strided, with_offset

# more of them once: HPCDIST_TEST_SEEDS=200
CALLS = int(os.environ.get("HPCDIST_TEST_CALLS", "100"))
SEEDS = range(int(os.environ.get("HPCDIST_TEST_SEEDS", "4")))
ROUNDS = 20  # of a loop
SIZES = [0, 1, 2, 31, 255, 1024, 4095, 9000, 20_000, 70_001]
SMALL = SIZES[:6]
PENDING = 6  # calls that may be under way at once
REDUCING = [(dtype, OPS[name]) for dtype, kind in KIND_OF.items() for name in OPS if OPS[name] in KINDS[kind]]
LAYOUTS = [contiguous, strided, with_offset]


def numbers(seed, rank, count, dtype):
    """The values of a rank: of integers all bits, of floats small whole numbers, whose sums are exact."""
    draw = np.random.default_rng([seed, rank])
    if dtype is torch.bool:
        return torch.from_numpy(draw.integers(0, 2, count, dtype=np.uint8)).to(dtype)
    if dtype.is_complex:
        real, imaginary = (torch.from_numpy(draw.integers(-3, 4, count).astype(np.float64)) for _ in range(2))
        return torch.complex(real, imaginary).to(dtype)
    if dtype.is_floating_point:
        low = 0 if dtype is torch.float8_e8m0fnu else -2
        return torch.from_numpy(draw.integers(low, 3, count).astype(np.float32)).to(dtype)
    return torch.from_numpy(np.frombuffer(draw.bytes(count * dtype.itemsize), str(dtype)[6:]).copy())


def alike(one, other):
    """Whether two tensors hold the same; one element with a stride is not copied by ``contiguous``."""
    return equal(*(torch.empty(each.shape, dtype=each.dtype).copy_(each) for each in (one, other)))


class Program:
    """One random program on one rank.

    Args:
        seed: of the calls, the same on all ranks.
        groups: with the ranks of each; this rank is in all of them.
        rank: this rank.
    """

    def __init__(self, seed, groups, rank):
        self.seed, self.groups, self.world_rank = seed, groups, rank
        self.shared, self.own = random.Random(seed), random.Random(f"{seed} {rank}")
        self.pending = []

    def run(self, calls, rounds=1):
        """Make the calls, and check each; in each further round the same calls, on other values."""
        kinds = [getattr(self, name) for name in sorted(vars(Program)) if name.startswith("do_")]
        begin = self.shared.getstate()
        for number in range(calls * rounds):
            if number % calls == 0:
                self.shared.setstate(begin)
            self.group, self.ranks = self.shared.choice(self.groups)
            self.rank, self.size = self.ranks.index(self.world_rank), len(self.ranks)
            self.call = self.seed * 1_000_000 + 100 * number
            self.root = self.shared.randrange(self.size)
            self.kind = self.shared.choice(kinds)
            self.kind()
            while len(self.pending) > PENDING or (self.pending and self.own.random() < 0.3):
                self.end()
        while self.pending:
            self.end()

    def end(self):
        """Wait for one of the calls that are under way, and check it."""
        kind, work, check = self.pending.pop(self.own.randrange(len(self.pending)))
        if work is not None:
            work.wait()
        assert check(), f"wrong values: {kind}"

    def later(self, what, call, check):
        """Make a call, asynchronous or not as this rank likes, whose values are checked when it has ended."""
        is_async = self.own.random() < 0.5
        self.pending.append((f"{self.kind.__name__[3:]} {what}, root {self.root}", call(async_op=is_async), check))
        if not is_async:
            self.pending[-1] = (self.pending[-1][0], None, check)

    def placed(self, values):
        return self.own.choice(LAYOUTS)(values)

    def moving(self):
        return self.shared.choice(MOVING), self.shared.choice(SIZES)

    def inputs(self, count, dtype):
        """What each rank gives."""
        return [numbers(self.call, rank, count, dtype) for rank in range(self.size)]

    def blank(self, count, dtype):
        return self.placed(numbers(self.call, 99, count, dtype))

    def reducing(self, times=1):
        (dtype, op), count = self.shared.choice(REDUCING), self.shared.choice(SIZES)
        parts = self.inputs(times * count, dtype)
        return parts, op, mathematics(parts, name_of(op)), f"{op} {dtype} {count}", count, dtype

    def do_all_reduce(self):
        parts, op, expected, what, _, _ = self.reducing()
        mine = self.placed(parts[self.rank])
        self.later(what, lambda **how: dist.all_reduce(mine, op, self.group, **how), lambda: alike(mine, expected))

    def do_reduce(self):
        parts, op, expected, what, _, _ = self.reducing()
        mine, root, is_root = self.placed(parts[self.rank]), self.ranks[self.root], self.rank == self.root
        self.later(
            what,
            lambda **how: dist.reduce(mine, root, op, self.group, **how),
            lambda: not is_root or alike(mine, expected),
        )

    def do_reduce_scatter_tensor(self):
        parts, op, expected, what, count, dtype = self.reducing(self.size)
        mine, out, rank = self.placed(parts[self.rank]), self.blank(count, dtype), self.rank
        self.later(
            what,
            lambda **how: dist.reduce_scatter_tensor(out, mine, op, self.group, **how),
            lambda: alike(out, expected[rank * count : (rank + 1) * count]),
        )

    def do_reduce_scatter(self):
        parts, op, expected, what, count, dtype = self.reducing(self.size)
        mine = [self.placed(part) for part in parts[self.rank].split(count)] if count else [self.blank(0, dtype)] * 9
        mine, out, rank = mine[: self.size], self.blank(count, dtype), self.rank
        self.later(
            what,
            lambda **how: dist.reduce_scatter(out, mine, op, self.group, **how),
            lambda: alike(out, expected[rank * count : (rank + 1) * count]),
        )

    def do_broadcast(self):
        dtype, count = self.moving()
        parts = self.inputs(count, dtype)
        mine, expected = self.placed(parts[self.rank]), parts[self.root]
        root = self.ranks[self.root]
        self.later(
            f"{dtype} {count}",
            lambda **how: dist.broadcast(mine, root, self.group, **how),
            lambda: alike(mine, expected),
        )

    def do_all_gather(self):
        dtype, count = self.moving()
        parts = self.inputs(count, dtype)
        mine, out = self.placed(parts[self.rank]), [self.blank(count, dtype) for _ in parts]
        self.later(
            f"{dtype} {count}",
            lambda **how: dist.all_gather(out, mine, self.group, **how),
            lambda: all(map(alike, out, parts)),
        )

    def do_all_gather_into_tensor(self):
        dtype, count = self.moving()
        parts = self.inputs(count, dtype)
        mine, out = self.placed(parts[self.rank]), self.blank(self.size * count, dtype)
        self.later(
            f"{dtype} {count}",
            lambda **how: dist.all_gather_into_tensor(out, mine, self.group, **how),
            lambda: not count or all(map(alike, out.split(count), parts)),
        )

    def do_all_to_all_single(self):
        dtype, count = self.moving()
        lengths = [[self.shared.randrange(count + 1) for _ in self.ranks] for _ in self.ranks]
        if self.shared.random() < 0.5:
            lengths = [[count] * self.size] * self.size
        sent = [numbers(self.call, rank, sum(lengths[rank]), dtype) for rank in range(self.size)]
        received = [row[self.rank] for row in lengths]
        shares = [part.split(row)[self.rank].clone() for part, row in zip(sent, lengths, strict=True)]
        moved = [part.view(torch.uint8) for part in shares if part.numel()]
        expected = torch.cat([torch.empty(0, dtype=torch.uint8), *moved]).view(dtype)
        mine, out, splits = self.placed(sent[self.rank]), self.blank(sum(received), dtype), lengths[self.rank]
        self.later(
            f"{dtype} {lengths}",
            lambda **how: dist.all_to_all_single(out, mine, received, splits, self.group, **how),
            lambda: alike(out, expected),
        )

    def do_gather(self):
        dtype, count = self.moving()
        parts, is_root = self.inputs(count, dtype), self.rank == self.root
        mine, root = self.placed(parts[self.rank]), self.ranks[self.root]
        out = [self.blank(count, dtype) for _ in parts] if is_root else None
        self.later(
            f"{dtype} {count}",
            lambda **how: dist.gather(mine, out, root, self.group, **how),
            lambda: not is_root or all(map(alike, out, parts)),
        )

    def do_scatter(self):
        dtype, count = self.moving()
        parts, is_root = self.inputs(count, dtype), self.rank == self.root
        out, expected, root = self.blank(count, dtype), parts[self.rank], self.ranks[self.root]
        given = [self.placed(part) for part in parts] if is_root else None
        self.later(
            f"{dtype} {count}",
            lambda **how: dist.scatter(out, given, root, self.group, **how),
            lambda: alike(out, expected),
        )

    def do_barrier(self):
        self.later("", lambda **how: dist.barrier(self.group, **how), lambda: True)

    def do_messages(self):
        """A ring, to the right; the receives may name nobody, and may be made after the sends."""
        dtype, count, tag = *self.moving(), self.shared.randrange(3)
        parts, (left, right) = self.inputs(count, dtype), ((self.rank - 1) % self.size, (self.rank + 1) % self.size)
        out, mine, expected = self.blank(count, dtype), self.placed(parts[self.rank]), parts[left]
        form = self.shared.choice(["batch", "blocking", "begun", "anyone"])
        what = f"{form} {dtype} {count} tag {tag}"
        left, right = self.ranks[left], self.ranks[right]
        if form == "batch":
            ops = [
                dist.P2POp(dist.isend, mine, right, self.group, tag),
                dist.P2POp(dist.irecv, out, left, self.group, tag),
            ]
            works = dist.batch_isend_irecv(ops[:: self.own.choice([1, -1])])
        elif form == "begun" or self.size == 1:
            works = [dist.irecv(out, left, self.group, tag), dist.isend(mine, right, self.group, tag)]
        else:
            works = [dist.isend(mine, right, self.group, tag + 10)]
            # nobody else sends to this rank with this tag before all are here
            dist.recv(out, None if form == "anyone" else left, self.group, tag + 10)
            dist.barrier(self.group)
        for work in works[:-1]:
            self.pending.append((what, work, lambda: True))
        self.pending.append((what, works[-1], lambda: all(work.wait() for work in works) and alike(out, expected)))

    def do_objects(self):
        """Objects, small and large, some with arrays."""
        size = self.shared.choice(SMALL)
        made = [{"rank": rank, "array": np.arange(size) + rank, "text": "x" * rank} for rank in range(self.size)]
        out = [None] * self.size
        root, is_root = self.ranks[self.root], self.rank == self.root
        form = self.shared.choice(["all_gather", "gather", "broadcast", "scatter"])
        if form == "all_gather":
            dist.all_gather_object(out, made[self.rank], self.group)
            expected = made
        elif form == "gather":
            dist.gather_object(made[self.rank], out if is_root else None, root, self.group)
            expected = made if is_root else out
        elif form == "broadcast":
            out, expected = [made[self.rank]], [made[self.root]]
            dist.broadcast_object_list(out, root, self.group)
        else:
            out, expected = [None], [made[self.rank]]
            dist.scatter_object_list(out, made if is_root else None, root, self.group)
        assert str(out) == str(expected), (form, size)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rounds", [1, ROUNDS], ids=["straight", "loop"])
def test_random_program(rounds, seed, rank, size, monkeypatch):
    if rounds > 1:
        monkeypatch.setattr(issue, "LOOKS", 3)  # calls that come again are recognised sooner
    everyone = list(range(size))
    made = [(dist.new_group(ranks), sorted(ranks)) for ranks in (everyone, everyone[1:], everyone[:-1], everyone[::-1])]
    groups = [(dist.group.WORLD, everyone), *(each for each in made if len(each[1]) == size)]
    Program(seed, groups, rank).run(CALLS // rounds, rounds)
    for part in made[1:3]:  # whose calls only their members make
        if rank in part[1] and len(part[1]) > 1:
            Program(seed + 500, [part], rank).run(CALLS // 10)
    dist.barrier()
    for group, _ in made:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
