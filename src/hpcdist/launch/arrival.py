"""Arrival at ``init_process_group``: shows which ranks of this node have not called it, while MPI waits for them.

No group exists at that point. Each rank that has called ``init_process_group`` therefore opens an abstract socket
(unix(7)) whose name contains its rank; the ranks of the node are read from the environments of this user's processes.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

from hpcdist.core.printing import add_hint, write_to_stderr
from hpcdist.core.ranks import format_ranks
from hpcdist.launch import environment

PREFIX = "hpcdist-init-"
SECONDS = 10.0  # seconds after which a waiting rank reports


class Arrival(NamedTuple):
    """A process in ``init_process_group``: its id, rank, and the number of ranks for which it waits."""

    process: int
    rank: int
    size: int


@contextmanager
def if_it_takes_long(report: Callable[..., object], *arguments: Any) -> Iterator[None]:
    """Call a function, on another thread, if the block has not ended after ``SECONDS``."""
    timer = Timer(SECONDS, report, arguments)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def announce(rank: int, size: int) -> Iterator[None]:
    """Announce that this rank has come, and report which have not if that takes long."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        with suppress(OSError):
            made.bind(f"\0{PREFIX}{os.getuid()}-{os.getpid()}-{rank}-{size}")
        with if_it_takes_long(report, rank, size):
            yield


def report_wait(launch: environment.Launch | None, is_first: bool) -> AbstractContextManager[None]:
    """Report, on rank 0 only, that it waits for the other processes, if they do not meet in a while; without MPI."""
    if not is_first:
        return nullcontext()
    text = f"[rank 0] init_process_group has waited for {SECONDS:.0f} s: not all other processes have come to it"
    if launch is not None and launch.name == environment.EXPORTED.name:
        text += f". RANK and WORLD_SIZE say {launch.place}: if a job script set them, {environment.START}"
    return if_it_takes_long(write_to_stderr, add_hint(text, "not-all-have-come") + "\n")


def arrivals() -> list[Arrival]:
    """Return this user's processes on this machine that are in ``init_process_group``."""
    names = ""
    with suppress(OSError):  # there is no /proc
        names = Path("/proc/net/unix").read_text(errors="replace")  # other programs' names may be any bytes
    found = re.findall(rf"@{PREFIX}{os.getuid()}-(\d+)-(\d+)-(\d+)$", names, re.MULTILINE)
    return sorted(Arrival(*map(int, each)) for each in found if variables(int(each[0])))


def variables(process: int) -> dict[str, str]:
    """Return the environment of a process; empty if it has ended or is another user's."""
    try:
        parts = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(part.decode(errors="replace").split("=", 1) for part in parts if b"=" in part)


def ancestors(process: int) -> Iterator[int]:
    """Yield the parents of a process, the nearest first; the last is the first without a rank, the launcher's."""
    while True:
        try:
            parent = int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, IndexError):
            return
        yield parent
        if parent <= 1 or environment.detect(variables(parent)) is None:
            return
        process = parent


def launcher_of(process: int) -> int:
    """Return the nearest parent of a process without a rank: the launcher's process on this node."""
    return [0, *ancestors(process)][-1]


def is_rank() -> bool:
    """Tell whether the launcher started this process, at most by a shell, and not another Python of the job."""
    between = list(ancestors(os.getpid()))[:-1]
    return not any(Path(program(each)).name.startswith("python") for each in between)


def program(process: int) -> str:
    """Return the path of a process's program; empty if it has ended or is another user's."""
    try:
        return os.readlink(f"/proc/{process}/exe")
    except OSError:
        return ""


def ranks_here(launcher: int) -> dict[int, list[int]]:
    """Return the ranks that a launcher has started on this node, and the processes of each."""
    found: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        launch = environment.detect(variables(int(folder.name)))
        if launch is not None and launcher_of(int(folder.name)) == launcher:
            found.setdefault(launch.rank, []).append(int(folder.name))
    return found


def report(rank: int, size: int) -> None:
    """Report the ranks that have not come; the first waiting rank of the node does so.

    The report has no names if the world is not the launcher's, whose ranks have other numbers.
    """
    launch, launcher = environment.detect(), launcher_of(os.getpid())
    come = {each.process: each.rank for each in arrivals() if launcher_of(each.process) == launcher}
    if any(other < rank for other in come.values()):
        return
    here = ranks_here(launcher) if launch is not None and launch.size in (size, environment.UNKNOWN) else {}
    missing = {each: min(here[each]) for each in sorted(here) if come.keys().isdisjoint(here[each])}
    which = "of other ranks, none of them on this node, one"
    if missing:
        processes = f"{'process' if len(missing) == 1 else 'processes'} {', '.join(map(str, missing.values()))}"
        which = f"{format_ranks(list(missing))} of this node ({processes})"
    text = (
        f"[rank {rank} of {size}] init_process_group has waited in MPI for {SECONDS:.0f} s: {which} "
        f"{'have' if len(missing) > 1 else 'has'} not come to it. Every rank calls it, in the same place among the "
        "program's own calls of MPI"
    )
    write_to_stderr(add_hint(text, "not-all-have-come") + "\n")
