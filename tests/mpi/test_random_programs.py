"""Random programs of right calls: all kinds, dtypes, ops, sizes, layouts and groups, waited for in every way.

Every rank draws the same calls from one seed. From a seed of its own it draws what c10d leaves to each rank: how its
tensors lie in memory, whether they overlap, whether complex numbers are given as their parts, which calls are
asynchronous, through which door they go, and when, where and in which order it waits. A rank that made another MPI call
because of it would hang or truncate. Some programs are loops, whose calls come again on other values. The inputs are
numbers of a seed of their own, so that each rank knows what every result must be.
"""

import os
import random
import threading
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist

import hpcdist as dist
from hpcdist.backends.mpi.node.thresholds import BYTES, MIB
from hpcdist.core import issue
from hpcdist.core.buckets import ALONE_BYTES, BUCKET_BYTES
from hpcdist.core.reduction import KIND_OF, KINDS, name_of

from .expected import MOVING, OPS, equal, mathematics

# more of them once: HPCDIST_TEST_SEEDS=200
CALLS = int(os.environ.get("HPCDIST_TEST_CALLS", "100"))
SEEDS = range(int(os.environ.get("HPCDIST_TEST_SEEDS", "5")))
ROUNDS = 5  # of a loop
SMALL = [0, 1, 2, 31, 255, 1024]
SIZES = [*SMALL, 4095, 9000, 20_000, 70_001]
EDGES = sorted({at for rows in BYTES.values() for at in rows.values() if at <= 2 * MIB})  # bytes, of any library
LISTS = [  # bytes of calls on lists of tensors, at the edges of the buffers to which they are copied
    [ALONE_BYTES, 256],
    [ALONE_BYTES - 4, 256, 4],
    [BUCKET_BYTES, 4],
    [BUCKET_BYTES - 8, 8],
    [ALONE_BYTES // 2] * 9,
    [0, 16, 4 * ALONE_BYTES, 8],
]
PENDING = 6  # calls that may be under way at once
SECONDS = 60  # a wait that takes longer never ends
REDUCING = [(dtype, OPS[name]) for dtype, kind in KIND_OF.items() for name in OPS if OPS[name] in KINDS[kind]]
REAL, COMPLEX = (torch.float32, torch.float64), (torch.complex64, torch.complex128)


def contiguous(values):
    return values.clone()


def strided(values):
    return torch.stack([values, values], -1)[..., 0] if values.numel() else values.clone()


def with_offset(values):
    return torch.empty(values.numel() + 3, dtype=values.dtype)[3:].copy_(values)


def with_gradient(values):
    return values.clone().requires_grad_()


def negated(values):
    """A view whose memory says the opposite."""
    return torch.complex(torch.zeros_like(values), -values).conj().imag


def array(values):
    return values.numpy().copy()


def parts(values):
    """Complex numbers as pairs of real ones."""
    return torch.view_as_real(values).clone()


def conjugated(values):
    return values.conj().resolve_conj().conj()


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


def joined(parts, dtype):
    """Tensors one after the other; torch cannot concatenate all dtypes."""
    moved = [part.view(torch.uint8) for part in parts if part.numel()]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *moved]).view(dtype)


def alike(one, other):
    """Whether two tensors hold the same; one element with a stride is not copied by ``contiguous``."""
    one = torch.as_tensor(one).detach()
    if other.dtype.is_complex and not one.dtype.is_complex:
        one = torch.view_as_complex(one.contiguous())
    return equal(*(torch.empty(each.shape, dtype=each.dtype).copy_(each) for each in (one, other)))


def by_work(work):
    work.wait()


def by_future(work):
    work.get_future().wait()


def by_limits(work):
    while True:
        try:
            work.wait(timedelta(microseconds=200))
            return
        except dist.DistBackendError as error:
            if "wait timeout" not in str(error):
                raise


def by_looking(work):
    while not work.is_completed():
        time.sleep(20e-6)
    assert work.wait()


WAYS = [by_work, by_work, by_future, by_limits, by_looking]


class Program:
    """One random program on one rank.

    Args:
        seed: of the calls, the same on all ranks.
        groups: with the ranks of each; this rank is in all of them.
        rank: this rank.
        dtypes: of the tensors.
    """

    def __init__(self, seed, groups, rank, dtypes=tuple(MOVING)):
        self.seed, self.groups, self.world_rank = seed, groups, rank
        self.reductions, self.dtypes = [each for each in REDUCING if each[0] in dtypes], dtypes
        self.shared, self.own = random.Random(seed), random.Random(f"{seed} {rank}")
        self.doors = [dist, torch_dist] if torch_dist.is_initialized() else [dist]
        self.pending, self.threads, self.left = [], [], []

    def run(self, calls, rounds=1):
        """Make the calls, and check each; in each further round the same calls, on other values."""
        kinds = [getattr(self, name) for name in sorted(vars(Program)) if name.startswith("do_")]
        begin = self.shared.getstate()
        for number in range(calls * rounds):
            if number % calls == 0:
                self.shared.setstate(begin)
            self.group, self.ranks = self.shared.choice(self.groups)
            self.rank, self.size = self.ranks.index(self.world_rank), len(self.ranks)
            self.is_whole = False  # whether complex numbers may not be given as their parts
            self.call, self.door = self.seed * 1_000_000 + 100 * number, self.own.choice(self.doors)
            self.root = self.shared.randrange(self.size)
            self.is_root, self.root_rank = self.rank == self.root, self.ranks[self.root]
            self.kind = self.shared.choice(kinds)
            self.kind()
            while len(self.pending) > PENDING or (self.pending and self.own.random() < 0.3):
                self.end()
        while self.pending:
            self.end()
        for what, thread, ended in self.threads:
            thread.join(SECONDS)
            assert ended, f"a wait has failed or not ended: {what}"
        for group, _ in self.groups:
            dist.barrier(group)
        for what, check in self.left:
            assert check(), f"wrong values: {what}"

    def end(self):
        """Wait for one of the calls that are under way and check it, or have a thread do so, or leave it alone."""
        what, work, check = self.pending.pop(self.own.randrange(len(self.pending)))
        chosen, way, ended = self.own.random(), self.own.choice(WAYS), []
        if not hasattr(work, "get_future"):
            way = by_work

        def wait():
            if work is not None:
                way(work)
            assert check(), f"wrong values: {what}"
            ended.append(True)

        if chosen < 0.8:
            wait()
        elif chosen < 0.9:
            self.threads.append((what, threading.Thread(target=wait, daemon=True), ended))
            self.threads[-1][1].start()
        else:
            self.left.append((what, check))

    def later(self, what, call, check):
        """Make a call, asynchronous or not as this rank likes, whose values are checked when it has ended."""
        is_async, what = self.own.random() < 0.6, f"{self.kind.__name__[3:]} {what}, root {self.root}"
        with torch.no_grad():
            work = call(async_op=is_async)
        self.pending.append((what, work if is_async else None, check))
        if self.shared.random() < 0.05 and self.kind != self.do_list:  # a manager has no future
            self.follow(work if is_async else None)

    def follow(self, work):
        """Have a callback make a call behind a call."""
        tensor, group, expected, is_async = torch.ones(5), self.group, self.size, self.own.random() < 0.5

        def reduce(_=None):
            dist.all_reduce(tensor, group=group, async_op=is_async)

        reduce() if work is None else work.get_future().then(reduce)
        self.left.append(("in a callback", lambda: bool(tensor.eq(expected).all())))

    def placed(self, values):
        """Values in memory as this rank likes it."""
        layouts = [contiguous, strided, with_offset]
        if values.dtype in REAL:
            layouts += [with_gradient, negated]
        if self.door is dist:
            layouts += [array] if values.dtype in (*REAL, torch.int32, torch.uint8) else []
            layouts += [conjugated, parts][: 2 - self.is_whole] if values.dtype in COMPLEX else []
        return self.own.choice(layouts)(values)

    def drawn(self, dtype, times=1):
        """A number of elements, now and then at an edge where small messages become large, and what each rank gives."""
        count = self.shared.choice(SIZES)
        if self.shared.random() < 0.25:
            count = self.shared.choice(EDGES) // dtype.itemsize + self.shared.choice([-1, 0, 1])
        return count, [numbers(self.call, rank, times * count, dtype) for rank in range(self.size)]

    def moving(self):
        dtype = self.shared.choice(self.dtypes)
        return dtype, *self.drawn(dtype)

    def reducing(self, times=1):
        dtype, op = self.shared.choice(self.reductions)
        count, given = self.drawn(dtype, times)
        self.is_whole = op == dist.ReduceOp.PRODUCT  # of complex numbers, which torch refuses
        if self.is_whole and dtype.is_complex:
            self.door = dist
        return given, op, mathematics(given, name_of(op)), f"{op} {dtype} {count}", count, dtype

    def blank(self, count, dtype):
        return self.placed(numbers(self.call, 99, count, dtype))

    def inside(self, values, at, length):
        """Values, and a part of the same memory."""
        memory = torch.cat([values, values[:length]]) if values.numel() else values
        return memory[length:].copy_(values), memory[at : at + length]

    def do_all_reduce(self):
        given, op, expected, what, _, _ = self.reducing()
        mine, group = self.placed(given[self.rank]), self.group
        self.later(what, lambda **how: self.door.all_reduce(mine, op, group, **how), lambda: alike(mine, expected))

    def do_reduce(self):
        given, op, expected, what, _, _ = self.reducing()
        mine, is_root = self.placed(given[self.rank]), self.is_root
        self.later(
            what,
            lambda **how: self.door.reduce(mine, self.root_rank, op, self.group, **how),
            lambda: not is_root or alike(mine, expected),
        )

    def do_reduce_scatter_tensor(self):
        """The output lies before the input, in its own block, or across two, on some ranks."""
        given, op, expected, what, count, dtype = self.reducing(self.size)
        mine, out = self.placed(given[self.rank]), self.blank(count, dtype)
        part = expected.split(count)[self.rank :][:1]
        if count and self.own.random() < 0.4:
            at = self.own.choice([0, count * (self.rank + 1), count // 2])
            mine, out = self.inside(given[self.rank], at, count)
        self.later(
            what,
            lambda **how: self.door.reduce_scatter_tensor(out, mine, op, self.group, **how),
            lambda: not count or alike(out, part[0]),
        )

    def do_reduce_scatter(self):
        """Shares that may differ."""
        dtype, op = self.shared.choice(self.reductions)
        counts, self.is_whole, self.door = self.shares()[0], op == dist.ReduceOp.PRODUCT, dist
        given = [numbers(self.call, rank, sum(counts), dtype) for rank in range(self.size)]
        mine = [self.placed(each) for each in given[self.rank].split(counts)]
        out, expected = self.blank(counts[self.rank], dtype), mathematics(given, name_of(op)).split(counts)[self.rank]
        self.later(
            f"{op} {dtype} {counts}",
            lambda **how: dist.reduce_scatter(out, mine, op, self.group, **how),
            lambda: alike(out, expected),
        )

    def do_broadcast(self):
        dtype, count, given = self.moving()
        mine, expected = self.placed(given[self.rank]), given[self.root]
        self.later(
            f"{dtype} {count}",
            lambda **how: self.door.broadcast(mine, self.root_rank, self.group, **how),
            lambda: alike(mine, expected),
        )

    def do_all_gather(self):
        dtype, counts = self.shared.choice(self.dtypes), self.shares()[0]
        if len({*counts}) > 1:  # torch's door takes equal ones
            self.door = dist
        given = [numbers(self.call, rank, count, dtype) for rank, count in enumerate(counts)]
        mine, out = self.placed(given[self.rank]), [self.blank(count, dtype) for count in counts]
        self.later(
            f"{dtype} {counts}",
            lambda **how: self.door.all_gather(out, mine, self.group, **how),
            lambda: all(map(alike, out, given)),
        )

    def do_all_gather_into_tensor(self):
        """The input is a part of the output, its own or another one, on some ranks."""
        dtype, count, given = self.moving()
        mine, out = self.placed(given[self.rank]), self.blank(self.size * count, dtype)
        if self.own.random() < 0.4:
            out, at = torch.zeros(self.size * count, dtype=dtype), count * self.own.randrange(self.size)
            mine = out[at : at + count].copy_(given[self.rank])
        self.later(
            f"{dtype} {count}",
            lambda **how: self.door.all_gather_into_tensor(out, mine, self.group, **how),
            lambda: alike(out, joined(given, dtype)),
        )

    def shares(self):
        """Elements of each rank for each: all equal, or ragged with one rank's all equal and another's none."""
        most = self.shared.choice(SMALL) if self.shared.random() < 0.8 else self.shared.choice(SIZES)
        if self.shared.random() < 0.4:
            return [[most] * self.size] * self.size
        table = [[self.shared.randrange(most + 1) for _ in self.ranks] for _ in self.ranks]
        equal_one, silent = self.shared.randrange(self.size), self.shared.randrange(self.size)
        table[silent], table[equal_one] = [0] * self.size, [most] * self.size
        for row in table:
            row[equal_one] = most
        return table

    def exchanged(self):
        """A dtype, the elements that this rank sends to each and receives, and those that it sends and expects."""
        dtype, table = self.shared.choice(self.dtypes), self.shares()
        sent = [numbers(self.call, rank, sum(row), dtype).split(row) for rank, row in enumerate(table)]
        received = [row[self.rank] for row in table]
        return dtype, table[self.rank], received, sent[self.rank], [each[self.rank] for each in sent]

    def do_all_to_all(self):
        dtype, sent, received, given, expected = self.exchanged()
        mine, out = [self.placed(each) for each in given], [self.blank(count, dtype) for count in received]
        self.later(
            f"{dtype} {sent} {received}",
            lambda **how: self.door.all_to_all(out, mine, self.group, **how),
            lambda: all(map(alike, out, expected)),
        )

    def do_all_to_all_single(self):
        """Ranks whose shares are all equal may give splits or not; equal shares may be exchanged in place."""
        dtype, sent, received, given, expected = self.exchanged()
        whole, right = joined(given, dtype), joined(expected, dtype)
        mine, out = self.placed(whole), self.blank(sum(received), dtype)
        if len({*sent, *received}) == 1 and self.own.random() < 0.7:
            sent, received = self.own.choice([(None, None), (sent, None), ([], received)])
            if self.own.random() < 0.4:
                self.door, mine = dist, whole
                out = mine
        self.later(
            f"{dtype} {sent} {received}",
            lambda **how: self.door.all_to_all_single(out, mine, received, sent, self.group, **how),
            lambda: alike(out, right),
        )

    def do_gather(self):
        dtype, count, given = self.moving()
        mine, is_root = self.placed(given[self.rank]), self.is_root
        out = [self.blank(count, dtype) for _ in given] if is_root else None
        self.later(
            f"{dtype} {count}",
            lambda **how: self.door.gather(mine, out, self.root_rank, self.group, **how),
            lambda: not is_root or all(map(alike, out, given)),
        )

    def do_scatter(self):
        dtype, count, given = self.moving()
        out, expected = self.blank(count, dtype), given[self.rank]
        mine = [self.placed(each) for each in given] if self.is_root else None
        self.later(
            f"{dtype} {count}",
            lambda **how: self.door.scatter(out, mine, self.root_rank, self.group, **how),
            lambda: alike(out, expected),
        )

    def do_list(self):
        """Tensors that are reduced together, in one call or in several that a manager joins."""
        (dtype, op), lengths = self.shared.choice(self.reductions), self.shared.choice(LISTS)
        self.is_whole, self.door = op == dist.ReduceOp.PRODUCT, dist
        given = [
            [numbers(self.call + place, rank, length // dtype.itemsize, dtype) for rank in range(self.size)]
            for place, length in enumerate(lengths)
        ]
        mine = [self.placed(each[self.rank]) for each in given]
        expected = [mathematics(each, name_of(op)) for each in given]

        def in_manager(async_op):
            with dist._coalescing_manager(self.group, async_ops=async_op) as manager:
                for each in mine:
                    dist.all_reduce(each, op, self.group)
            return manager

        def at_once(async_op):
            return dist.all_reduce_coalesced(mine, op, self.group, async_op)

        self.later(
            f"{op} {dtype} {lengths}",
            self.shared.choice([in_manager, at_once]),
            lambda: all(map(alike, mine, expected)),
        )

    def do_all_gather_coalesced(self):
        dtype, lengths, self.door = self.shared.choice(self.dtypes), self.shared.choice(LISTS), dist
        counts = [length // dtype.itemsize for length in lengths]
        given = [
            [numbers(self.call + place, rank, count, dtype) for place, count in enumerate(counts)]
            for rank in range(self.size)
        ]
        mine = [self.placed(each) for each in given[self.rank]]
        out = [[self.blank(n, dtype) for n in counts] for _ in given]
        self.later(
            f"{dtype} {lengths}",
            lambda **how: dist.all_gather_coalesced(out, mine, self.group, **how),
            lambda: all(all(map(alike, *each)) for each in zip(out, given, strict=True)),
        )

    def do_barrier(self):
        self.later("", lambda **how: self.door.barrier(self.group, **how), lambda: True)

    def do_messages(self):
        """A ring, to the right; the receives may name nobody, and may be made after the sends."""
        (dtype, count, given), tag = self.moving(), self.shared.randrange(3)
        self.is_whole, left, right = True, (self.rank - 1) % self.size, (self.rank + 1) % self.size
        out, mine, expected = self.blank(count, dtype), self.placed(given[self.rank]), given[left]
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
@pytest.mark.parametrize("kind", ["straight", "loop", "compared"])
def test_random_program(kind, seed, rank, size, monkeypatch, request):
    calls, rounds, dtypes = CALLS, 1, tuple(MOVING)
    if kind == "loop":  # of calls that are alike but for sizes, op and root, some of which are prepared
        monkeypatch.setattr(issue, "LOOKS", 3)
        calls, rounds = 2 * CALLS // ROUNDS, ROUNDS
        dtypes = (torch.float32, (torch.bfloat16, torch.int32, torch.complex64)[seed % 3])
    elif kind == "compared":
        request.addfinalizer(lambda: dist.set_debug_level(dist.DebugLevel.OFF))
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    everyone = list(range(size))
    made = [(dist.new_group(ranks), sorted(ranks)) for ranks in (everyone, everyone[1:], everyone[:-1], everyone[::-1])]
    groups = [(dist.group.WORLD, everyone), *(each for each in made if len(each[1]) == size)]
    Program(seed, groups, rank, dtypes).run(calls, rounds)
    for part in made[1:3]:  # whose calls only their members make
        if rank in part[1] and len(part[1]) > 1:
            Program(seed + 500, [part], rank).run(CALLS // 10)
    dist.barrier()
    for group, _ in made:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
