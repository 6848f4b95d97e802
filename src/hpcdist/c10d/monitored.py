"""Monitored barrier: waits until every rank of a group has come, or names the ranks that have not.

Each rank sends rank 0 a message with the number of its call. When rank 0 has received one from all, it asks each
whether it still waits, because a rank that has given up meanwhile cannot take its message back. When all have answered,
rank 0 releases them. Otherwise it sends all of them that it has given up: to ranks that wait, to release them, and to
ranks that come later, so that they do not count for the next barrier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch

from hpcdist.core import world
from hpcdist.core.backend import Backend
from hpcdist.core.errors import DistBackendError
from hpcdist.core.group import Group
from hpcdist.core.point_to_point import FIRST_KEPT
from hpcdist.core.ranks import format_ranks
from hpcdist.core.waiting import wait_until
from hpcdist.core.work import LONGEST_TIMEOUT, Work, check_timeout
from hpcdist.watch import report
from hpcdist.watch.watchdog import RUNNING

BARRIER_TAG = FIRST_KEPT


class Kind(IntEnum):
    """The meaning of a message between rank 0 and another rank."""

    HERE = 1  # to rank 0: in a call
    ASKED = 2  # to the rank: still in this call?
    STAYS = 3  # to rank 0: yes
    GO = 4  # to the rank: all have come
    GAVE_UP = 5  # to the rank: not all came


class BarrierMessage(NamedTuple):
    """A message between rank 0 and another rank."""

    kind: int  # a ``Kind``
    call: int  # the number of the other rank's call
    barrier: int = 0  # the number of rank 0's call; 0 if the other rank does not know it
    sequence: int = 0  # the number of collectives that rank 0 had called


def monitored_barrier(
    group: Group | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until every rank of a group has called this, or name the ranks that have not.

    Every rank of the group calls this; rank 0 receives a message from each and answers it. A rank that calls after
    rank 0 has given up gets this answer at once, and does not count for the next barrier. Unlike c10d's it works
    on every backend that carries CPU tensors.

    Args:
        group: the group; None for the default one.
        timeout: the longest wait; None for the group's limit.
        wait_all_ranks: name all missing ranks, not only the first.

    Raises:
        DistBackendError: a rank did not call in time; rank 0's error names it.
        TypeError: a timeout that is neither a timedelta nor a number of seconds.
    """
    if (pg := world.member_group(group, "monitored_barrier")) is None:
        return
    if not isinstance(timeout, (int, float)):
        check_timeout(timeout, may_be_zero=True)
    limit = timeout if timeout is not None else pg.timeout
    given = limit.total_seconds() if isinstance(limit, timedelta) else float(limit)
    seconds = min(given, LONGEST_TIMEOUT.total_seconds())
    backend = pg.any_backend()
    backend.settle()
    # it has a limit of its own, so that the watchdog does not end it, and is not counted: ranks that miss a barrier
    # are still in step with the others
    record = (pg.journal, pg.journal.sequence, "monitored_barrier", None, None, None)
    with pg.journal.blocking(record, limit=0.0):
        if backend.monitored_barrier(timedelta(seconds=seconds), wait_all_ranks):
            return
        deadline = time.monotonic() + seconds
        if pg.rank() == 0:
            lead(pg, deadline, seconds, wait_all_ranks)
        else:
            follow(pg, deadline)


setattr(Group, "monitored_barrier", monitored_barrier)  # noqa: B010  # c10d's method of a group; core knows no c10d


def is_in_time(work: Work, deadline: float) -> bool:
    """Poll a message until it has arrived; False if the time is over first."""
    return wait_until(work.is_completed, deadline - time.monotonic()) and work.exception() is None


def send(backend: Backend, peer: int, *fields: int) -> None:
    """Begin to send a ``BarrierMessage`` to a rank."""
    message = torch.tensor(BarrierMessage(*fields), dtype=torch.int64, device=backend.device)
    backend.isend(message, peer, BARRIER_TAG)


def receive(backend: Backend, peer: int, deadline: float) -> BarrierMessage | None:
    """Return the next message of a rank; None if the time is over first, or it has died."""
    received = torch.zeros(len(BarrierMessage._fields), dtype=torch.int64, device=backend.device)
    work = backend.irecv(received, peer, BARRIER_TAG, None)
    if is_in_time(work, deadline):
        return BarrierMessage(*received.tolist())
    if not work.is_completed():
        work._interrupt(f"monitored_barrier: rank {peer} did not answer in time")
        is_in_time(work, time.monotonic() + 1.0)
    return None


def lead(pg: Group, deadline: float, seconds: float, wait_all_ranks: bool) -> None:
    """Receive from every other rank, then answer each; the part of rank 0."""
    if seconds <= 0 and pg.size() > 1:  # with no time, no rank could be late
        raise DistBackendError(f"[Rank {pg.ranks[0]}]: Rank {pg.ranks[0]} timed out in monitoredBarrier after 0 ms")
    calls, sequence = pg.journal.monitored, pg.journal.sequence  # the last known call of each rank
    barrier = calls[0] = calls.get(0, 0) + 1
    backend, others = pg.any_backend(), range(1, pg.size())
    came: set[int] = set()

    def is_here(rank: int, is_asked: bool) -> bool:
        while message := receive(backend, rank, deadline):
            if message.kind == Kind.HERE:
                calls[rank] = message.call
                came.add(rank)
                if not is_asked:
                    return True
                # the previous message was of a call that the rank has left
                send(backend, rank, Kind.ASKED, message.call, barrier)
            elif is_asked and message.kind == Kind.STAYS and message.barrier == barrier:
                return True
        return False

    missing = absent(partial(is_here, is_asked=False), others, wait_all_ranks)
    if not missing:
        for rank in others:
            send(backend, rank, Kind.ASKED, calls[rank], barrier)
        missing = absent(partial(is_here, is_asked=True), others, wait_all_ranks)
    for rank in others:
        with suppress(DistBackendError):  # it has died
            if not missing:
                send(backend, rank, Kind.GO, calls[rank], barrier)
            else:  # a rank that has not come yet will come with its next call
                call = calls.get(rank, 0) + (rank not in came)
                send(backend, rank, Kind.GAVE_UP, call, barrier, sequence)
    if missing:
        ranks = ", ".join(str(pg.ranks[rank]) for rank in missing)
        raise DistBackendError(
            f"[Rank {pg.ranks[0]}]: Rank{'s' * (len(missing) > 1)} {ranks} failed to pass monitoredBarrier in "
            f"{seconds * 1000:.0f} ms{whereabouts_of(pg, missing)}"
        )


def absent(is_present: Callable[[int], bool], ranks: Iterable[int], are_all_named: bool) -> list[int]:
    """Return the ranks that are not present, or only the first."""
    missing = (rank for rank in ranks if not is_present(rank))
    return list(islice(missing, None if are_all_named else 1))


def follow(pg: Group, deadline: float) -> None:
    """Send rank 0 a message and wait for its answer; the part of the other ranks."""
    calls, sequence = pg.journal.monitored, pg.journal.sequence
    call = calls[pg.rank()] = calls.get(pg.rank(), 0) + 1
    backend = pg.any_backend()
    send(backend, 0, Kind.HERE, call)
    while message := receive(backend, 0, deadline):
        if message.call != call:  # it came too late for an earlier call
            continue
        if message.kind == Kind.ASKED:
            send(backend, 0, Kind.STAYS, call, message.barrier)
        elif message.kind == Kind.GO:
            return
        elif sequence <= message.sequence:  # else the ranks have met since: this rank missed it, and is not late
            break
    first = pg.ranks[0]
    raise DistBackendError(
        f"Rank {pg.ranks[pg.rank()]} successfully reached monitoredBarrier, but received errors while waiting for "
        f"send/recv from rank {first}. Please check rank {first} logs for faulty rank.{whereabouts_of(pg, [0])}"
    )


def whereabouts_of(pg: Group, ranks: list[int]) -> str:
    """Return the positions of ranks, as they answer themselves, or which of them have died according to MPI."""
    if not RUNNING:
        return ""
    asked, dead = [pg.ranks[rank] for rank in ranks], [pg.ranks[rank] for rank in pg.any_backend().faults.failed()]
    liveness, living = RUNNING[0].liveness, [rank for rank in asked if rank not in dead]
    answers = liveness.channel.ask(living, "where", 0.5, group=pg.group_name)
    judge = report.judge_of(liveness, answers)
    said = [
        f"{format_ranks([rank])} died"
        if rank in dead
        else f"{format_ranks([rank])} is {report.place(answers[rank], pg.group_name)}"
        if rank in answers
        else f"{format_ranks([rank])}: {judge(rank)}"
        for rank in asked
    ]
    return f" ({'; '.join(said)})"
