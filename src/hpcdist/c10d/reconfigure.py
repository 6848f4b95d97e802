"""Reconfiguration: the ranks of the default group chosen anew, by torch's names (since torch 2.14, for gloo and NCCL).

The program finds out by means of its own who is to be in the group: each process has a *handle*, a text, and all of
them are given the same handles. The group stays the same object, so that DDP and others that hold it go on with it.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, NamedTuple
from zlib import crc32

from hpcdist.core import registry
from hpcdist.core.backend import Backend, Bootstrap
from hpcdist.core.process_group import ProcessGroup
from hpcdist.core.work import Work
from hpcdist.core.world import WORLD, default_group
from hpcdist.watch import watchdog
from hpcdist.watch.logs import LOG
from hpcdist.watch.process_exit import EXIT

PREFIX = "hpcdist"


class Options(NamedTuple):
    """What c10d's ``ReconfigureOptions`` hold, which torch has since 2.14."""

    uuid: int
    handles: set[str] | list[str]
    timeout: timedelta | None
    hints: dict[str, str]


class Handle(NamedTuple):
    """What names a process, and which reconfiguration was its last: an older handle is no longer valid."""

    job: str
    rank: int  # in the default group as it was first made
    uuid: int  # of its last reconfiguration; -1 before the first
    host: str
    pid: int

    def __str__(self) -> str:
        return ":".join((PREFIX, *map(str, self)))

    @classmethod
    def read(cls, text: Any, job: str, size: int) -> Handle:
        """Return the handle of a text; RuntimeError if it is none of the job's."""
        try:
            prefix, its_job, rank, uuid, host, pid = text.split(":")
            found = cls(its_job, int(rank), int(uuid), host, int(pid))
        except (AttributeError, ValueError):
            prefix = ""
        if prefix != PREFIX or not 0 <= found.rank < size:
            raise RuntimeError(
                f"Invalid reconfigure handle: {text!r}; expected what _get_reconfigure_handle() returned"
            )
        if found.job != job:
            raise RuntimeError(
                f"reconfigure handle {text!r} is of another job: a process that a launcher started later cannot "
                "join MPI's ranks; start all that may be needed together, and reconfigure with some of them"
            )
        return found


class Membership:
    """What a group needs to be reconfigured; every rank of it makes this.

    Args:
        group: the default group.
        cpu: what carries its CPU tensors, by MPI.
    """

    def __init__(self, group: ProcessGroup, cpu: Backend) -> None:
        self.group = group
        self.carriers = {device: each.name for device, each in group.backends.items()}
        # of every process that the ranks may be chosen from
        self.base: Any = cpu.split([list(range(cpu.size))], ["reconfigure"], group.timeout)
        group.membership = self
        self.job = watchdog.RUNNING[0].recorder.name  # the same on all ranks
        self.last = -1
        self.used: set[int] = set()

    def handle(self) -> Handle:
        """Return this process's handle."""
        return Handle(self.job, self.base.rank, self.last, socket.gethostname(), os.getpid())

    def check(self, handles: Any) -> list[Handle]:
        """Return the handles in the order of the new ranks, or raise c10d's RuntimeError."""
        if not handles:
            raise RuntimeError("reconfigure requires at least one handle")
        found = [Handle.read(each, self.job, self.base.size) for each in handles]
        if isinstance(handles, (set, frozenset)):
            found.sort()
        if len({each.rank for each in found}) < len(found):
            raise RuntimeError(f"reconfigure handles must be unique, one of each process; got {', '.join(handles)}")
        if (own := self.handle()) not in found:
            older = [str(each) for each in found if each.rank == own.rank]
            what = f"an older one is: {older[0]}" if older else "only others are"
            raise RuntimeError(
                f"this process's reconfigure handle {own} is not among the {len(found)} given, {what}; "
                "each reconfigure makes the handles before it invalid"
            )
        return found

    def reconfigure(self, opts: Any) -> None:
        """Choose the ranks anew (see ``_reconfigure``)."""
        group, base, uuid = self.group, self.base, opts.uuid
        members = self.check(opts.handles)
        if uuid in self.used:
            raise RuntimeError(f"reconfigure uuid {uuid} was already used; each reconfigure() requires a unique uuid")
        self.used.add(uuid)
        ranks = [each.rank for each in members]
        base.call_roll(ranks, uuid, crc32(" ".join(map(str, members)).encode()), opts.timeout or group.timeout)
        with group.journal.during("reconfigure"):
            cpu = base.regroup(ranks, f"reconfigure-{uuid}")
            made = max(cpu.objects.all_gather(WORLD.count()))
            bootstrap = Bootstrap(cpu.rank, cpu.size, group.timeout, device_id=group.bound_device_id)
            backends = registry.connect_all(self.carriers, bootstrap, cpu)
        for each in list(WORLD.groups.values()):
            queues = [backend.queue for backend in each.backends.values() if backend.queue is not None]
            # only what this process has under way: one that is not chosen may be at the end of a call with it
            reason = f"the ranks of the default group were chosen anew (reconfigure {uuid})"
            if any(queue.pending() for queue in queues):
                each.revoke(reason)
            each.drop(reason)
            if each is not group:
                WORLD.remove(each)
        self.last = uuid
        group.form(tuple(range(cpu.size)), cpu.rank, backends)
        WORLD.renumber(group, made)
        watchdog.RUNNING[0].begin_anew()
        watchdog.begin(group)
        EXIT.backend = cpu
        LOG.info("reconfigured: rank %d of %d", cpu.rank, cpu.size, extra={"group": group.group_name})


def enable(group: Any) -> None:
    """Let a default group be reconfigured, if MPI carries it; every rank of it calls this."""
    if group.cpu is not None and group.cpu.name == "mpi":
        Membership(group, group.cpu)


def meant(group: ProcessGroup | None) -> Any:
    """Return a group, the default one for None; it may have been aborted."""
    return group if group is not None else default_group()


def _supports_reconfigure(group: ProcessGroup | None = None) -> bool:
    """Tell whether ``_reconfigure`` can choose a group's ranks anew.

    Args:
        group: the group; None for the default one.

    Source: c10d's private name since torch 2.14.
    """
    return bool(meant(group).supports_reconfigure)


def _get_reconfigure_handle(group: ProcessGroup | None = None) -> str:
    """Return the text that names this process to the others, until the next ``_reconfigure``.

    Args:
        group: the group; None for the default one.

    Raises:
        RuntimeError: a group that cannot be reconfigured.

    Source: c10d's private name since torch 2.14.
    """
    return str(meant(group).get_reconfigure_handle())


def _reconfigure(
    uuid: int,
    handles: set[str] | list[str],
    group: ProcessGroup | None = None,
    timeout: timedelta | None = None,
    hints: dict[str, str] | None = None,
) -> Work:
    """Choose the ranks of the default group anew among the processes of the job; only those chosen call this.

    The group stays the same object, with other ranks, and takes calls when this returns. Its communicators are made
    anew; asynchronous calls of these processes that are under way on the old ones raise if this MPI can do so (ULFM),
    and elsewhere there must be none. All other groups of these processes end. A process that is not chosen keeps its
    old group, on which it cannot call anybody any more, and may be chosen later. If this raises, the group stays.

    Args:
        uuid: a number that no other reconfiguration of this job has, the same on all that call.
        handles: what ``_get_reconfigure_handle`` returned on each process that is chosen, the same on all that call.
            In a list the order is that of the new ranks; a set is put in the order of the job's first ranks.
        group: the default group, or None.
        timeout: how long to wait for the others; None for the group's.
        hints: taken as c10d takes it, and ignored.

    Returns:
        A Work that is done.

    Raises:
        RuntimeError: a group that cannot be reconfigured, or handles or a uuid that cannot be.
        DistBackendError: one of those chosen has died, did not come, or was given other handles.

    Source: c10d's private name since torch 2.14; MPI_Comm_create_group, under ULFM MPI_Comm_create_from_group.
    """
    work: Work = meant(group).reconfigure(Options(uuid, handles, timeout, hints or {}))
    return work
