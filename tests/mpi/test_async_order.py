"""Property of asynchronous calls: whoever carries them out, they keep their order and their results, and all end.

Every rank makes the same calls on the same groups. Each rank chooses by itself which of them are asynchronous, and
when, where, in which order and with which limits it waits for them, if it does.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from datetime import timedelta

import pytest
import torch
from mpi4py import MPI

import hpcdist as dist

CALLS = int(os.environ.get("HPCDIST_TEST_CALLS", "0"))
FEW, MANY = 250, 1000  # on as many ranks as share the cores, and on one or two
SIZES = (1, 16, 16, 16, 300, 20_000)  # the last one wakes the worker at once
SECONDS = 60  # a wait that takes longer never ends


class Waiters:
    """Threads that wait for Works, beside the thread that makes the calls."""

    def __init__(self, number):
        self.given, self.wanted = deque(), threading.Semaphore(0)
        self.failures = []
        self.threads = [threading.Thread(target=self.serve, daemon=True) for _ in range(number)]
        for thread in self.threads:
            thread.start()

    def give(self, check):
        self.given.append(check)
        self.wanted.release()

    def serve(self):
        while True:
            self.wanted.acquire()
            check = self.given.popleft()
            if check is None:
                return
            try:
                check()
            except BaseException as error:
                self.failures.append(error)

    def end(self):
        for _ in self.threads:
            self.give(None)
        for thread in self.threads:
            thread.join(SECONDS)
        assert not any(thread.is_alive() for thread in self.threads), "a wait has not ended"
        assert not self.failures, self.failures


class Program:
    """The calls of one rank: the same as the other ranks', made and waited for in a way of its own."""

    def __init__(self, groups, rank, size, seed):
        self.common, self.own = random.Random(seed), random.Random(1000 * seed + rank + 1)
        self.groups, self.rank, self.size = groups, rank, size
        self.waiters = Waiters(2)
        self.open = []  # checks of what has not been waited for
        self.followed = []  # tensors of calls made by callbacks, and what they must hold

    def call(self, group, number):
        """Make one call; return its Work, or None, and what checks its result."""
        kind, count = self.common.choice(("sum", "sum", "sum", "gather", "from", "barrier")), self.common.choice(SIZES)
        is_async = self.own.random() < 0.8
        if kind == "barrier":
            return dist.barrier(group, async_op=is_async), lambda: True
        if kind == "gather":
            output = torch.empty(count * self.size)
            work = dist.all_gather_single(output, torch.full((count,), float(self.rank + number)), group, is_async)
            expected = torch.arange(self.size).repeat_interleave(count) + number
            return work, lambda: torch.equal(output, expected.float())
        if kind == "from":
            root = number % self.size
            tensor = torch.full((count,), float(number if self.rank == root else -1))
            work = dist.broadcast(tensor, group=group, group_src=root, async_op=is_async)
            return work, lambda: bool(tensor.eq(number).all())
        tensor = torch.full((count,), float(number))
        if self.own.random() < 0.1:
            tensor = torch.full((2, count), float(number)).t()[:, 0]  # goes by a copy
        work = dist.all_reduce(tensor, group=group, async_op=is_async)
        return work, lambda: bool(tensor.eq(number * self.size).all())

    def follow(self, group, number, work):
        """Have a callback make a call behind a call."""
        tensor = torch.full((5,), float(number))
        self.followed.append((tensor, number * self.size))

        is_async = self.own.random() < 0.5

        def made(_=None):
            dist.all_reduce(tensor, group=group, async_op=is_async)
            return tensor

        if work is None:
            made()
        else:
            work.get_future().then(made)

    def treat(self, work, is_right):
        """Wait for a call now, later, elsewhere, with limits, or never."""
        chosen = self.own.random()

        def check():
            assert work is None or work.wait()
            assert is_right()

        def check_by_future():
            if work is not None:
                work.get_future().wait()
            assert is_right()

        def check_by_limits():
            while work is not None:
                try:
                    assert work.wait(timedelta(microseconds=200))
                    break
                except dist.DistBackendError as error:
                    if "wait timeout" not in str(error):
                        raise
            assert is_right()

        def check_by_looking():
            while work is not None and not work.is_completed():
                time.sleep(20e-6)
            assert is_right()

        if chosen < 0.4:
            check()
        elif chosen < 0.5:
            self.waiters.give(check)
        elif chosen < 0.55:
            check_by_future()
        elif chosen < 0.6:
            check_by_limits()
        elif chosen < 0.63:
            self.waiters.give(check_by_limits)
        elif chosen < 0.66:
            check_by_looking()
        elif chosen < 0.9:
            self.open.append(check)
        # and else it is dropped
        if self.own.random() < 0.05:
            self.own.shuffle(self.open)
            while self.open and self.own.random() < 0.9:
                self.open.pop()()

    def run(self, calls):
        for number in range(1, calls + 1):
            group = self.common.choice(self.groups)
            work, is_right = self.call(group, number)
            if self.common.random() < 0.05:
                self.follow(group, number, work)
            self.treat(work, is_right)
            if self.own.random() < 0.01:
                time.sleep(self.own.random() * 2e-3)
        for check in self.open:
            check()
        self.waiters.end()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
def test_any_interleaving_of_calls_and_waits(seed, rank, size):
    groups = [dist.group.WORLD, dist.new_group(), dist.new_group()]
    program = Program(groups, rank, size, seed)
    program.run(CALLS or (MANY if size <= 2 else FEW))
    for group in groups[1:]:
        dist.destroy_process_group(group)  # what nobody waited for is carried out first
    dist.barrier()
    assert all(bool(tensor.eq(expected).all()) for tensor, expected in program.followed)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_group_is_destroyed_with_calls_queued(is_large, rank, size):
    for _ in range(20):
        group = dist.new_group()
        tensors = [torch.full((40_000 if is_large else 3,), float(number)) for number in range(10)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        if rank % 2:
            time.sleep(1e-4)
            works[4].wait()
        dist.destroy_process_group(group)
        assert all(work.is_completed() and work.wait() for work in works)
        assert all(bool(tensor.eq(number * size).all()) for number, tensor in enumerate(tensors))


def test_a_wait_with_a_limit_never_carries_its_call_out(two_ranks, rank):
    dist.barrier()
    if rank == 0:
        for _ in range(3):  # a small call, which a wait without a limit would carry out and block in
            work = dist.all_reduce(torch.ones(1), async_op=True)
            with pytest.raises(dist.DistBackendError, match="timeout after 50ms"):
                work.wait(timedelta(milliseconds=50))
            assert not work.is_completed()
        MPI.COMM_WORLD.Barrier()
        dist.barrier()
    else:
        MPI.COMM_WORLD.Barrier()  # until then those calls cannot end
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
        dist.barrier()


def test_the_first_large_calls_of_several_groups_at_once(size):
    """Each group makes its shared memory then, on a thread of its own: neither the GIL nor MPI may get in their way."""
    for _ in range(3):
        groups = [dist.new_group() for _ in range(6)]
        tensors = [torch.full((40_000,), float(number)) for number in range(6)]
        works = [
            dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, groups, strict=True)
        ]
        assert all(work.wait() for work in works)
        assert all(bool(tensor.eq(number * size).all()) for number, tensor in enumerate(tensors))
        for group in groups:
            dist.destroy_process_group(group)
